from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_memory import TRL, LinearMemory, brute_force, found_or_none, space_of

from autotrain_mem.errors import UsageError
from autotrain_mem.planner.explore import TIE
from autotrain_mem.planner.levels import SHORTER_ROWS, levels
from autotrain_mem.planner.levers import LADDER, LEVERS
from autotrain_mem.planner.points import Line, lines
from autotrain_mem.planner.search import Found, search
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Harm
from autotrain_mem.units import GIB

PINS: Mapping[str, tuple[object, ...]] = {
    "per_device_train_batch_size": (1, 2, 4),
    "gradient_accumulation_steps": (1, 2, 4),
    "gradient_checkpointing": (False, True),
    "dtype": ("float32", "bfloat16"),
    "optim": ("adamw_torch", "adamw_8bit"),
    "use_peft": (False, True),
    "activation_offloading": (False, True),
    "optimizer_offload": (False,),
    "load_in_8bit": (False, True),
    "load_in_4bit": (False,),
    "use_bnb_nested_quant": (False, True),
    "max_length": (256, 2048),
}
TUNED_BY = {("micro_batch" if row.name == "micro_batch" else row.knobs[0]): row.name for row in LADDER}


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    names = draw(st.sets(st.sampled_from(sorted(PINS)), max_size=3))
    words: dict[str, object] = {name: draw(st.sampled_from(PINS[name])) for name in sorted(names)}
    both = {"per_device_train_batch_size", "gradient_accumulation_steps"} <= names
    if not both and draw(st.booleans()):
        words["effective_batch_size"] = draw(st.sampled_from((4, 8, 12, 64, 256)))
    return space_of(
        longest=draw(st.sampled_from((None, 100, 700, 3000))),
        context_length=4096,
        fit=draw(st.sampled_from(("all", "rounding", "lossless"))),
        forbid=draw(st.frozensets(st.sampled_from(sorted(LEVERS)), max_size=2)),
        **words,
    )


budgets = st.integers(2 * GIB, 64 * GIB)


def model_of(space: Space, budget_bytes: int, noise: float = 0.0) -> LinearMemory:
    longest = None if space.base.packing else space.longest
    return LinearMemory(budget_bytes=budget_bytes, noise=noise, longest=longest)


def shortest_fits(space: Space, model: LinearMemory) -> bool:
    """Whether rows may be cut, and any allowed point fits with the shortest."""
    may_cut = space.fit == "all" and "max_length" not in space.forbid | space.pinned
    cut = replace(space, base=replace(space.base, max_length=64))
    return may_cut and space.row_tokens(space.base.max_length) > 64 and brute_force(cut, model) is not None


def every_line(space: Space, name: str) -> list[Line]:
    return [line for level in levels(space) if level.name == name for line in lines(space, level)]


def harm_of(found: Found) -> Harm:
    """The level a plan was found on: TIME also where no lever was needed."""
    return max([Harm.TIME, *(lever.harm for lever in found.levers)])


@given(spaces(), budgets, st.sampled_from((0.0, 0.02)))
@settings(max_examples=80, deadline=None)
def test_a_plan_was_rehearsed_once_for_exactly_its_knobs_fits_and_keeps_to_the_users_words(
    space: Space, budget: int, noise: float
) -> None:
    model = model_of(space, budget, noise)
    found = found_or_none(space, model)
    assert len(model.calls) == len(set(model.calls))
    if found is None:
        return
    knobs = found.estimate.knobs
    assert found.estimate.fits
    assert knobs in model.calls
    assert found.estimate == model.estimate(knobs)
    assert knobs in [attempt.knobs for attempt in found.attempts]
    assert knobs.effective_batch_size == space.effective_batch_size
    assert all(getattr(knobs, name) == getattr(space.base, name) for name in space.pinned)
    assert not {TUNED_BY[lever.name] for lever in found.levers if lever.harm is not Harm.NONE} & space.forbid
    assert harm_of(found) <= {"lossless": Harm.TIME, "rounding": Harm.ROUNDING, "all": Harm.DATA}[space.fit]


@given(spaces(), budgets)
@settings(max_examples=60, deadline=None)
def test_the_fastest_plan_of_the_first_level_that_fits_is_found(space: Space, budget: int) -> None:
    space = replace(space, max_slowdown=float("inf"))
    model = model_of(space, budget)
    found, best = found_or_none(space, model), brute_force(space, model)
    if best is None:
        assert found is None or found.level == SHORTER_ROWS
        assert (found is None) == (not shortest_fits(space, model))
    else:
        assert found is not None
        assert found.level == best.level
        assert found.estimate.tokens_per_second >= 0.99 * best.tokens_per_second


