"""What a noun derives from its fields: needs, budgets, speeds, and whose lengths are given."""

import dataclasses
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem.settings.own import Sharding
from autotrain_mem.settings.words import read_length, wished_share, without_maximized
from autotrain_mem.support import codec
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Candidate, Estimate, Job, Phase, ReservedByMode, ReservedEstimate, StepTime
from autotrain_mem.types.methods_table import METHODS
from autotrain_mem.types.report import MemoryReading
from tests.report import report_examples


def reserved(peak_bytes: int) -> ReservedEstimate:
    return report_examples.reserved(peak_bytes, slack_bytes=peak_bytes - 3 * GIB)


KNOBS = dataclasses.replace(TRL_DEFAULTS, per_device_train_batch_size=2, gradient_accumulation_steps=4)
HARDWARE = dataclasses.replace(
    report_examples.RTX3060, total_bytes=24 * GIB, free_bytes=24 * GIB, non_torch_bytes=500 * MIB
)
MEMORY = dataclasses.replace(
    report_examples.memory(),
    peak_allocated_bytes=3 * GIB,
    reserved=ReservedByMode(native=reserved(4 * GIB), expandable_segments=reserved(3 * GIB + MIB)),
)
TIME = StepTime(tokens=300.0, phases={Phase.FORWARD: 0.25, Phase.BACKWARD: 0.5})
ESTIMATE = Estimate(knobs=KNOBS, hardware=HARDWARE, memory=MEMORY, budget_bytes=23 * GIB, time=TIME)


def test_a_knob_that_does_not_apply_overlays_nothing() -> None:
    """TRL's configs would take the null for a value; a max_length of null is one."""
    unlimited = dataclasses.replace(KNOBS, max_length=None)
    assert [name for name, value in codec.to_json(unlimited).items() if value is None] == ["max_length"]


def test_what_is_required_is_allocated_plus_cached_plus_what_lies_outside_torch() -> None:
    assert ESTIMATE.required_bytes == 3 * GIB + GIB + 500 * MIB
    assert ESTIMATE.required_bytes == MEMORY.peak_allocated_bytes + ESTIMATE.cached_bytes + ESTIMATE.outside_bytes
    assert codec.to_json(ESTIMATE)["required_bytes"] == ESTIMATE.required_bytes
    shared = dataclasses.replace(ESTIMATE, vllm_share_bytes=7 * GIB)
    assert shared.required_bytes == ESTIMATE.required_bytes + 7 * GIB


@pytest.mark.parametrize(
    ("processes", "sharding", "communicators"), [(1, None, 0), (4, "ddp", 1), (4, "fsdp2", 1), (16, "hsdp", 3)]
)
def test_what_nccl_holds_lies_outside_torch_once_for_each_communicator(
    processes: int, sharding: Sharding | None, communicators: int
) -> None:
    card = dataclasses.replace(HARDWARE, communicator_bytes=700 * MIB)
    knobs = dataclasses.replace(KNOBS, processes=processes, sharding=sharding)
    one = dataclasses.replace(ESTIMATE, hardware=card, knobs=knobs)
    assert one.communicators_bytes == communicators * 700 * MIB
    assert one.required_bytes == ESTIMATE.required_bytes + one.communicators_bytes
    assert codec.to_json(one)["communicators_bytes"] == one.communicators_bytes
    # A simulated card, and one whose processes were measured, have it in one figure with the rest.
    measured = dataclasses.replace(one, hardware=card.with_communicators(knobs.communicators))
    assert (measured.communicators_bytes, measured.required_bytes) == (0, one.required_bytes)


def test_expandable_segments_are_counted_where_the_knobs_have_them() -> None:
    expanded = ESTIMATE.growing()
    assert expanded == dataclasses.replace(ESTIMATE, knobs=dataclasses.replace(KNOBS, expandable_segments=True))
    assert (expanded.reserved, ESTIMATE.reserved) == (MEMORY.reserved.expandable_segments, MEMORY.reserved.native)
    assert expanded.required_bytes == 3 * GIB + MIB + 500 * MIB
    assert codec.to_json(expanded)["peak_reserved_bytes"] == 3 * GIB + MIB


@pytest.mark.parametrize("trouble", [{"num_alloc_retries": 1}, {"largest_refused_bytes": 512}])
def test_a_run_that_stumbles_over_the_allocator_does_not_fit_whatever_it_requires(trouble: dict[str, int]) -> None:
    native = dataclasses.replace(MEMORY.reserved.native, **trouble)
    assert MEMORY.reserved.native.fits
    assert not native.fits
    assert ESTIMATE.fits
    memory = dataclasses.replace(MEMORY, reserved=dataclasses.replace(MEMORY.reserved, native=native))
    stumbling = dataclasses.replace(ESTIMATE, memory=memory)
    assert not stumbling.fits
    assert stumbling.growing().fits


def test_exactly_the_budget_fits_and_one_byte_more_does_not() -> None:
    required = ESTIMATE.required_bytes
    for budget, fits in ((required, True), (required - 1, False)):
        assert dataclasses.replace(ESTIMATE, budget_bytes=budget).fits is fits
        assert Candidate(knobs=KNOBS, required_bytes=required, budget_bytes=budget).fits is fits


