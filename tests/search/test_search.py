"""The search over all levels: what it takes, what it keeps beside that, and the reasons that it gives."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_memory import TRL, LinearMemory, brute_force, found_or_none, search, space_of

from autotrain_mem.search.adapter import ADAPTED
from autotrain_mem.search.changes import against
from autotrain_mem.search.explore import TIE
from autotrain_mem.search.levels import SHORTER_ROWS, levels
from autotrain_mem.search.memo import candidate
from autotrain_mem.search.nearest import budget_line
from autotrain_mem.search.search import SearchResult
from autotrain_mem.search.space import Space
from autotrain_mem.settings.levers import EXPANDABLE, LADDER, LEVERS
from autotrain_mem.settings.words import MAX_SLOWDOWN
from autotrain_mem.support.errors import DoesNotFitError, PlanError
from autotrain_mem.support.units import GIB, MIB, format_bytes
from autotrain_mem.types import Candidate, Estimate, Harm, Knobs, Owner, StepTime

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
    return may_cut and space.row_tokens(space.base) > 64 and brute_force(cut, model) is not None


def neighbour(space: Space, found: SearchResult) -> Knobs | None:
    """One step up the plan's line."""
    knobs = replace(found.estimate.knobs, expandable_segments=space.base.expandable_segments)
    level = next(level for level in levels(space) if level.name == found.level)
    (line,) = [line for line in level.lines if knobs in line]
    return next(iter(line[line.index(knobs) + 1 :]), None)


def harm_of(found: SearchResult) -> Harm:
    """The level a plan was found on: TIME also where no lever was needed."""
    return max([Harm.TIME, *(lever.harm for lever in found.levers)])


@given(spaces(), budgets, st.sampled_from((0.0, 0.02)), st.sampled_from((0.0, 0.02)))
@settings(max_examples=60, deadline=None)
def test_a_plan_is_the_fastest_of_the_first_level_that_fits_and_was_rehearsed_once_and_keeps_to_the_users_words(
    space: Space, budget: int, noise: float, unmapped: float
) -> None:
    space = replace(space, max_slowdown=float("inf"))
    model = replace(model_of(space, budget, noise), unmapped=unmapped)
    found, best = found_or_none(space, model), brute_force(space, model)
    assert len(model.calls) == len(set(model.calls))
    if noise == 0 and best is None:
        assert found is None or found.level == SHORTER_ROWS
        assert (found is None) == (not shortest_fits(space, model))
    elif noise == 0 and best is not None:
        assert found is not None
        assert found.level == best[0]
        assert found.estimate.tokens_per_second >= 0.99 * best[1]
    if found is None:
        return
    knobs, levers = found.estimate.knobs, [lever.name for lever in found.levers]
    assert found.estimate.fits
    assert found.estimate == model.estimate(knobs)
    assert knobs in [attempt.knobs for attempt in found.attempts]
    assert knobs.effective_batch_size == space.effective_batch_size
    decided = space.pinned - {EXPANDABLE}
    assert all(getattr(knobs, name) == getattr(space.base, name) for name in decided)
    native = model.estimate(knobs.growing(space.base.expandable_segments))
    assert native.knobs in model.calls
    # Expandable segments are turned on if and only if the plan does not fit without.
    assert (EXPANDABLE in levers) == (knobs != native.knobs) == (not native.fits)
    pulled = [lever.name for lever in found.levers if lever.harm is not Harm.NONE and lever.name not in ADAPTED]
    assert not {TUNED_BY[name] for name in pulled} & space.forbid
    loses = found.level.startswith("losing updates") and space.fit == "rounding"
    assert loses or harm_of(found) <= {"lossless": Harm.TIME, "rounding": Harm.ROUNDING, "all": Harm.DATA}[space.fit]
    # Every number in a reason is of a rehearsal that did not fit.
    needed = {format_bytes(attempt.required_bytes) for attempt in found.attempts if not attempt.fits}
    needed.add(format_bytes(native.required_bytes))
    for lever in found.levers:
        assert set(re.findall(r"([\d.]+ [GM]iB), the budget is", lever.why)) <= needed