@given(spaces(), budgets)
@settings(max_examples=60, deadline=None)
def test_next_larger_micro_batch_was_rehearsed_and_does_not_fit_or_is_no_faster(space: Space, budget: int) -> None:
    """Of a plan that was not chosen for its length."""
    found = found_or_none(space, model_of(space, budget))
    if found is None or found.level == SHORTER_ROWS:
        return
    (line,) = [line for line in every_line(space, found.level) if found.estimate.knobs in line]
    for larger in line[line.index(found.estimate.knobs) + 1 :][:1]:
        (attempt,) = [attempt for attempt in found.attempts if attempt.knobs == larger]
        assert not attempt.fits or attempt.tokens_per_second <= found.estimate.tokens_per_second * (1 + TIE)


@given(st.integers(3 * GIB, 5 * GIB), st.sampled_from((700, 3000, 20_000)))
@settings(max_examples=40, deadline=None)
def test_length_found_is_the_longest_on_the_grid_that_fits(budget: int, longest: int) -> None:
    space = space_of(longest=longest, per_device_train_batch_size=8)
    model = model_of(space, budget)
    found = found_or_none(space, model)
    if found is None or harm_of(found) is not Harm.DATA:
        return
    length = found.estimate.knobs.max_length
    assert length is not None
    following = length + (16 if length < 256 else 64)
    knobs = replace(found.estimate.knobs, max_length=min(following, longest))
    assert not model.estimate(knobs).fits


