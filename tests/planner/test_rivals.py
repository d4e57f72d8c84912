"""What the search keeps beside its plan: the levels around, plans that are too slow, and every rehearsal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_memory import LinearMemory, space_of

from autotrain_mem.errors import DoesNotFitError
from autotrain_mem.planner.levels import levels
from autotrain_mem.planner.points import least_demanding, lines
from autotrain_mem.planner.search import Found, search
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Candidate, Estimate, Knobs, StepTime
from autotrain_mem.spec.candidate import candidate
from autotrain_mem.spec.job import MAX_SLOWDOWN
from autotrain_mem.units import GIB, format_bytes


def names(found: Found) -> list[str]:
    return [rival.level for rival in found.alternatives]


# -- the levels around -------------------------------------------------------------------------------------------------


def test_levels_that_do_not_fit_are_kept_with_the_least_that_they_need() -> None:
    model = LinearMemory(budget_bytes=4 * GIB, cards=("an L4",))
    found = search(space_of(), model)
    below = ["lossless", "rounding", "rounding, offloading"]  # float32 weights are beyond the card, wherever state is
    assert (found.level, names(found)) == ("LoRA", [*below, "LoRA on an 8-bit base"])
    named = {level.name: level for level in levels(space_of())}
    for rival in found.alternatives[:3]:
        least = candidate(model.estimate(least_demanding(space_of(), named[rival.level])))
        assert (rival.knobs, rival.required_bytes) == (least.knobs, least.required_bytes)
        assert not rival.fits
        assert rival.ratio is None
        assert rival.would_fit == ("an L4",)


def test_the_next_level_is_kept_with_its_plan() -> None:
    model = LinearMemory(budget_bytes=21 * GIB)
    found = search(space_of(), model)
    (rival,) = found.alternatives
    assert (found.level, rival.level, rival.would_fit) == ("lossless", "rounding", ())
    assert rival.fits
    assert (rival.ratio or 0) > 1


def test_a_level_that_offloads_is_no_rival() -> None:
    """It offers nothing to a plan that fits without it: the next one that gives up more is looked at."""
    found = search(space_of(effective_batch_size=64), LinearMemory(budget_bytes=24 * GIB))
    assert (found.level, names(found)) == ("lossless", ["rounding"])


def test_a_plan_that_offloads_is_kept_beside_what_it_would_need_without() -> None:
    found = search(space_of(), LinearMemory(budget_bytes=11 * GIB))
    assert (found.level, names(found)) == ("lossless, offloading", ["lossless", "rounding"])
    without, rounded = found.alternatives
    assert (without.fits, rounded.fits) == (False, True)


def test_shorter_rows_are_no_rival() -> None:
    found = search(space_of(use_peft=True, load_in_4bit=True), LinearMemory(budget_bytes=24 * GIB))
    assert names(found) in ([], ["rounding"])


def test_a_level_known_to_hold_nothing_without_a_rehearsal_is_not_told() -> None:
    """Weights of two bytes are beyond the card: what an adapter on them would need at least was never asked."""
    found = search(space_of(), LinearMemory(budget_bytes=int(1.6 * GIB)))
    rehearsed = {attempt.knobs for attempt in found.attempts}
    assert all(rival.knobs in rehearsed for rival in found.alternatives)


# -- plans that are too slow -------------------------------------------------------------------------------------------


def crawling(budget_bytes: int = 11 * GIB, by: float = 8.0) -> LinearMemory:
    """Full fine-tuning in float32 fits with the optimizer on the host alone, which takes so many times as long."""
    slowed = {"gradient_checkpointing": 1.2, "activation_offloading": 1.2, "optimizer_offload": by}
    return LinearMemory(budget_bytes=budget_bytes, slowed=slowed)


def test_a_plan_far_slower_than_the_next_level_is_passed_over_and_kept() -> None:
    found = search(space_of(), crawling())
    assert found.level == "rounding"
    assert names(found) == ["lossless", "lossless, offloading", "LoRA"]
    too_large, passed, _ = found.alternatives
    assert (too_large.fits, passed.fits) == (False, True)
    assert 1 / (passed.ratio or 1) > MAX_SLOWDOWN


def test_a_lever_pulled_for_speed_says_so() -> None:
    found = search(space_of(), crawling())
    (passed,) = [rival for rival in found.alternatives if rival.level == "lossless, offloading"]
    ratio = 1 / (passed.ratio or 1)
    whys = [lever.why for lever in found.levers if lever.name in ("dtype", "optim")]
    assert whys
    assert all(why.startswith(f"without it a plan fits that takes {ratio:.1f} times as long: ") for why in whys)


@pytest.mark.parametrize(
    ("by", "max_slowdown", "level"),
    [(8, 20, "lossless, offloading"), (2, 4, "lossless, offloading"), (2, 1.5, "rounding")],
)
def test_how_much_slower_is_the_users_to_say(by: float, max_slowdown: float, level: str) -> None:
    assert search(space_of(max_slowdown=max_slowdown), crawling(by=by)).level == level


def test_a_level_that_the_user_rules_out_is_no_reason_to_pass_a_plan_over() -> None:
    found = search(space_of(fit="lossless"), crawling(by=50))
    assert (found.level, names(found)) == ("lossless, offloading", ["lossless"])


def test_rows_are_never_cut_for_speed() -> None:
    """Attention grows with the square of the length: 64 tokens are computed at many times the speed."""

    class Quadratic(LinearMemory):
        def estimate(self, knobs: Knobs) -> Estimate:
            estimate = super().estimate(knobs)
            seconds = estimate.time.step_seconds * ((knobs.max_length or 4096) / 64) ** 2
            phases = dict.fromkeys(estimate.time.phases, seconds)
            return replace(estimate, time=replace(estimate.time, phases=phases))

    space = space_of(use_peft=True, load_in_4bit=True, fit="all")
    found = search(space, Quadratic(budget_bytes=24 * GIB))
    assert found.estimate.knobs.max_length == space.base.max_length


def test_a_slow_plan_is_taken_where_the_whole_model_leaves_no_faster_one() -> None:
    """The next level's one point fits as a copy has it, and does not on the whole model."""
    pins = {"per_device_train_batch_size": 1, "gradient_checkpointing": True, "activation_offloading": False}
    space = space_of(fit="rounding", optim="sgd", optimizer_offload=False, **pins)
    limits = replace(space, forbid=frozenset({"expandable_segments"}))

    class Misled(LinearMemory):
        def estimate(self, knobs: Knobs) -> Estimate:
            estimate = super().estimate(knobs)
            return replace(estimate, budget_bytes=4 * GIB if knobs.dtype == "bfloat16" else estimate.budget_bytes)

        def expanded(self, knobs: Knobs) -> Estimate:
            return replace(super().expanded(knobs), budget_bytes=self.budget_bytes)

        def time(self, knobs: Knobs) -> StepTime:
            time = super().time(knobs)
            slower = 1.0 if knobs.dtype == "bfloat16" else 10.0
            phases = {phase: seconds * slower for phase, seconds in time.phases.items()}
            return replace(time, phases=phases)

    found = search(limits, Misled(budget_bytes=30 * GIB, copied_layers=2))
    assert found.level == "lossless"
    assert found.estimate.fits


