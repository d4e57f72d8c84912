"""``scripts/record_gpu`` as far as it runs without a GPU: all but the calls of torch.cuda, and these on a dry run."""

import itertools
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_records.card import CudaCard
from gpu_records.cases import WEIGHTS, GpuCase, cases, make
from gpu_records.history import History
from gpu_records.record import read_failures, record_path, write
from gpu_records.replay import replay
from gpu_records.runs import environment, open_cases, run_cases
from gpu_records.sequences import Birth, differences, summary
from recorded_run import LARGER, MIB, TRACE, a_record, entry

from autotrain_mem.types.methods_table import METHODS


def test_all_cases_hold_every_trainer_with_every_kind_of_weights_in_both_allocator_modes() -> None:
    every = list(cases())
    assert len({case.name for case in every}) == len(every)
    names = ("use_peft", "load_in_4bit", "gradient_checkpointing", "expandable_segments")
    found = {(case.method, *(getattr(case.knobs, name) for name in names)) for case in every}
    kinds = [(bool(kind.get("use_peft")), bool(kind.get("load_in_4bit"))) for kind in WEIGHTS.values()]
    switches = (False, True)
    wanted = {(row[0], *row[1], *row[2:]) for row in itertools.product(METHODS, kinds, switches, switches)}
    assert not wanted - found


def test_the_allocator_is_set_by_the_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    plain = environment(make("sft", "full", 512, True), "cuda")
    expandable = environment(make("sft", "full", 512, True, expandable_segments=True), "cuda")
    assert not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(plain)
    assert expandable["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_a_replay_reserves_what_was_worked_out_by_hand() -> None:
    played = replay(History.of_trace(TRACE), "")
    assert played.divergence == ""
    assert played.recorded_peak_bytes == played.simulated_peak_bytes == 34 * MIB
    assert played.segments == 4
    assert played.strangers == 0
    assert replay(History.of_trace([entry("free_completed", 7, 512), *TRACE]), "").strangers == 1
    assert replay(History.of_trace(TRACE), "expandable_segments:True").divergence
    wrong = [*TRACE[:-2], entry("segment_alloc", LARGER, 40 * MIB), TRACE[-1]]
    divergence = replay(History.of_trace(wrong), "").divergence
    assert divergence == f"change 3: recorded {40 * MIB:+,} at event 8, simulated {32 * MIB:+,} at event 8"


def test_an_inserted_allocation_is_named_with_its_module_and_sequences_that_never_meet_again_are_ended() -> None:
    sizes = [512 * (1 + index * index % 97) for index in range(300)]
    first = [Birth(size, "forward model.layers.3.mlp") for size in sizes]
    extra = Birth(7 * MIB, "backward model.layers.5.self_attn")
    assert differences(first, first) == []
    (found,) = differences([*first[:100], extra, *first[100:]], first)
    assert (found.place, found.first, found.second) == (100, (extra,), ())
    (line,) = summary([found], ("recorded", "rehearsed"))
    assert line.strip() == "1 x only recorded: 7,340,032 in backward model.layers.*.self_attn"
    other = [Birth(birth.size_bytes + 256, birth.label) for birth in 3 * first]
    (end,) = differences(3 * first, other)
    assert end.is_end
    assert "never aligned again" in summary([end], ("a", "b"))[0]


THREE = [make("sft", kind, 512, True) for kind in WEIGHTS]


def run_three(out: pathlib.Path, error_of_the_first: str, budget_seconds: float = 1e9) -> Any:
    def start(case: GpuCase) -> Any:
        """A process that writes a record, or fails as it is told."""

        def go(limit_seconds: float) -> str:
            if case is THREE[0] and error_of_the_first:
                return error_of_the_first
            write(out, a_record(case))
            return ""

        return SimpleNamespace(go=go, stop=lambda: None)

    return run_cases(out, THREE, start, budget_seconds, told=lambda line: None)


def test_a_failing_case_leaves_its_error_and_the_others_and_is_tried_again(tmp_path: pathlib.Path) -> None:
    write(tmp_path, a_record(THREE[1]))
    outcome = run_three(tmp_path, "Traceback\nRuntimeError: no kernel")
    assert (outcome.failed, outcome.recorded) == ([THREE[0].name], [THREE[2].name])
    assert open_cases(tmp_path, THREE) == [THREE[0]]
    assert read_failures(tmp_path) == {THREE[0].name: "Traceback\nRuntimeError: no kernel"}
    assert not record_path(tmp_path, THREE[0].name).exists()
    assert run_three(tmp_path, "").recorded == [THREE[0].name]
    assert read_failures(tmp_path) == {}


def test_a_case_that_the_end_stopped_is_no_failure(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 0, 0, 100, 100, 100, 100])  # the budget is over when the first case ends
    monkeypatch.setattr("gpu_records.runs.time.monotonic", lambda: next(clock, 100))
    outcome = run_three(tmp_path, "stopped", budget_seconds=60)
    assert (outcome.left, outcome.failed) == ([case.name for case in THREE], [])
    assert not read_failures(tmp_path)


@pytest.mark.parametrize(
    ("of_process", "free_before", "expected"),
    [((9 << 30) + 500 * MIB, None, 500 * MIB), (None, (79 << 30) + 600 * MIB, 600 * MIB), (None, None, 1 << 30)],
)
def test_what_lies_outside_torch_is_what_remains(
    of_process: int | None, free_before: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a card of 80 GiB 70 are free and 9 reserved."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 9 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    monkeypatch.setattr("gpu_records.card.held_by", lambda hardware, pid: of_process)
    card = CudaCard()
    card._before = SimpleNamespace(free_bytes=free_before or 0)
    outside = card.outside()
    assert outside.non_torch_bytes == expected
    assert outside.source
