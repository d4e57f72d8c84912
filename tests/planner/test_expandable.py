"""Expandable segments: the lever without harm, on no level, pulled where it makes the difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_memory import LinearMemory, found_or_none, space_of

from autotrain_mem.planner.ladder import allowed
from autotrain_mem.planner.levels import levels
from autotrain_mem.planner.levers import EXPANDABLE, LEVERS
from autotrain_mem.planner.memo import Memo
from autotrain_mem.planner.search import search
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Candidate, Estimate, Harm, Knobs
from autotrain_mem.units import GIB

SAVED = 0.02
"""Of the 3 % that native segments waste here."""


def tight(space: Space, *, expandable: bool = True) -> LinearMemory:
    """A card on which the job as asked fits with expandable segments only (or natively too), to the byte."""
    roomy = LinearMemory(budget_bytes=200 * GIB, unmapped=SAVED).estimate(space.base)
    needed = roomy.with_expandable_segments() if expandable else roomy
    return LinearMemory(budget_bytes=needed.required_bytes, unmapped=SAVED)


ONE_POINT = space_of(
    per_device_train_batch_size=1,
    gradient_checkpointing=True,
    activation_offloading=False,
    optimizer_offload=False,
    fit="lossless",
)
"""A job whose every batch is pinned: its one level has one point."""


def test_they_are_turned_on_where_native_segments_do_not_fit_for_no_rehearsal_and_no_harm() -> None:
    model = tight(ONE_POINT)
    found = search(ONE_POINT, model)
    assert found.estimate.knobs == replace(ONE_POINT.base, expandable_segments=True)
    assert found.estimate.required_bytes == model.budget_bytes
    assert found.estimate.reserved == found.estimate.memory.reserved.expandable_segments
    assert model.calls == [ONE_POINT.base]
    assert found.attempts == (
        Candidate(
            knobs=found.estimate.knobs,
            required_bytes=model.budget_bytes,
            budget_bytes=model.budget_bytes,
            tokens_per_second=model.time(ONE_POINT.base).tokens_per_second,
        ),
    )
    (lever,) = found.levers
    assert (lever.name, lever.before, lever.after, lever.harm) == (EXPANDABLE, False, True, Harm.NONE)
    assert lever.why == (
        "with segments of fixed size it needs 19.5 GiB, the budget is 19.1 GiB: "
        "segments that grow page by page leave fewer gaps between tensors: the same training"
    )


def test_they_stay_off_where_native_segments_fit_though_they_would_save_bytes() -> None:
    found = search(ONE_POINT, tight(ONE_POINT, expandable=False))
    assert found.estimate.knobs == ONE_POINT.base
    assert found.levers == ()


def test_the_lever_is_on_no_level() -> None:
    every = [knobs for level in levels(space_of()) for knobs in level.settings]
    assert not [knobs for knobs in every if knobs.expandable_segments]


@pytest.mark.parametrize(
    "words",
    [
        {"expandable_segments": False},
        {"forbid": frozenset({EXPANDABLE})},
        {"method": "grpo", "use_vllm": True},
        {"method": "rloo", "use_vllm": True, "vllm_mode": "colocate"},
    ],
    ids=str,
)
def test_they_are_never_turned_on_against_the_users_words_or_vllm(words: dict[str, object]) -> None:
    space = space_of(per_device_train_batch_size=1, gradient_checkpointing=True, **words)
    assert not allowed(LEVERS[EXPANDABLE], space)
    model = tight(space)
    found = found_or_none(space, model)
    assert found is None or not found.estimate.knobs.expandable_segments
    assert len(model.calls) > 1  # what needs no other lever with them needs one without


def test_vllm_that_is_not_used_pins_nothing() -> None:
    assert EXPANDABLE not in space_of(method="grpo", use_vllm=False).pinned


def test_the_users_own_are_kept_and_are_no_change() -> None:
    space = replace(space_of(expandable_segments=True), pinned=ONE_POINT.pinned | {EXPANDABLE})
    model = LinearMemory(budget_bytes=200 * GIB, unmapped=SAVED)
    found = search(space, model)
    assert found.estimate.knobs.expandable_segments
    assert all(call.expandable_segments for call in model.calls)
    assert EXPANDABLE not in [lever.name for lever in found.levers]


# -- the memo ----------------------------------------------------------------------------------------------------------


def test_a_memo_answers_for_either_kind_of_segments_from_one_rehearsal() -> None:
    model = tight(ONE_POINT)
    memo = Memo(model, may_expand=True)
    expanded = replace(ONE_POINT.base, expandable_segments=True)
    assert memo(expanded) == memo(ONE_POINT.base) == memo(memo(expanded).knobs)
    assert model.calls == [ONE_POINT.base]


def test_a_memo_that_may_not_expand_asks_as_it_was_asked() -> None:
    model = tight(ONE_POINT)
    memo = Memo(model)
    assert not memo(ONE_POINT.base).fits
    assert memo.estimates[0].knobs == ONE_POINT.base


def test_segments_that_the_environment_sets_cost_no_second_rehearsal() -> None:
    """Then every estimate comes back with them, whatever the search asked for."""

    class Expanding(LinearMemory):
        def estimate(self, knobs: Knobs) -> Estimate:
            return super().estimate(knobs).with_expandable_segments()

    model = Expanding(budget_bytes=200 * GIB, unmapped=SAVED)
    space = replace(ONE_POINT, pinned=ONE_POINT.pinned | {EXPANDABLE})
    assert search(space, model).estimate.knobs.expandable_segments
    assert model.calls == [space.base]


def test_where_neither_kind_fits_the_one_that_needs_less_counts() -> None:
    model = LinearMemory(budget_bytes=3 * GIB, unmapped=SAVED)
    assert Memo(model, may_expand=True)(ONE_POINT.base).knobs.expandable_segments
    worse = LinearMemory(budget_bytes=3 * GIB, unmapped=-SAVED)
    assert not Memo(worse, may_expand=True)(ONE_POINT.base).knobs.expandable_segments


# -- any search --------------------------------------------------------------------------------------------------------


@given(st.integers(2 * GIB, 64 * GIB), st.sampled_from((1, 8, 64)), st.sampled_from((0.0, 0.02)))
@settings(max_examples=40, deadline=None)
def test_a_plan_has_them_if_and_only_if_it_does_not_fit_without(budget: int, effective: int, noise: float) -> None:
    model = LinearMemory(budget_bytes=budget, noise=noise, unmapped=SAVED)
    found = found_or_none(space_of(effective_batch_size=effective), model)
    if found is None:
        return
    assert found.estimate.fits
    knobs = found.estimate.knobs
    assert knobs.expandable_segments != model.estimate(replace(knobs, expandable_segments=False)).fits
    assert (EXPANDABLE in [lever.name for lever in found.levers]) == knobs.expandable_segments
    assert len(model.calls) == len(set(model.calls))


@given(st.integers(2 * GIB, 64 * GIB), st.sampled_from((1, 8, 64)))
@settings(max_examples=40, deadline=None)
def test_with_them_no_plan_does_more_harm_than_without(budget: int, effective: int) -> None:
    space = space_of(effective_batch_size=effective)
    with_them = found_or_none(space, LinearMemory(budget_bytes=budget, unmapped=SAVED))
    without = found_or_none(
        replace(space, forbid=frozenset({EXPANDABLE})), LinearMemory(budget_bytes=budget, unmapped=SAVED)
    )
    if without is not None:
        assert with_them is not None
        harms = [max((lever.harm for lever in found.levers), default=Harm.NONE) for found in (with_them, without)]
        assert max(harms[0], Harm.TIME) <= max(harms[1], Harm.TIME)


def test_rehearsals_are_as_few_as_without_them() -> None:
    counts: dict[float, list[int]] = {0.0: [], SAVED: []}
    for unmapped, calls in counts.items():
        for budget in range(3 * GIB, 80 * GIB, 4 * GIB):
            model = LinearMemory(budget_bytes=budget, noise=0.02, longest=1024, unmapped=unmapped)
            found_or_none(space_of(effective_batch_size=64, longest=1024), model)
            calls.append(len(model.calls))
    assert sum(counts[SAVED]) <= 1.1 * sum(counts[0.0])
    assert max(counts[SAVED]) <= 20