@pytest.mark.parametrize(("longest", "noise"), [(700, 0.02), (3000, 0.0), (32_768, 0.02)])
def test_length_is_found_in_eight_rehearsals(longest: int, noise: float) -> None:
    for budget in range(3 * GIB, 6 * GIB, GIB // 4):
        model = LinearMemory(budget_bytes=budget, noise=noise, longest=longest)
        found = found_or_none(space_of(longest=longest, per_device_train_batch_size=8), model)
        if found is not None and found.level == SHORTER_ROWS:
            chosen = found.estimate.knobs
            on_level = [call for call in model.calls if replace(call, max_length=chosen.max_length) == chosen]
            assert (
                len(on_level) <= 8 + 1 + 1
            )  # one on the level below, whose length is the one asked for; the neighbour


@pytest.mark.parametrize(("effective", "noise"), [(8, 0.02), (64, 0.0), (256, 0.02), (4096, 0.0)])
def test_rehearsals_are_few(effective: int, noise: float) -> None:
    """With those of the next level and of the confirmation; measured: 3 to 7 in the median, 17 at most."""
    counts = []
    for budget in range(2 * GIB, 72 * GIB, 2 * GIB):
        model = LinearMemory(budget_bytes=budget, noise=noise, longest=1024, copied_layers=3, amiss=0.005)
        found_or_none(space_of(effective_batch_size=effective, longest=1024), model)
        counts.append(len(model.calls))
    assert sorted(counts)[len(counts) // 2] <= 12
    assert max(counts) <= 20


def test_full_fine_tuning_that_fits_is_found_in_three_to_eight_rehearsals() -> None:
    counts = set()
    for budget in range(20 * GIB, 80 * GIB, GIB):
        model = LinearMemory(budget_bytes=budget)
        assert search(space_of(), model).level == "lossless"
        counts.add(len(model.calls))
    assert counts <= {2, 3, 4, 5, 6, 7, 8}


def full_points(model: LinearMemory) -> list[tuple[str, bool, int]]:
    """What was rehearsed of full fine-tuning: dtype, whether the optimizer is offloaded, rows."""
    full = [call for call in model.calls if not call.use_peft]
    return [(call.dtype, call.optimizer_offload, call.per_device_train_batch_size) for call in full]


@pytest.mark.parametrize(
    ("budget_gib", "rehearsed"),
    [
        # A level is left after its first and last point, and one that offloads after its last.
        (4.2, [("float32", False, 8), ("float32", False, 1), ("float32", True, 1)]),
        # Once weights were beyond the card a level's last point is asked alone.
        (3.5, [("float32", False, 8), ("float32", False, 1)]),
    ],
)
def test_a_level_that_cannot_fit_is_left_after_few_points(
    budget_gib: float, rehearsed: list[tuple[str, bool, int]]
) -> None:
    model = LinearMemory(budget_bytes=int(budget_gib * GIB))
    assert search(space_of(), model).estimate.knobs.use_peft
    halved = [("bfloat16", False, 8), ("bfloat16", False, 1), ("bfloat16", True, 1)]
    assert full_points(model) == rehearsed + halved[3 - len(rehearsed) :]


def test_weights_that_exceed_the_card_are_not_rehearsed_again_with_other_levers() -> None:
    model = LinearMemory(budget_bytes=int(1.6 * GIB))
    found = search(space_of(), model)
    assert found.estimate.knobs.load_in_8bit or found.estimate.knobs.load_in_4bit
    plain = [call for call in model.calls if not (call.load_in_4bit or call.load_in_8bit)]
    assert sorted({(call.dtype, call.use_peft) for call in plain}) == [
        ("bfloat16", False),
        ("bfloat16", True),
        ("float32", False),
    ]
    assert len(plain) <= 6  # the first and the last point of each level


def test_everything_that_fits_is_found_in_three_rehearsals_and_without_recomputing() -> None:
    """The first and the last point of the level, and the first of the next."""
    model = LinearMemory(budget_bytes=200 * GIB)
    found = search(space_of(), model)
    assert len(model.calls) == 3
    (lever,) = found.levers
    assert (lever.name, lever.before, lever.after, lever.harm) == ("gradient_checkpointing", True, False, Harm.NONE)


def test_defaults_that_fit_as_they_are_pull_no_lever() -> None:
    found = search(space_of(gradient_checkpointing=True), LinearMemory(budget_bytes=200 * GIB))
    assert found.levers == ()
    assert found.estimate.knobs == TRL


def test_smaller_batch_is_tried_before_shorter_length() -> None:
    space = space_of(fit="all", use_peft=True, dtype="bfloat16", gradient_checkpointing=True)
    found = search(space, LinearMemory(budget_bytes=4 * GIB))
    assert found.estimate.knobs.max_length == 1024
    assert found.estimate.knobs.per_device_train_batch_size < 8


def test_one_rounding_lever_is_enough_where_one_is_enough() -> None:
    space = space_of(effective_batch_size=1, gradient_checkpointing=True, optimizer_offload=False)
    found = search(space, LinearMemory(budget_bytes=13 * GIB))
    assert [lever.name for lever in found.levers if lever.harm is Harm.ROUNDING] == ["dtype"]


@given(st.integers(6 * GIB, 20 * GIB), st.sampled_from((1, 4, 8, 64)))
@settings(max_examples=40, deadline=None)
def test_no_smaller_set_of_rounding_levers_reaches_the_same_speed(budget: int, effective: int) -> None:
    space = space_of(effective_batch_size=effective, fit="rounding")
    model = model_of(space, budget)
    found = found_or_none(space, model)
    if found is not None and len([lever for lever in found.levers if lever.harm is Harm.ROUNDING]) == 2:
        fewer = [replace(found.estimate.knobs, **{name: getattr(TRL, name)}) for name in ("dtype", "optim")]
        assert not any(model.estimate(knobs).fits for knobs in fewer)


def test_lever_says_what_the_gentler_rung_would_have_needed() -> None:
    found = search(space_of(), LinearMemory(budget_bytes=4 * GIB))
    assert [(lever.name, lever.before, lever.after, lever.why) for lever in found.levers] == [
        (
            "micro_batch",
            "8 x 1",
            "2 x 4",
            "4 rows at once need 5.41 GiB, the budget is 4.00 GiB: "
            "fewer rows at once with more accumulation: the same optimizer steps in less memory",
        ),
        (
            "gradient_checkpointing",
            True,
            False,
            "the activations fit without recomputing them, which is faster",
        ),
        (
            "dtype",
            "float32",
            "bfloat16",
            "the base model is frozen and loses no update to rounding: "
            "weights, gradients and optimizer state take half the bytes and are rounded to bfloat16",
        ),
        (
            "use_peft",
            False,
            True,
            "full fine-tuning needs at least 4.35 GiB, the budget is 4.00 GiB: "
            "a LoRA adapter is trained and the base model stays frozen",
        ),
    ]


def test_unknown_forbidden_lever_is_refused_before_anything_is_rehearsed() -> None:
    model = LinearMemory(budget_bytes=4 * GIB)
    with pytest.raises(UsageError):
        search(space_of(forbid=frozenset({"lorra"})), model)
    assert model.calls == []
