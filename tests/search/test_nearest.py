"""What is told where nothing fits, and as much as fits of one knob: in few rehearsals, and of which level."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_memory import LinearMemory, search, space_of

from autotrain_mem.search.largest import Question, answering, find_border, find_most
from autotrain_mem.search.levels import levels
from autotrain_mem.search.memo import Memo
from autotrain_mem.search.search import Limits, SearchResult, no_plan
from autotrain_mem.search.space import Space
from autotrain_mem.settings.levers import LEVERS
from autotrain_mem.support.errors import DoesNotFitError, PlanError
from autotrain_mem.support.units import GIB, format_bytes
from autotrain_mem.types import Estimate, Knobs, LargestValue

ON_THE_DEVICE: dict[str, Any] = {"activation_offloading": False, "optimizer_offload": False}
FULL: dict[str, Any] = {"use_peft": False, "dtype": "float32", "optim": "adamw_torch"}
FULL |= {"max_length": 1024, "gradient_checkpointing": False}


def refused(model: LinearMemory, **words: Any) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as raised:
        search(space_of(**words), model)
    return raised.value


def error_of(budget_gib: float, **words: Any) -> DoesNotFitError:
    return refused(LinearMemory(budget_bytes=int(budget_gib * GIB), frees_gradients=False), **words)


GOLDEN = """\
toy-1B with full fine-tuning does not fit toy12.
  needs   12.2 GiB (fixed-size segments) in the backward pass (weights 1.86 GiB, gradients 1.86 GiB, \
optimizer state 5.59 GiB, activations 781.2 MiB, temporary 1.53 GiB, cached 356.4 MiB, outside torch 300.0 MiB),
          at the least demanding settings allowed: 8 x 1 rows, max_length 1024, with gradient checkpointing, \
bfloat16, stable_adamw
  budget  3.00 GiB (4.00 GiB total, 256.0 MiB used by others, 768.0 MiB headroom)
nearest that fits: --effective_batch_size 8 --use_peft --dtype bfloat16, \
without --per_device_train_batch_size and --gradient_accumulation_steps  (2.56 GiB) (fixed-size segments)"""


def test_error_does_the_next_sum_for_the_user_and_its_parts_add_up() -> None:
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    error = error_of(3, fit="rounding", **batch, **ON_THE_DEVICE)
    assert f"{error.message}\n{error.hint}" == GOLDEN
    parts = {name: float(size) for name, size in re.findall(r"(\w+) (\d+\.\d+) GiB[,)]", GOLDEN)}
    mebibytes = [float(size) for size in re.findall(r"\w+ (\d+\.\d+) MiB(?=[,)])", GOLDEN.split("budget")[0])]
    assert sum(parts.values()) + sum(mebibytes) / 1024 == pytest.approx(12.24, abs=0.02)  # each is rounded


KEPT = frozenset({"gradient_checkpointing", "8bit_base", "4bit_base", "activation_offloading"})
NO_BITS: dict[str, Any] = {"load_in_8bit": False, "load_in_4bit": False}
ADAPTER: dict[str, Any] = {"use_peft": True, "dtype": "bfloat16", "max_length": 1024} | NO_BITS | ON_THE_DEVICE


def test_the_hint_names_the_exact_flags() -> None:
    for budget_gib, words, hint in (
        # Limits give way in the order of harm.
        (2.7, FULL | ON_THE_DEVICE, "--gradient_checkpointing true --use_peft --dtype bfloat16  ("),
        (*(2.7, {"forbid": KEPT, "max_length": 1024}), "--gradient_checkpointing true --use_peft"),
        (10, {"fit": "lossless"} | ON_THE_DEVICE, "--optimizer_offload  ("),
        (5, {"fit": "lossless"}, "--optimizer_offload --dtype bfloat16  ("),
        (1.5, {"fit": "lossless"}, "--use_peft --load_in_4bit --use_bnb_nested_quant --dtype bfloat16  ("),
        # Pins that need not give way are kept.
        (11, {"fit": "lossless", "per_device_train_batch_size": 8} | ON_THE_DEVICE, "--optimizer_offload  (10.3 GiB)"),
        (
            *(
                2.7,
                {"optim": "adamw_torch", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2} | ADAPTER,
            ),
            "--effective_batch_size 16, without --per_device_train_batch_size and --gradient_accumulation_steps  "
            "(2.56 GiB)",
        ),
        # A forbidden micro-batch is answered with the exact split.
        (
            *(2.7, {"forbid": frozenset({"micro_batch"})} | ADAPTER),
            "--per_device_train_batch_size 1 --gradient_accumulation_steps 8  (2.56 GiB)",
        ),
    ):
        assert error_of(budget_gib, **words).hint.startswith(f"nearest that fits: {hint}")
    assert error_of(0.5).hint == "no change that is allowed makes it fit here"


def test_the_nearest_that_is_suggested_was_rehearsed_on_the_whole_model() -> None:
    model = LinearMemory(budget_bytes=int(10.32 * GIB), copied_layers=3, amiss=0.02, frees_gradients=False)
    error = refused(model, fit="lossless", per_device_train_batch_size=8, **ON_THE_DEVICE)
    assert model.expanded(model.whole_calls[0]).fits
    assert not model.estimate(model.whole_calls[0]).fits
    assert model.estimate(model.whole_calls[-1]).fits
    assert f"({format_bytes(model.estimate(model.whole_calls[-1]).required_bytes)})" in error.hint


def suggested(error: DoesNotFitError, words: dict[str, Any]) -> dict[str, Any]:
    """The job's words after the user followed the hint, read as a command line would."""
    flags, _, without = error.hint.removeprefix("nearest that fits: ").split("  (")[0].partition(", without ")
    followed = {name: value for name, value in words.items() if f"--{name}" not in without.split()}
    for name, value in re.findall(r"--(\w+)(?: (?!--)(\S+))?", flags):
        followed[name] = {"": True, "true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
    return followed


EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "per_device_eval_batch_size": 8}
PINS = FULL | ON_THE_DEVICE | NO_BITS | EVALUATED