PLAN = dataclasses.replace(
    report_examples.PLAN,
    job=Job(method="grpo", model="tiny", dataset=None),
    estimate=ESTIMATE,
    optimizer_steps=None,
    row_tokens=77,
)


def test_a_plan_says_how_fast_it_is_and_how_long_the_run_takes() -> None:
    written = codec.to_json(dataclasses.replace(PLAN, optimizer_steps=40))
    assert (written["step_seconds"], written["tokens_per_second"]) == (0.75, 400.0)
    assert (written["optimizer_steps"], written["run_seconds"]) == (40, 30.0)
    assert (written["prompt_length"], written["effective_batch_size"]) == (77, 8)
    assert codec.to_json(PLAN)["run_seconds"] is None
    by_another_card = dataclasses.replace(ESTIMATE, time=dataclasses.replace(TIME, assumed="a100-80gb"))
    assumed = codec.to_json(dataclasses.replace(PLAN, estimate=by_another_card, optimizer_steps=40))
    assert (assumed["step_seconds"], assumed["tokens_per_second"], assumed["run_seconds"]) == (None, None, None)


@pytest.mark.parametrize(("measured", "error"), [(100, 0.1), (None, None), (0, None), (220, -0.5)])
def test_the_prediction_error_is_relative_to_what_was_measured(measured: int | None, error: float | None) -> None:
    names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak")
    report = dataclasses.replace(
        report_examples.REPORT,
        predicted_peak_bytes=110,
        predicted_peak_reserved_bytes=110,
        measured=None if measured is None else MemoryReading.from_stats(dict.fromkeys(names, measured)),
    )
    expected = None if error is None else pytest.approx(error)
    assert (report.prediction_error, report.reserved_prediction_error) == (expected, expected)


@pytest.mark.parametrize(
    ("origin", "total_bytes", "headroom_bytes"),
    # 4 %, but at least 400 MiB on a real card
    [("detected", 80 * GIB, int(80 * GIB * 0.04)), ("named", 4 * GIB, 400 * MIB), ("imagined", 100 * MIB, 4 * MIB)],
)
def test_the_budget_is_what_is_free_less_the_headroom(origin: Any, total_bytes: int, headroom_bytes: int) -> None:
    card = dataclasses.replace(HARDWARE, origin=origin, total_bytes=total_bytes, free_bytes=total_bytes - MIB)
    assert card.default_headroom_bytes() == headroom_bytes
    assert card.budget_bytes() == total_bytes - MIB - headroom_bytes
    assert card.budget_bytes(MIB) == total_bytes - 2 * MIB
    assert card.budget_bytes(0) == total_bytes - MIB
    assert dataclasses.replace(card, free_bytes=MIB).budget_bytes() == 0


@pytest.mark.parametrize(("length", "pinned"), [("auto", False), ("p99.9", False), (9, True), (None, True)])
def test_a_length_is_pinned_by_a_number_only_and_a_prompts_by_its_own_flag(length: object, pinned: bool) -> None:
    job = Job(method="sft", model="m", dataset=None)
    assert not job.pins_length
    assert dataclasses.replace(job, arguments={"max_length": length}).pins_length is pinned
    for method in (name for name, facts in METHODS.items() if facts.is_online):
        online = Job(method=method, model="m", dataset=None, arguments={"max_length": length})
        assert not online.pins_length
        assert dataclasses.replace(online, prompt_length=9).pins_length


@pytest.mark.parametrize(
    ("text", "value", "share"),
    [
        (" Auto", "auto", 1.0),
        ("none", None, 1.0),
        ("p50", "p50", 0.5),
        ("P99.9", "p99.9", 0.999),
        ("p100", "p100", 1.0),
    ],
)
def test_a_length_is_a_number_a_wish_or_none_and_a_wish_is_kept_from_trl(
    text: str, value: object, share: float
) -> None:
    assert read_length("512") == 512
    assert read_length(text) == value
    assert wished_share(value) == pytest.approx(share)
    kept = {} if value else {"max_length": None}
    assert without_maximized({"max_length": value, "dtype": "auto"}) == {"dtype": "auto", **kept}
    assert without_maximized({"max_length": 9}) == {"max_length": 9}


@pytest.mark.parametrize("text", ["p0", "p101", "p100.1", "pfoo", "p", "99%", "-1", "0", "1.5", "p-1", "pauto"])
def test_anything_else_is_refused_with_its_own_words(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_length(text)


def test_a_job_evaluates_by_a_strategy_or_before_its_first_step() -> None:
    """A script may hand over rows to evaluate on and ask for the first alone."""
    asked = ({"eval_strategy": "steps"}, {"eval_on_start": True}, {"eval_strategy": "no"}, {})
    jobs = [Job(method="sft", model="m", dataset=None, arguments=given) for given in asked]
    assert [job.is_evaluated for job in jobs] == [True, True, False, False]
