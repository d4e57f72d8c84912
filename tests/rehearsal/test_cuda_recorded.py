"""Rehearsals against what torch's CUDA build took for the same trainings.

``scripts/cuda_parity --record`` wrote the numbers. No GPU was there: NVIDIA's libraries were stand-ins, and kernels
computed nothing; the operators, autograd and the caching allocator were torch's own. The script compares a hundred
larger cases.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from autotrain_mem.estimator.memory import estimate_memory
from autotrain_mem.estimator.replay import DeviceCapacity
from autotrain_mem.rehearsal.rehearse import rehearse
from autotrain_mem.types import Job, Knobs

RECORDING = Path(__file__).with_name("recorded_cuda.json")
RECORDED: dict[str, Any] = json.loads(RECORDING.read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = RECORDED["cases"]
ALLOCATED_BAR = 0.005
RESERVED_BAR = 0.06
"""As in the script. A segment of 20 MiB is 3 to 7 % of what these small trainings reserve."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "config.json").write_text(json.dumps(RECORDED["model_config"]), encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("recorded", CASES, ids=[case["name"] for case in CASES])
def test_a_rehearsal_takes_what_the_cuda_build_took(recorded: dict[str, Any], model: Path, tmp_path: Path) -> None:
    knobs = Knobs(**recorded["knobs"])
    job = Job(method=recorded["method"], model=str(model), dataset=None, arguments=recorded["arguments"])
    trace = rehearse(job, knobs, recorded["length"], str(tmp_path), tuple(RECORDED["compute_capability"]))
    memory = estimate_memory(trace, DeviceCapacity(capacity_bytes=None))
    mode = memory.reserved.modes["expandable_segments:True" in recorded["allocator"]]
    assert memory.peak_allocated_bytes == pytest.approx(recorded["peak_allocated_bytes"], rel=ALLOCATED_BAR)
    assert mode.peak_reserved_bytes == pytest.approx(recorded["peak_reserved_bytes"], rel=RESERVED_BAR)
    assert mode.num_alloc_retries == recorded["num_alloc_retries"]


def test_the_recording_covers_both_allocator_modes_and_the_methods_it_claims() -> None:
    assert {case["method"] for case in CASES} == {"sft", "dpo", "reward", "grpo", "kto"}
    assert {case["allocator"] for case in CASES} == {"", "expandable_segments:True"}
    assert any(case["knobs"]["load_in_4bit"] for case in CASES)
