"""A request becomes a job on the card that its own environment names."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.overhead import COMMUNICATOR_BYTES
from autotrain_mem.planning import read_request
from autotrain_mem.types import Hardware
from autotrain_mem.types.autofit import AutoFit

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "1,0"}
CARD = replace(named("rtx3090"), origin="detected", uuid="GPU-1")


def test_an_env_block_chooses_the_card_to_plan_for_and_to_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(name: str | None, *, environment: Any, **others: Any) -> Hardware:
        return CARD if environment == ENVIRONMENT else named("t4")

    monkeypatch.setattr(read_request, "choose", choose)
    workers: Any = SimpleNamespace(first=SimpleNamespace(parse=lambda *words: ({}, TRL_DEFAULTS)))
    rehearsals = api.rehearsals_for(workers, api.RunRequest(method="sft", model="tiny", environment=ENVIRONMENT), print)
    assert rehearsals.hardware is CARD
    plan: Any = SimpleNamespace(knobs=TRL_DEFAULTS)
    assert api.training_environment(rehearsals, plan, simulate=False)["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    elsewhere = replace(rehearsals, hardware=named("t4"))  # an export for a card that is not here
    assert api.training_environment(elsewhere, plan, simulate=False)["CUDA_VISIBLE_DEVICES"] == "1"


def test_defaults_are_those_of_one_of_all_processes_and_a_sharding_is_the_jobs_word() -> None:
    def parse(method: str, argv: Any, config: Any, environment: Any, names: Any, pins: Any, own: Any) -> Any:
        return dict(pins), TRL_DEFAULTS

    workers: Any = SimpleNamespace(first=SimpleNamespace(parse=parse))
    for words, processes, sharding, groups, communicators in (
        ({}, 1, None, None, 0),
        ({"gpus": 4}, 4, "ddp", None, 1),
        ({"gpus": 4, "sharding": "fsdp2"}, 4, "ddp", None, 1),
        ({"gpus": 8, "nodes": 2, "sharding": "hsdp"}, 16, "ddp", 2, 3),
    ):
        request = api.RunRequest(method="sft", model="tiny", autofit=AutoFit(gpu="a100-80gb", **words))
        rehearsals = api.rehearsals_for(workers, request, print)
        defaults = rehearsals.defaults
        assert (defaults.processes, defaults.sharding, defaults.dp_replicate_size) == (processes, sharding, groups)
        assert rehearsals.job.arguments.get("sharding") == words.get("sharding")
        assert rehearsals.job.trl_arguments == {}
        # NCCL's buffers are no part of the allocator's room, and are counted once for each group that talks.
        needed = rehearsals.outside_bytes(replace(defaults, sharding=words.get("sharding", sharding)))
        assert needed == rehearsals.hardware.non_torch_bytes + communicators * COMMUNICATOR_BYTES
        assert "sharding" in words or rehearsals.on(named("t4")).defaults == TRL_DEFAULTS


def test_a_run_whose_plan_cannot_be_followed_is_gone_on_with_and_says_so(tmp_path: Path) -> None:
    request = api.RunRequest(method="sft", argv=("--resume_from_checkpoint", "--output_dir", str(tmp_path)))
    notes: list[str] = []
    assert api.resumed(request, notes.append) is request
    assert not notes, "there is no plan"
    (tmp_path / "plan.json").write_text('{"schema": "autofit.plan/1"}')
    assert api.resumed(request, notes.append) is request
    assert "continues with a new plan" in notes[0]
    assert "autofit.plan/1" in notes[0]
