"""``scripts/record_gpu`` as far as it runs without a GPU: all but the calls of torch.cuda, and these on a dry run."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from gpu_records import child, wheels
from gpu_records.card import CudaCard
from gpu_records.cases import WEIGHTS, GpuCase, cases, make, small
from gpu_records.history import ACTIONS, History
from gpu_records.models import model_folder
from gpu_records.record import (
    Record,
    read_failures,
    read_records,
    record_path,
    write,
)
from gpu_records.replay import replay
from gpu_records.runs import environment, open_cases, run_cases
from gpu_records.sequences import Birth, differences, summary
from recorded_run import LARGER, MIB, TRACE, Cuda, a_record, entry

from autotrain_mem.methods.table import METHODS
from autotrain_mem.spec import codec

ROOT = pathlib.Path(__file__).parents[2]

# -- cases -----------------------------------------------------------------------------------------------------------


def test_all_cases_hold_every_trainer_with_every_kind_of_weights_in_both_allocator_modes() -> None:
    found = {
        (case.method, case.knobs.use_peft, case.knobs.load_in_4bit, checkpointing, case.knobs.expandable_segments)
        for case in cases()
        for checkpointing in [case.knobs.gradient_checkpointing]
    }
    kinds = [(bool(kind.get("use_peft")), bool(kind.get("load_in_4bit"))) for kind in WEIGHTS.values()]
    assert len({case.name for case in cases()}) == len(list(cases()))
    wanted = {
        (method, *kind, checkpointing, expandable)
        for method in METHODS
        for kind in kinds
        for checkpointing in (False, True)
        for expandable in (False, True)
    }
    assert not wanted - found


def test_the_allocator_is_set_by_the_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    plain = environment(make("sft", "full", 512, True), None, "cuda")
    expandable = environment(make("sft", "full", 512, True, expandable_segments=True), None, "cuda")
    assert not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(plain)
    assert expandable["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


# -- history ---------------------------------------------------------------------------------------------------------


def test_what_is_no_request_and_no_segment_is_left_out_and_the_rest_survives_its_packing() -> None:
    history = History.of_trace([*TRACE, entry("snapshot", 0, 0)])
    assert len(history) == len(TRACE)
    assert {event.action for event in history} <= set(ACTIONS)
    again = codec.from_json(History, json.loads(json.dumps(codec.to_json(history))))
    assert list(again) == list(history)
    assert [(event.action, event.address) for event in again] == [(line["action"], line["addr"]) for line in TRACE]


def test_events_of_other_threads_are_loading_first_and_backward_later() -> None:
    lines = [entry("alloc", 1, 1, label) for label in ("load", "", "forward", "", "optimizer_step", "")]
    labels = [event.label for event in History.of_trace(lines)]
    assert labels == ["load", "load", "forward", "backward", "optimizer_step", "backward"]


# -- replay ----------------------------------------------------------------------------------------------------------


def test_a_replay_reserves_what_was_worked_out_by_hand() -> None:
    played = replay(History.of_trace(TRACE), "")
    assert played.divergence == ""
    assert played.recorded_peak_bytes == played.simulated_peak_bytes == 34 * MIB
    assert played.segments == 4
    assert played.strangers == 0
    assert replay(History.of_trace([entry("free_completed", 7, 512), *TRACE]), "").strangers == 1
    assert replay(History.of_trace(TRACE), "expandable_segments:True").divergence


def test_a_replay_names_the_first_segment_that_is_not_the_same() -> None:
    wrong = [*TRACE[:-2], entry("segment_alloc", LARGER, 40 * MIB), TRACE[-1]]
    played = replay(History.of_trace(wrong), "")
    assert played.divergence == f"change 3: recorded {40 * MIB:+,} at event 8, simulated {32 * MIB:+,} at event 8"


# -- alignment -------------------------------------------------------------------------------------------------------


def births(sizes: list[int], label: str = "forward model.layers.3.mlp") -> list[Birth]:
    return [Birth(size, label) for size in sizes]


SIZES = [512 * (1 + index * index % 97) for index in range(300)]


def test_an_inserted_allocation_is_named_with_its_module() -> None:
    extra = Birth(7 * MIB, "backward model.layers.5.self_attn")
    first = births(SIZES)
    assert differences(first, first) == []
    (found,) = differences([*first[:100], extra, *first[100:]], first)
    assert (found.place, found.first, found.second) == (100, (extra,), ())
    (line,) = summary([found], ("recorded", "rehearsed"))
    assert line.strip() == "1 x only recorded: 7,340,032 in backward model.layers.*.self_attn"


def test_sequences_that_never_meet_again_say_so() -> None:
    longer = 3 * SIZES
    (found,) = differences(births(longer), births([size + 256 for size in longer]))
    assert found.is_end
    assert "never meet again" in summary([found], ("a", "b"))[0]


# -- records ---------------------------------------------------------------------------------------------------------


def test_a_record_survives_its_file(tmp_path: pathlib.Path) -> None:
    record = a_record(make("dpo", "4bit", 512, True, expandable_segments=True))
    write(tmp_path, record)
    assert read_records(tmp_path) == [record]
    assert [path.name for path in tmp_path.iterdir()] == ["dpo-4bit-512-checkpointing-expandable.record.json"]


# -- rounds ----------------------------------------------------------------------------------------------------------

THREE = [make("sft", kind, 512, True) for kind in WEIGHTS]


class FakeProcess:
    """Writes a record, or fails as it is told."""

    def __init__(self, case: GpuCase, out: pathlib.Path, errors: dict[str, str], began: list[str]) -> None:
        self.case, self.out, self.error, self.began = case, out, errors.get(case.name, ""), began
        self.stopped = False

    def go(self, limit_seconds: float) -> str:
        self.began.append(self.case.name)
        if not self.error:
            write(self.out, a_record(self.case))
        return self.error

    def stop(self) -> None:
        self.stopped = True


class Round:
    """Runs the three cases with processes of our own."""

    def __init__(self, out: pathlib.Path, **errors: str) -> None:
        self.out, self.began, self.made = out, [], []
        self.errors = {f"sft-{kind}-512-checkpointing": error for kind, error in errors.items()}

    def run(self, budget_seconds: float = 1e9) -> Any:
        return run_cases(self.out, THREE, self.start, budget_seconds, told=lambda line: None)

    def start(self, case: GpuCase) -> FakeProcess:
        self.made.append(FakeProcess(case, self.out, self.errors, self.began))
        return self.made[-1]


def test_what_is_recorded_is_not_run_again(tmp_path: pathlib.Path) -> None:
    write(tmp_path, a_record(THREE[1]))
    first = Round(tmp_path)
    assert first.run().recorded == first.began == [THREE[0].name, THREE[2].name]
    again = Round(tmp_path)
    again.run()
    assert again.made == []


def test_a_failing_case_leaves_its_error_and_the_others(tmp_path: pathlib.Path) -> None:
    outcome = Round(tmp_path, full="Traceback\nRuntimeError: no kernel").run()
    assert outcome.failed == [THREE[0].name]
    assert open_cases(tmp_path, THREE) == [THREE[0]], "which is tried again, and when it is recorded no failure is left"
    assert outcome.recorded == [THREE[1].name, THREE[2].name]
    assert read_failures(tmp_path) == {THREE[0].name: "Traceback\nRuntimeError: no kernel"}
    assert not record_path(tmp_path, THREE[0].name).exists()
    write(tmp_path, a_record(THREE[0]))
    assert read_failures(tmp_path) == {}


def test_a_case_that_the_end_of_time_stopped_is_left_and_no_failure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0, 0, 0, 100, 100, 100, 100])  # the budget is over when the first case ends
    monkeypatch.setattr("gpu_records.runs.time.monotonic", lambda: next(clock, 100))
    outcome = Round(tmp_path, full="stopped").run(budget_seconds=60)
    assert outcome.left == [case.name for case in THREE]
    assert not outcome.failed
    assert not read_failures(tmp_path)


# -- the card --------------------------------------------------------------------------------------------------------


class FakeNvml:
    def __init__(self, process_bytes: int | None = None, free_bytes: int | None = None) -> None:
        self.process_bytes = lambda pid: process_bytes
        self.free_bytes = lambda: free_bytes
        self.driver = lambda: "580.1"


@pytest.mark.parametrize(
    ("nvml", "free_before", "expected"),
    [
        (FakeNvml(process_bytes=(9 << 30) + 500 * MIB), None, 500 * MIB),
        (FakeNvml(), (79 << 30) + 600 * MIB, 600 * MIB),
        (FakeNvml(), None, 1 << 30),
    ],
)
def test_what_lies_outside_torch_is_what_remains(
    cuda: Cuda, nvml: FakeNvml, free_before: int | None, expected: int
) -> None:
    card = CudaCard()
    card._nvml, card._free_before = nvml, free_before
    outside = card.outside()
    assert outside.non_torch_bytes == expected
    assert outside.source


@pytest.mark.slow
def test_a_case_is_trained_and_labelled_as_on_a_card(
    cuda: Cuda, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a process of its own does on a card, but for the card's memory: the trainer stays on the CPU."""
    monkeypatch.setattr(CudaCard, "on_host", True)
    case = small(make("sft", "lora", 512, True))
    record = child.record(case, CudaCard(), model_folder(tmp_path, case.model), str(tmp_path))
    assert codec.from_json(Record, json.loads(json.dumps(codec.to_json(record)))) == record
    assert {label.partition(" ")[0] for label in cuda.labels} == {"load", "forward", "backward", "optimizer_step"}
    assert "backward base_model.model.model.layers.1.mlp" in cuda.labels  # recomputed there


# -- packages --------------------------------------------------------------------------------------------------------


def test_wheels_of_other_versions_are_taken_and_torch_never(tmp_path: pathlib.Path) -> None:
    import importlib.metadata

    here = importlib.metadata.version("trl")
    for name in (
        f"trl-{here}-py3-none-any.whl",
        "peft-0.0.1-py3-none-any.whl",
        "torch-9.9.9-cp311-cp311-linux_x86_64.whl",
        "no_such_thing-1.0-py3-none-any.whl",
    ):
        (tmp_path / name).touch()
    assert [wheel.name.split("-")[0] for wheel in wheels.missing_wheels(tmp_path)] == ["no_such_thing", "peft"]


# -- the script -------------------------------------------------------------------------------------------------------