def test_everything_that_fits_is_found_in_three_rehearsals_and_without_recomputing() -> None:
    """The first and the last point of the level, and the first of the next."""
    model = LinearMemory(budget_bytes=200 * GIB)
    found = search(space_of(), model)
    assert len(model.calls) == 3
    (lever,) = found.levers
    assert (lever.name, lever.before, lever.after, lever.harm) == ("gradient_checkpointing", True, False, Harm.NONE)
    as_asked = search(space_of(gradient_checkpointing=True), LinearMemory(budget_bytes=200 * GIB))
    assert (as_asked.levers, as_asked.estimate.knobs) == ((), TRL)


def crawling(by: float = 8.0, budget_gib: float = 11) -> LinearMemory:
    """Full fine-tuning in float32 fits with the optimizer on the host alone, which takes so many times as long."""
    slowed = {"gradient_checkpointing": 1.2, "activation_offloading": 1.2, "optimizer_offload": by}
    return LinearMemory(budget_bytes=int(budget_gib * GIB), slowed=slowed, frees_gradients=False)


PASSED_OVER = {"lossless": False, "lossless, offloading": True, "LoRA": True}


@pytest.mark.parametrize(
    ("words", "model", "level", "around"),
    [
        ({}, LinearMemory(21 * GIB, frees_gradients=False), "lossless", {"rounding": True}),
        # A level that offloads has nothing to offer to a plan that fits without it.
        ({"effective_batch_size": 64}, LinearMemory(24 * GIB), "lossless", {"rounding": True}),
        ({}, LinearMemory(11 * GIB), "lossless, offloading", {"lossless": False, "rounding": True}),
        # A plan far slower than the next level is passed over, by as much as the user says, and never for a level that
        # the user rules out.
        ({}, crawling(), "rounding", PASSED_OVER),
        ({"max_slowdown": 20}, crawling(8), "lossless, offloading", {"lossless": False, "rounding": True}),
        ({"max_slowdown": 1.5}, crawling(2), "rounding", PASSED_OVER),
        ({"fit": "lossless"}, crawling(50), "lossless, offloading", {"lossless": False}),
    ],
)
def test_the_levels_around_are_kept_with_what_they_have_to_offer(
    words: dict[str, Any], model: LinearMemory, level: str, around: dict[str, bool]
) -> None:
    found = search(space_of(learning_rate=1e-4, **words), replace(model, calls=[], whole_calls=[]))
    assert (found.level, {rival.level: rival.fits for rival in found.alternatives}) == (level, around)
    assert all((rival.ratio is not None) == rival.fits for rival in found.alternatives)


def test_levels_that_do_not_fit_are_kept_with_the_least_that_they_need_if_that_was_rehearsed() -> None:
    space = space_of(learning_rate=1e-4)
    model = LinearMemory(budget_bytes=4 * GIB, cards=("an L4",))
    found = search(space, model)
    below = ["lossless", "rounding", "rounding, offloading"]  # float32 weights are beyond the card, wherever state is
    assert [rival.level for rival in found.alternatives] == below  # an 8-bit base would gain nothing
    named = {level.name: level for level in levels(space)}
    for rival in found.alternatives:
        floors = [model.estimate(knobs) for knobs in named[rival.level].floors if knobs in model.calls]
        assert rival.required_bytes == min(each.required_bytes for each in floors)
        assert rival.would_fit == ("an L4",)


ON_THE_DEVICE = {"optimizer_offload": False, "activation_offloading": False}


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ({}, "LoRA"),
        ({"forbid": frozenset({"lora"})}, "losing updates"),
        ({"use_peft": False, "learning_rate": 1e-4}, "rounding"),
        ({"dtype": "bfloat16"}, "lossless"),
    ],
)
def test_updates_are_lost_where_an_adapter_is_ruled_out_or_the_user_says_so(words: dict[str, Any], level: str) -> None:
    found = search(space_of(**ON_THE_DEVICE, **words), LinearMemory(budget_bytes=10 * GIB))
    assert found.level == level
    lost = [lever.harm for lever in found.levers if lever.name == "dtype" and not found.estimate.knobs.use_peft]
    harms = {"losing updates": [Harm.WHAT_IS_TRAINED], "rounding": [Harm.ROUNDING]}
    assert lost == harms.get(level, [])