# -- confirmation ------------------------------------------------------------------------------------------------------


def neighbour(space: Space, found: Found) -> Knobs | None:
    """One step up the plan's line."""
    knobs = replace(found.estimate.knobs, expandable_segments=False)
    level = next(level for level in levels(space) if level.name == found.level)
    line = next(line for line in lines(space, level) if knobs in line)
    return next(iter(line[line.index(knobs) + 1 :]), None)


@given(st.integers(3 * GIB, 60 * GIB), st.floats(-0.05, 0.05), st.sampled_from((8, 64)))
@settings(max_examples=40, deadline=None)
def test_plan_and_larger_neighbour_are_rehearsed_whole_however_wrong_copies_are(
    budget: int, amiss: float, effective: int
) -> None:
    space = space_of(effective_batch_size=effective, longest=1024)
    model = LinearMemory(budget_bytes=budget, longest=1024, copied_layers=3, amiss=amiss)
    found = search(space, model)
    assert found.estimate.fits
    assert found.estimate.memory.rehearsed_layers is None
    whole = {replace(knobs, expandable_segments=False) for knobs in model.whole_calls}
    assert replace(found.estimate.knobs, expandable_segments=False) in whole
    if found.level != "shorter rows" and (larger := neighbour(space, found)) is not None:
        assert larger in whole


