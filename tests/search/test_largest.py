"""As much as fits of one knob: the border of a level in few rehearsals, and which level the answer is of."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from synthetic_memory import LinearMemory, space_of

from autotrain_mem.search.largest import Question, answering, find_border, find_most
from autotrain_mem.search.levels import levels
from autotrain_mem.search.memo import Memo
from autotrain_mem.search.search import Limits, SearchResult, no_plan
from autotrain_mem.search.space import Space
from autotrain_mem.support.errors import DoesNotFitError, PlanError
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Estimate
from autotrain_mem.types.gpu_comparison import LargestValue

LENGTHS = (*range(64, 256, 16), *range(256, 16_384, 64), 16_384)
ROWS = range(1, 4097)


def question(name: str, values: Sequence[int], **words: Any) -> Question:
    @cache
    def space(value: int) -> Space:
        return space_of(**{**words, name: value})

    return Question(name=name, values=values, space=space, stopped_by="the end")


def fits(asked: Question, name: str, model: LinearMemory, value: int, *, at_any_point: bool = False) -> bool:
    """Whether the least demanding point of a level does, or any, without a search."""
    level = next(each for each in levels(asked.space(value)) if each.name == name)
    points = [knobs for line in level.lines for knobs in line] if at_any_point else [level.least]
    estimates = [model.estimate(knobs) for knobs in points]
    return any(each.fits or each.growing().fits for each in estimates)


def is_border(asked: Question, level: str, model: LinearMemory, most: LargestValue) -> bool:
    """Whether a value fits and its neighbour does not."""
    after = asked.values.index(most.value) + 1
    is_last = after == len(asked.values)
    neighbour = None if is_last else asked.values[after]
    beyond = is_last or not fits(asked, level, model, asked.values[after])
    return fits(asked, level, model, most.value) and beyond and most.next_value == neighbour


def search_most(
    asked: Question, model: LinearMemory, limits: Limits | None = None
) -> tuple[SearchResult, LargestValue]:
    space = asked.space(asked.values[0])
    memo = Memo(space, model)
    found = find_most(asked, memo, limits)
    if found is None:
        raise no_plan(space, memo, limits)
    assert found.most is not None
    return found, found.most


@pytest.mark.parametrize("budget", [9, 17, 20, 24, 48])
@pytest.mark.parametrize(
    ("name", "values"), [("max_length", LENGTHS), ("per_device_train_batch_size", ROWS)], ids=["length", "rows"]
)
@pytest.mark.parametrize(("frees_gradients", "rehearsals"), [(False, 8), (True, 11)], ids=["straight", "bent"])
def test_the_border_of_each_level_is_found_in_few_rehearsals(
    budget: int, name: str, values: Sequence[int], frees_gradients: bool, rehearsals: int
) -> None:
    """Without accumulation few rows peak where all gradients are there, and many where none are yet."""
    asked = question(name, values, **({} if name == "max_length" else {"max_length": 512}))
    model = LinearMemory(int(budget * GIB), evaluated_bytes=0, frees_gradients=frees_gradients)
    for level in answering(asked):
        memo = Memo(asked.space(values[0]), model)
        border = find_border(asked, level.name, memo)
        assert (border is not None) == fits(asked, level.name, model, values[0]), level.name
        if border is not None:
            assert is_border(asked, level.name, model, border.most(asked)), level.name
            assert len(memo.attempts) <= rehearsals, level.name


@pytest.mark.parametrize(("effective", "gib", "one_row"), [(2, 8, 144), (8, 8, 144), (2, 5, 3968)])
def test_a_batch_in_one_micro_batch_may_be_of_longer_rows_than_one_row_at_a_time(
    effective: int, gib: int, one_row: int
) -> None:
    """Where gradients are accumulated, they and the activations of one row are there together."""
    asked = question("max_length", LENGTHS, effective_batch_size=effective, learning_rate=1e-4)
    model = LinearMemory(gib * GIB)
    found, most = search_most(asked, model)
    assert most.value > 1.5 * one_row
    after = LENGTHS[LENGTHS.index(most.value) + 1]
    assert most.next_value == after
    assert fits(asked, found.level, model, one_row)
    assert not fits(asked, found.level, model, LENGTHS[LENGTHS.index(one_row) + 1])
    assert fits(asked, found.level, model, most.value, at_any_point=True)
    assert not fits(asked, found.level, model, after, at_any_point=True)
    assert len(found.attempts) <= 28


def test_all_rows_at_once_may_fit_where_fewer_do_not() -> None:
    """Of 8 rows all in one micro-batch leave nothing to accumulate."""
    asked = question("per_device_train_batch_size", (1, 2, 4, 8), effective_batch_size=8, fit="lossless")
    for gib, accumulating in ((8, []), (8.2, [1])):
        model = LinearMemory(int(gib * GIB))
        every = [each for each in (1, 2, 4, 8) if fits(asked, "lossless, offloading", model, each)]
        assert every == [*accumulating, 8]
        found, most = search_most(asked, model)
        assert most == LargestValue(name=asked.name, value=8, next_value=None, stopped_by="the end")
        assert found.estimate.knobs.gradient_accumulation_steps == 1


def test_what_the_whole_model_overturns_is_looked_for_again() -> None:
    asked = question("max_length", LENGTHS, fit="lossless", forbid=frozenset({"optimizer_offload"}))
    for amiss in (0.02, -0.02):
        model = LinearMemory(int(19.6 * GIB), copied_layers=3, amiss=amiss)
        memo = Memo(asked.space(64), model)
        border = find_border(asked, "lossless", memo)
        assert border is not None
        assert is_border(asked, "lossless", model, border.most(asked))
        assert border.beyond is not None
        assert {border.estimate.memory.rehearsed_layers, border.beyond.memory.rehearsed_layers} == {None}


def test_the_answer_is_of_the_gentlest_level_that_holds_the_smallest_value_unless_it_is_passed_over() -> None:
    for gib, level in ((24, "lossless"), (9, "lossless, offloading")):
        found, most = search_most(question("max_length", LENGTHS), LinearMemory(gib * GIB))
        assert found.level == level
        assert found.estimate.fits
        assert found.estimate.knobs.max_length == most.value
        assert "max_length" not in [lever.name for lever in found.levers], "it is the user's word"
    asked, model = question("max_length", LENGTHS, max_slowdown=1.2), LinearMemory(9 * GIB)
    swift, most = search_most(asked, model)
    order = [level.name for level in answering(asked)]
    assert order.index(swift.level) > order.index("lossless, offloading")
    assert is_border(asked, swift.level, model, most)


def test_limits_are_kept_and_an_error_names_the_nearest_where_not_even_the_smallest_value_fits() -> None:
    class Nothing:
        def keeps(self, estimate: Estimate) -> bool:
            return False

        def broken(self, fitting: Sequence[Estimate]) -> PlanError:
            return PlanError(f"{len(fitting) > 0}")

    with pytest.raises(PlanError, match="True"):
        search_most(question("max_length", LENGTHS[:20]), LinearMemory(24 * GIB), limits=Nothing())
    with pytest.raises(DoesNotFitError, match="does not fit toy12"):
        search_most(question("max_length", LENGTHS, fit="lossless"), LinearMemory(2 * GIB))
