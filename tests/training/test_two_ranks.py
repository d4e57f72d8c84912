"""Two real ranks on the CPU, each under a simulated card: they train as one process does, end together, and go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nouns import TRL_DEFAULTS
from place import write_rows
from safetensors.torch import load_file

from autotrain_mem.machine.catalog import named
from autotrain_mem.training import launch
from autotrain_mem.training.checkpoint_kinds import form_of
from autotrain_mem.training.checkpoints import newest_start, processes_of
from autotrain_mem.training.environment import process_environment
from autotrain_mem.training.launch import Event
from autotrain_mem.training.task import Request
from autotrain_mem.types import Job, Topology
from tests.forked import Forge

STEPS = 3
ROWS = 4
"""Of a step, of all processes."""


@pytest.mark.slow
def test_ranks_that_hold_shards_end_after_the_same_step_go_on_and_train_as_one_process_does(
    qwen: Path, tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = Job(
        method="sft",
        model=str(qwen),
        dataset=str(tmp_path / "data.jsonl"),
        arguments={"max_steps": STEPS, "logging_steps": 1, "save_steps": 100, "bf16": False, "report_to": "none"},
    )

    def train(processes: int, folder: str, on_event: Callable[[Event], None], **more: Any) -> list[float]:
        (tmp_path / folder).mkdir(exist_ok=True)
        knobs = replace(TRL_DEFAULTS, per_device_train_batch_size=ROWS // processes, max_length=64)
        knobs = replace(knobs, processes=processes, sharding="fsdp2" if processes > 1 else None)
        hardware = replace(named("1GiB"), topology=Topology(devices=processes))
        request = Request(
            task="train",
            job=replace(job, arguments=job.arguments | more),
            knobs=knobs,
            hardware=hardware,
            simulate=True,
            output_dir=str(tmp_path / folder),
        )
        environment, losses = process_environment(hardware, knobs, {}, simulate=True), []

        def hear(event: Event) -> None:
            losses.extend([event["logs"]["loss"]] if "loss" in event.get("logs", ()) else [])
            on_event(event)

        with forge.children():
            ended = launch.train(request, environment, tmp_path / folder / "train.log", hear)
        assert isinstance(ended, dict), ended
        return losses

    def interrupt(event: Event) -> None:
        if event["event"] == "step" and event["step"] == 1:
            raise KeyboardInterrupt

    first = train(2, "two", interrupt)
    checkpoint = newest_start(tmp_path / "two")
    assert checkpoint is not None
    assert checkpoint.step == len(first) < STEPS
    assert (form_of(checkpoint.path), processes_of(checkpoint.path)) == ("shards", 2)
    rest = train(2, "two", lambda event: None, resume_from_checkpoint=str(checkpoint.path))
    alone = train(1, "one", lambda event: None)
    assert [*first, *rest] == pytest.approx(alone, rel=1e-5)  # sums of two halves
    two, one = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert one.keys() <= two.keys()  # a tied head is written beside the embedding that it is
    assert all((two[name] - weight).abs().max() < 1e-4 for name, weight in one.items())