@given(
    st.integers(GIB // 2, 24 * GIB),
    st.dictionaries(
        st.sampled_from(("per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size")),
        st.sampled_from((8,)),
    ),
    st.sets(st.sampled_from(sorted(PINS)), min_size=1, max_size=8),
    st.frozensets(st.sampled_from(sorted(LEVERS)), max_size=2),
    st.sampled_from(("all", "rounding", "lossless")),
)
@settings(max_examples=40, deadline=None)
def test_following_the_hint_leads_to_a_plan_that_fits(
    budget: int, batch: dict[str, int], pins: set[str], forbid: frozenset[str], fit: str
) -> None:
    words: dict[str, Any] = {**batch, **{name: PINS[name] for name in pins}, "forbid": forbid, "fit": fit}
    if len(batch) == 3:
        del words["effective_batch_size"]
    model = LinearMemory(budget_bytes=budget, evaluated_bytes=400_000)
    try:
        search(space_of(**words), model)
    except DoesNotFitError as error:
        assert len(model.calls) <= 24
        if error.hint.startswith("nearest"):
            followed = search(space_of(**suggested(error, words)), model)
            assert followed.estimate.fits
            assert followed.estimate.knobs.effective_batch_size == space_of(**words).effective_batch_size


def test_an_error_names_vllms_share_and_counts_what_the_method_trains_on_and_says_what_is_offloaded() -> None:
    class BesideVllm(LinearMemory):
        def estimate(self, knobs: Knobs) -> Estimate:
            return replace(super().estimate(knobs), vllm_share_bytes=7 * GIB)

    words = {"method": "dpo", "activation_offloading": True, "fit": "lossless"}
    message = refused(BesideVllm(budget_bytes=GIB // 2), **words).message
    assert "outside torch 300.0 MiB, vLLM's share 7.00 GiB)" in message
    assert "1 x 8 pairs, max_length 1024" in message
    assert "with gradient checkpointing, activations offloaded" in message
    # Float32 weights alone are beyond the card, so that no search would offload their optimizer.
    assert "activations offloaded, optimizer offloaded, float32" in error_of(1, fit="lossless", use_peft=False).message


def test_a_shorter_length_drops_pairs_of_a_reward_model_where_others_truncate() -> None:
    words = {"use_peft": True, "dtype": "bfloat16"} | NO_BITS | ON_THE_DEVICE
    why = {}
    for method in ("sft", "reward"):
        found = search(space_of(method=method, **words), LinearMemory(budget_bytes=int(2.45 * GIB)))
        why[method] = next(lever.why for lever in found.levers if lever.name == "max_length")
    assert why["sft"].endswith("rows are truncated to fewer tokens")
    assert why["reward"].endswith("pairs with a side of more tokens are dropped")


def test_a_suggestion_comes_to_an_end_where_the_whole_model_is_never_rehearsed() -> None:

    class CopiesAlone(LinearMemory):
        def rehearse(self, points: Sequence[Knobs], *, whole: bool) -> list[Estimate]:
            return super().rehearse(points, whole=False)

    error = refused(CopiesAlone(budget_bytes=4 * GIB, copied_layers=3), fit="lossless")
    assert "nearest that fits: --use_peft" in error.hint


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
def test_one_micro_batch_may_be_of_longer_rows_than_one_row_at_a_time(effective: int, gib: int, one_row: int) -> None:
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
