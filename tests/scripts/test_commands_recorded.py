"""Rehearsals against what whole commands took on torch's CUDA build.

``scripts/cuda_commands --record`` wrote the numbers: detection, plan, probe, training and report, in processes of their
own, on a device whose memory was the host's and whose kernels were the CPU's. No GPU was there.
"""

import json
import pathlib
from typing import Any

import pytest
from command_cases import material

from autotrain_mem.estimator.memory import estimate_memory
from autotrain_mem.estimator.replay import Room
from autotrain_mem.rehearsal.rehearse import rehearse
from autotrain_mem.types import Job, Knobs

RECORDED: dict[str, Any] = json.loads(pathlib.Path(__file__).with_name("recorded_commands.json").read_text("utf-8"))
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in RECORDED["cases"]}
HELD = ("sft full", "reward lora", "dpo 4bit", "kto lora", "grpo lora", "rloo 4bit", "ppo lora")
"""One of each method; the script compares all, and shows which miss its bars."""
ALLOCATED_BAR, RESERVED_BAR = 0.03, 0.04
"""As in the script."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("commands")
    material.write(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_a_rehearsal_takes_what_the_command_took(
    name: str, place: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    case = CASES[name]
    job = Job(method=case["method"], model="model", dataset=None, arguments=case["arguments"])
    capability = tuple(RECORDED["compute_capability"])
    trace = rehearse(job, Knobs(**case["knobs"]), case["length"], str(tmp_path), capability)
    memory = estimate_memory(trace, Room(capacity_bytes=None))
    native = memory.reserved.native
    assert memory.peak_allocated_bytes == pytest.approx(case["peak_allocated_bytes"], rel=ALLOCATED_BAR)
    assert native.peak_reserved_bytes == pytest.approx(case["peak_reserved_bytes"], rel=RESERVED_BAR)