def test_updates_are_never_lost_for_speed_but_for_a_limit_that_nothing_else_keeps() -> None:
    space, model = space_of(use_peft=False, optim="adamw_torch"), crawling(50)
    found = search(space, model)
    assert (found.level, [each.level for each in found.alternatives]) == ("lossless, offloading", ["lossless"])

    class Quick:
        def keeps(self, estimate: Estimate) -> bool:
            return estimate.tokens_per_second > 2 * found.estimate.tokens_per_second

        def broken(self, fitting: Sequence[Estimate]) -> PlanError:
            raise AssertionError

    assert search(space, crawling(50), limits=Quick()).level == "losing updates"


def test_rows_are_never_cut_for_speed() -> None:
    """Attention grows with the square of the length: 64 tokens are computed at many times the speed."""

    class Quadratic(LinearMemory):
        def time(self, knobs: Knobs) -> StepTime:
            time = super().time(knobs)
            seconds = time.step_seconds * ((knobs.max_length or 4096) / 64) ** 2
            return replace(time, phases=dict.fromkeys(time.phases, seconds))

    space = space_of(use_peft=True, load_in_4bit=True, fit="all")
    found = search(space, Quadratic(budget_bytes=24 * GIB))
    assert found.estimate.knobs.max_length == space.base.max_length


@given(spaces(), budgets, st.floats(-0.02, 0.02))
@settings(max_examples=40, deadline=None)
def test_a_plan_is_rehearsed_whole_and_its_larger_neighbour_is_worse_whatever_copies_say(
    space: Space, budget: int, amiss: float
) -> None:
    model = replace(model_of(space, budget), copied_layers=3, amiss=amiss)
    heard: list[Candidate] = []
    try:
        found = search(space, model, on_attempt=heard.append)
    except DoesNotFitError:
        return
    assert found.estimate.fits
    assert found.estimate.memory.rehearsed_layers is None
    whole = {replace(knobs, expandable_segments=False) for knobs in model.whole_calls}
    assert replace(found.estimate.knobs, expandable_segments=False) in whole
    if found.level != SHORTER_ROWS and (larger := neighbour(space, found)) is not None:
        assert any(replace(each.knobs, expandable_segments=False) == larger for each in found.attempts)
        truth = model.estimate(larger)
        assert not truth.fits or truth.tokens_per_second <= found.estimate.tokens_per_second * (1 + TIE)
    assert list(found.attempts) == heard
    assert [replace(attempt.knobs, expandable_segments=False) for attempt in heard] == model.calls
    assert len([each for each in heard if each.rehearsed_layers is None]) == len(model.whole_calls)
    assert candidate(found.estimate) in heard


def test_a_choice_that_the_whole_model_overturns_makes_way_for_the_next_smaller() -> None:
    space = space_of(effective_batch_size=64, longest=1024, fit="lossless", optimizer_offload=False)
    exact = LinearMemory(budget_bytes=26 * GIB, longest=1024, copied_layers=3)
    astray = replace(exact, amiss=0.05, calls=[], whole_calls=[])
    assert search(space, astray).estimate.knobs == search(space, exact).estimate.knobs