def test_a_choice_that_the_whole_model_overturns_makes_way_for_the_next_smaller() -> None:
    space = space_of(effective_batch_size=64, longest=1024, fit="lossless", optimizer_offload=False)
    exact = LinearMemory(budget_bytes=26 * GIB, longest=1024)
    astray = replace(exact, copied_layers=3, amiss=0.05, calls=[], whole_calls=[])
    assert search(space, astray).estimate.knobs == search(space, exact).estimate.knobs
    overturned = [call for call in astray.whole_calls if astray.expanded(call).fits and not astray.estimate(call).fits]
    assert overturned or len(astray.whole_calls) == 2


def test_copies_that_are_exact_cost_two_rehearsals_of_the_whole_model() -> None:
    space = space_of(effective_batch_size=64, longest=1024)
    model = LinearMemory(budget_bytes=26 * GIB, longest=1024, copied_layers=3)
    search(space, model)
    assert len(model.whole_calls) == 2


# -- what was tried ----------------------------------------------------------------------------------------------------


@given(st.integers(2 * GIB, 60 * GIB))
@settings(max_examples=30, deadline=None)
def test_attempts_and_whoever_listens_hear_of_every_rehearsal_in_order(budget: int) -> None:
    model = LinearMemory(budget_bytes=budget, copied_layers=3, amiss=0.02)
    heard: list[Candidate] = []
    found = search(space_of(effective_batch_size=64), model, on_attempt=heard.append)
    assert list(found.attempts) == heard
    assert [replace(attempt.knobs, expandable_segments=False) for attempt in heard] == model.calls
    assert len([each for each in heard if each.rehearsed_layers is None]) == len(model.whole_calls)
    assert candidate(found.estimate) in heard


# -- reasons -----------------------------------------------------------------------------------------------------------


@given(
    st.integers(2 * GIB, 60 * GIB),
    st.sampled_from((8, 64)),
    st.sampled_from(("all", "rounding", "lossless")),
    st.sampled_from((None, 3)),
)
@settings(max_examples=60, deadline=None)
def test_every_number_in_a_reason_comes_from_a_rehearsal_that_did_not_fit(
    budget: int, effective: int, fit: str, layers: int | None
) -> None:
    model = LinearMemory(budget_bytes=budget, copied_layers=layers, amiss=0.01, unmapped=0.02)
    space = space_of(effective_batch_size=effective, fit=fit)
    try:
        found = search(space, model)
    except DoesNotFitError:
        return
    told = {format_bytes(attempt.required_bytes) for attempt in found.attempts if not attempt.fits}
    told |= {format_bytes(model.estimate(replace(found.estimate.knobs, expandable_segments=False)).required_bytes)}
    for lever in found.levers:
        sizes = re.findall(r"([\d.]+ [GM]iB), the budget is", lever.why)
        assert set(sizes) <= told


def test_rounding_is_not_excused_by_what_another_kind_of_rounding_needs() -> None:
    """The level's own least demanding point keeps AdamW too, and fits: it says nothing of the job without rounding."""
    space = space_of(fit="rounding", optimizer_offload=False, effective_batch_size=1, gradient_checkpointing=True)
    model = LinearMemory(
        budget_bytes=int(14.5 * GIB), slowed={"activation_offloading": 1.2, "gradient_checkpointing": 1.2}
    )
    found = search(space, model)
    floor = least_demanding(space, levels(space)[0])
    (why, *_) = [lever.why for lever in found.levers if lever.name in ("dtype", "optim")]
    needed = format_bytes(model.estimate(floor).required_bytes)
    assert why.startswith(f"without rounding it needs at least {needed}, the budget is 14.5 GiB: ")
