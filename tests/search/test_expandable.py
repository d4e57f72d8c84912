"""Expandable segments: the lever without harm, on no level, pulled where it makes the difference."""

from contextlib import suppress
from dataclasses import replace

from synthetic_memory import LinearMemory, search, space_of

from autotrain_mem.search.levels import allowed
from autotrain_mem.search.memo import Memo, candidate
from autotrain_mem.search.space import Space
from autotrain_mem.settings.levers import EXPANDABLE, LEVERS
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Estimate, Harm
from autotrain_mem.types.estimate import MixedLengths

SAVED = 0.02
"""Of the 3 % that native segments waste here."""


def tight(space: Space) -> LinearMemory:
    """A card on which the job as asked fits with expandable segments only, to the byte."""
    needed = LinearMemory(budget_bytes=200 * GIB, unmapped=SAVED).estimate(space.base).growing()
    return LinearMemory(budget_bytes=needed.required_bytes, unmapped=SAVED)


ON_DEVICE = {"gradient_checkpointing": True, "activation_offloading": False, "optimizer_offload": False}
ONE_POINT = space_of(per_device_train_batch_size=1, fit="lossless", **ON_DEVICE)
"""A job whose every batch is pinned: its one level has one point."""


def test_they_are_turned_on_where_native_segments_do_not_fit_for_no_rehearsal_and_no_harm() -> None:
    model = tight(ONE_POINT)
    found = search(ONE_POINT, model)
    assert found.estimate.knobs == replace(ONE_POINT.base, expandable_segments=True)
    assert found.estimate.required_bytes == model.budget_bytes
    assert found.estimate.reserved == found.estimate.memory.reserved.expandable_segments
    assert model.calls == [ONE_POINT.base]
    assert found.attempts == (candidate(found.estimate),)
    (lever,) = found.levers
    assert (lever.name, lever.before, lever.after, lever.harm) == (EXPANDABLE, False, True, Harm.NONE)
    assert lever.why == (
        "with segments of fixed size it needs 19.5 GiB, the budget is 19.1 GiB: "
        "segments that grow page by page leave fewer gaps between tensors: the same training"
    )


def test_the_reason_says_so_where_it_is_the_hours_after_that_do_not_fit() -> None:
    class Fragmenting(LinearMemory):
        """Rows of every length leave 2 GiB more in segments of fixed size, in whichever order they come."""

        def over_steps(self, estimate: Estimate) -> Estimate:
            peaks = {grows: each.peak_reserved_bytes for grows, each in estimate.memory.reserved.modes.items()}
            both = MixedLengths(native=(peaks[False] + 2 * GIB,) * 3, expandable_segments=(peaks[True],) * 3)
            return replace(estimate, memory=replace(estimate.memory, mixed_lengths=both))

    needed = LinearMemory(budget_bytes=200 * GIB, unmapped=SAVED).estimate(ONE_POINT.base)
    found = search(ONE_POINT, Fragmenting(budget_bytes=needed.required_bytes + GIB, unmapped=SAVED))
    (lever,) = found.levers
    assert lever.name == EXPANDABLE
    assert lever.why.startswith("with segments of fixed size, over hours with rows of every length, it needs 21.5 GiB")


def test_they_are_never_turned_on_against_the_users_words_or_vllm() -> None:
    assert EXPANDABLE not in space_of(method="grpo", use_vllm=False).pinned
    said = [{"expandable_segments": False}, {"forbid": frozenset({EXPANDABLE})}, {"method": "grpo", "use_vllm": True}]
    for words in said:
        space = space_of(per_device_train_batch_size=1, gradient_checkpointing=True, **words)
        assert not allowed(LEVERS[EXPANDABLE], space)
        model = tight(space)
        with suppress(DoesNotFitError):
            assert not search(space, model).estimate.knobs.expandable_segments, words
        assert len(model.calls) > 1  # what needs no other lever with them needs one without


def test_where_neither_kind_fits_the_one_that_needs_less_counts() -> None:
    for saved in (SAVED, -SAVED):
        model = LinearMemory(budget_bytes=3 * GIB, unmapped=saved)
        assert Memo(ONE_POINT, model)(ONE_POINT.base).knobs.expandable_segments is (saved > 0)