def test_lever_says_what_the_gentler_rung_would_have_needed() -> None:
    found = search(space_of(), LinearMemory(budget_bytes=4 * GIB))
    assert [(lever.name, lever.before, lever.after, lever.why.partition(": ")[0]) for lever in found.levers] == [
        ("micro_batch", "8 x 1", "2 x 4", "4 rows at once need 5.41 GiB, the budget is 4.00 GiB"),
        *[("gradient_checkpointing", True, False, "the activations fit without recomputing them, which is faster")],
        ("dtype", "float32", "bfloat16", "the base model is frozen and loses no update to rounding"),
        (
            "use_peft",
            False,
            True,
            "full fine-tuning that keeps its updates needs at least 19.5 GiB, the budget is 4.00 GiB",
        ),
        *[("learning_rate", 2e-5, 2e-4, found.levers[-1].why)],
    ]
    assert found.levers[-2].why.endswith(": a LoRA adapter is trained and the base model stays frozen")


def test_scales_of_a_4_bit_base_are_a_change_where_it_was_asked_for_and_part_of_it_where_it_was_not() -> None:
    class Scaled(LinearMemory):
        def owners(self, knobs: Knobs) -> dict[Owner, int]:
            owners = super().owners(knobs)
            saved = 9 if knobs.use_bnb_nested_quant else 10
            return {**owners, Owner.WEIGHTS: owners[Owner.WEIGHTS] * saved // 10}

    words = {"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16", "optim": "sgd", **ON_THE_DEVICE}
    found = search(space_of(max_length=64, **words), Scaled(budget_bytes=830 * MIB))
    (rounded,) = [lever for lever in found.levers if lever.harm is Harm.ROUNDING]
    assert (found.level, rounded.name, rounded.after) == ("rounding", "use_bnb_nested_quant", True)
    assert rounded.why.startswith("without it 1 row at once needs 869.7 MiB, the budget is 830.0 MiB: ")
    found = search(space_of(max_length=64), Scaled(budget_bytes=850 * MIB))
    assert found.level.startswith("LoRA on a 4-bit base")
    assert found.estimate.knobs.use_bnb_nested_quant
    assert "use_bnb_nested_quant" not in [lever.name for lever in found.levers]


def test_a_need_that_reads_as_the_budget_is_told_by_what_is_missing() -> None:
    assert against(76 * GIB + 12 * MIB, 76 * GIB) == "12.0 MiB more than the budget of 76.0 GiB"
    estimate = LinearMemory(budget_bytes=GIB).estimate(TRL)
    assert "too little" not in budget_line(estimate)
    assert budget_line(replace(estimate, budget_bytes=estimate.required_bytes - 1)).endswith(
        " headroom), 1 B too little"
    )


def test_a_lever_pulled_for_speed_says_so() -> None:
    found = search(space_of(learning_rate=1e-4), crawling())
    (passed,) = [rival for rival in found.alternatives if rival.level == "lossless, offloading"]
    ratio = 1 / (passed.ratio or 1)
    assert ratio > MAX_SLOWDOWN
    whys = [lever.why for lever in found.levers if lever.name in ("dtype", "optim")]
    assert f"without it a plan fits that takes {ratio:.1f} times as long" in {why.partition(": ")[0] for why in whys}
    measured = r"without it (a plan fits that takes|the same fits at|\d+ rows? at once needs?) [\d.]+ .*: "
    assert all(re.match(measured, why) for why in whys)


def test_what_parameters_alone_exceed_is_asked_while_the_choice_is_confirmed_and_changes_no_plan() -> None:
    space, model = space_of(), LinearMemory(budget_bytes=5 * GIB, copied_layers=2)
    counting = replace(model, counts_parameters=True, calls=[], whole_calls=[])
    found, quicker = search(space, model), search(space, counting)
    assert (quicker.level, quicker.estimate, quicker.levers) == (found.level, found.estimate, found.levers)
    assert [each.level for each in quicker.alternatives] == [each.level for each in found.alternatives]
    assert not counting.exceeds(counting.calls[0])
    assert any(counting.exceeds(knobs) for knobs in counting.calls), "what the level would need is told all the same"

    class Misled(LinearMemory):
        def exceeds(self, knobs: Knobs) -> bool:
            return not knobs.use_peft

    roomy = LinearMemory(budget_bytes=80 * GIB)
    assert search(space, Misled(budget_bytes=80 * GIB)).estimate == search(space, roomy).estimate, "it fits after all"
