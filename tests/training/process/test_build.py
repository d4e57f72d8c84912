"""The real trainer, as it is built: the same command gives the same weights to train; and peaks of each phase.

The process that trains answers once its log says why.
"""

import errno
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from nouns import TRL_DEFAULTS

from autotrain_mem.cli.word_problems import write_rows
from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.detect import host
from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.support import codec
from autotrain_mem.support.units import MIB
from autotrain_mem.training.process import main as process
from autotrain_mem.training.process import train
from autotrain_mem.training.process.build import PhasePeaks, build, real_device
from autotrain_mem.training.task import Request
from autotrain_mem.types import Job, Phase
from autotrain_mem.types.experience import PhasePeak

ADAPTER = replace(TRL_DEFAULTS, use_peft=True, lora_target_modules=("all-linear",), max_length=32)


@pytest.mark.parametrize(("method", "drawn"), [("sft", "lora_A"), ("reward", "score")])
def test_what_is_drawn_before_training_follows_from_the_seed(
    qwen: Path, tmp_path: Path, method: str, drawn: str
) -> None:
    row = {"text": "a word"} if method == "sft" else {"prompt": "a", "chosen": " word", "rejected": " b"}
    write_rows(tmp_path / "rows.jsonl", [row] * 2)

    def weights(seed: int) -> list[torch.Tensor]:
        torch.seed()  # as a new process begins
        job = Job(
            method=method,
            model=str(qwen),
            dataset=str(tmp_path / "rows.jsonl"),
            arguments={"seed": seed, "use_cpu": True, "bf16": False, "report_to": "none"},
        )
        knobs = ADAPTER if method == "sft" else replace(TRL_DEFAULTS, max_length=32)
        request = Request(
            task="train", job=job, knobs=knobs, hardware=host(), simulate=False, output_dir=str(tmp_path / "out")
        )
        with real_device(request) as device:
            trainer = build(request, device.placed)
        return [weight.detach() for name, weight in trainer.model.named_parameters() if drawn in name]

    first, again, other = weights(7), weights(7), weights(8)
    assert first
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(first, other, strict=True))


def test_each_phase_has_its_own_peak_and_one_that_comes_again_the_larger() -> None:
    gpu = SimulatedGpu(named("100MiB"))
    peaks = PhasePeaks(gpu.reading, gpu.reset_peaks)
    gpu.allocate(1, 20 * MIB)
    for number, size_mib in ((2, 30), (3, 50), (4, 40)):
        peaks.enter_phase(Phase.FORWARD)
        gpu.allocate(number, size_mib * MIB)
        gpu.free(number)
        gpu.empty_cache()
        peaks.enter_phase(Phase.BACKWARD)
    assert peaks.peaks() == {
        Phase.LOAD: PhasePeak(allocated_bytes=20 * MIB, reserved_bytes=20 * MIB),
        Phase.FORWARD: PhasePeak(allocated_bytes=70 * MIB, reserved_bytes=70 * MIB),
        Phase.BACKWARD: PhasePeak(allocated_bytes=20 * MIB, reserved_bytes=20 * MIB),
    }


@pytest.mark.parametrize(
    ("error", "phase"), [(torch.OutOfMemoryError, Phase.EVALUATE), (KeyError, Phase.FORWARD)], ids=["full", "other"]
)
def test_only_a_full_device_ends_the_phase_that_it_was_full_in(error: type[Exception], phase: Phase) -> None:
    gpu = SimulatedGpu(named("100MiB"))
    peaks = PhasePeaks(gpu.reading, gpu.reset_peaks)
    peaks.enter_phase(Phase.EVALUATE)
    try:
        raise error
    except error:
        peaks.enter_phase(Phase.FORWARD)  # as the error passes through
    assert peaks.phase is phase


def test_a_traceback_is_in_the_log_before_the_parent_hears_of_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parent ends this process when it has the answer."""
    logged: list[str] = []

    def hear(message: Mapping[str, Any]) -> None:
        assert "The trainer raised ValueError: no such row" in str(message)
        logged.append(capsys.readouterr().err)

    request = SimpleNamespace(task="train", output_dir=".", knobs=TRL_DEFAULTS, processes_here=1)
    fail = Mock(side_effect=ValueError("no such row"))
    monkeypatch.setattr(process, "Channel", lambda **_: SimpleNamespace(receive=dict, send=hear))
    monkeypatch.setattr(codec, "from_json", lambda *_: request)
    monkeypatch.setattr(train, "train", fail)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    process.main()
    assert "ValueError: no such row" in logged[0]


def test_an_error_is_told_as_it_was_raised_where_the_output_folder_is_gone(tmp_path: Path) -> None:
    gone = str(tmp_path / "moved" / "run")
    raised, denied = ValueError("no such row"), PermissionError(errno.EACCES, "Permission denied")
    assert process._failure(raised, gone).message == "The trainer raised ValueError: no such row"
    assert re.search("run, whose disk has .+ free: .*Permission denied", process._failure(denied, gone).message)
