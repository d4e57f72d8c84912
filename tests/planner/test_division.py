"""Every micro-batch that is offered is one that the trainer's own config takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from synthetic_memory import ONLINE, PPO, TRL, LinearMemory

from autotrain_mem.errors import BatchSplitError, DoesNotFitError, UsageError
from autotrain_mem.planner.levels import levels
from autotrain_mem.planner.points import least_demanding, line
from autotrain_mem.planner.search import search
from autotrain_mem.planner.space import Space, make_space, micro_batches, with_rows
from autotrain_mem.spec import Job, Knobs
from autotrain_mem.spec.model import ModelFacts
from autotrain_mem.units import GIB, MIB

DEFAULTS = {"kto": TRL, "grpo": ONLINE, "rloo": ONLINE, "ppo": PPO}


def space_of(method: str, effective: int | None = None, **words: object) -> Space:
    job = Job(method=method, model="m", dataset=None, arguments=words, effective_batch_size=effective)
    defaults = replace(DEFAULTS[method], per_device_eval_batch_size=8)
    return make_space(defaults, job, ModelFacts(context_length=None, is_quantized=False), longest=100)


ROWS_AND_STEPS = ("per_device_train_batch_size", "gradient_accumulation_steps")


def rows_of(space: Space) -> list[int]:
    return list(micro_batches(space))


def trl_config(method: str, **arguments: Any) -> Any:
    """TRL's own dataclass, which refuses what does not divide as it is made."""
    import trl

    kind = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[method]
    return kind(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **arguments)


NAMES = (
    *("effective", "num_generations", "generation_batch_size", "steps_per_generation", "gradient_accumulation_steps"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "num_generations_eval"),
)


@st.composite
def words_of_groups(draw: st.DrawFn) -> dict[str, Any]:
    sizes = st.sampled_from((1, 2, 3, 4, 5, 6, 8, 12, 16, 24))
    words: dict[str, Any] = {name: draw(sizes) for name in sorted(draw(st.sets(st.sampled_from(NAMES))))}
    return words | ({"eval_strategy": "steps"} if draw(st.booleans()) else {})


@given(st.sampled_from(("grpo", "rloo")), words_of_groups())
@settings(max_examples=40, deadline=None)
def test_trl_takes_every_split_that_is_offered(method: str, words: dict[str, Any]) -> None:
    try:
        space = space_of(method, **words)
    except (BatchSplitError, UsageError):
        assume(False)
    asked = {name: value for name, value in words.items() if name not in ("effective", *ROWS_AND_STEPS)}
    assert space.base.per_device_train_batch_size in rows_of(space)
    for rows in rows_of(space):
        split = with_rows(space.base, rows)
        config = trl_config(
            method,
            **{
                **asked,
                "num_generations": space.base.num_generations,
                "per_device_train_batch_size": split.per_device_train_batch_size,
                "gradient_accumulation_steps": split.gradient_accumulation_steps,
            },
        )
        assert config.generation_batch_size % config.num_generations == 0


@given(st.sampled_from(("grpo", "rloo")), words_of_groups())
@settings(max_examples=25, deadline=None)
def test_what_is_refused_is_refused_by_trl_too(method: str, words: dict[str, Any]) -> None:
    """Where the user leaves nothing to choose, an error of ours is one of TRL's."""
    words = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 8} | words
    words.pop("effective", None)
    try:
        space_of(method, **words)
        refused = False
    except (BatchSplitError, UsageError):
        refused = True
    if refused:
        with pytest.raises(ValueError, match=r"divisible|same time|at least 2"):
            trl_config(method, **words)
    else:
        trl_config(method, **words)


@pytest.mark.parametrize(
    ("method", "effective", "words", "rows", "base"),
    [
        ("grpo", 16, {}, [16, 8, 4, 2, 1], (8, 2)),  # a generation is the effective batch
        ("grpo", 16, {"steps_per_generation": 2}, [16, 8, 4], (8, 2)),  # whole groups
        ("rloo", 12, {"generation_batch_size": 8, "num_generations": 4}, [4, 2, 1], (4, 3)),
    ],
)
def test_rows_that_divide_a_generation_are_offered(
    method: str, effective: int, words: dict[str, Any], rows: list[int], base: tuple[int, int]
) -> None:
    space = space_of(method, effective, **words)
    assert rows_of(space) == rows
    assert (space.base.per_device_train_batch_size, space.base.gradient_accumulation_steps) == base


@pytest.mark.parametrize(
    ("method", "words", "message"),
    [
        *(("grpo", {name: 0}, f"--{name} 0") for name in ("generation_batch_size", "steps_per_generation")),
        ("grpo", {"num_generations_eval": 0}, "--num_generations_eval 0"),
        ("ppo", {"num_mini_batches": 0}, "--num_mini_batches 0"),
        ("rloo", {"num_generations": 1}, "takes two at least"),
        ("grpo", {"generation_batch_size": 8, "steps_per_generation": 1}, "exclude each other"),
    ],
)
def test_sizes_that_make_no_generation_are_refused(method: str, words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        space_of(method, **words)


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            {"effective": 12},
            "--num_generations 8 does not divide 12 completions: those of one prompt form a group, and groups stay "
            "whole",
            "use --effective_batch_size 8 or 16,\nor keep it and use --num_generations 2, 3, 4, 6 or 12",
        ),
        (
            {"per_device_train_batch_size": 3},
            "--num_generations 8 does not divide 3 completions: those of one prompt form a group, and groups stay "
            "whole",
            "use --effective_batch_size 24,\nor keep it and use --num_generations 3",
        ),
        (
            {"generation_batch_size": 12},
            "--num_generations 8 does not divide 12 completions: those of one prompt form a group, and groups stay "
            "whole",
            "use --generation_batch_size 8 or 16,\nor keep it and use --num_generations 2, 3, 4, 6 or 12",
        ),
        (
            {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
            "micro-batches of 6 do not go with --steps_per_generation 2: groups and mini-batches stay whole",
            "use --per_device_train_batch_size 4, 8, 12 or 24, or remove --per_device_train_batch_size and "
            "--gradient_accumulation_steps",
        ),
        (
            {"effective": 6, "steps_per_generation": 2},
            "--num_generations 8 does not divide the completions of a generation, whichever micro-batch of an "
            "effective batch of 6 is taken 2 times: those of one prompt form a group, and groups stay whole",
            "use --effective_batch_size 8, or remove --steps_per_generation",
        ),
        (
            {"num_generations": 6, "effective": 12, "eval_strategy": "steps"},
            "groups of 6 completions do not divide the 8 of an evaluated batch, and groups stay whole",
            "use --per_device_eval_batch_size 6 or 12, or --num_generations_eval 1, 2, 4 or 8",
        ),
    ],
)
def test_groups_that_do_not_divide_are_told_what_would(words: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(BatchSplitError) as raised:
        space_of("grpo", **words)
    assert (raised.value.message, raised.value.hint) == (message, hint)


# -- PPO -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_micro_batches_of_ppo_make_whole_mini_batches(effective: int, batches: int) -> None:
    if effective % batches:
        with pytest.raises(BatchSplitError) as raised:
            space_of("ppo", effective, num_mini_batches=batches)
        (size, *_) = [int(word) for word in raised.value.hint.replace(",", "").split() if word.isdigit()]
        assert space_of("ppo", size, num_mini_batches=batches)
    else:
        space = space_of("ppo", effective, num_mini_batches=batches)
        assert all(effective // batches % rows == 0 for rows in rows_of(space))
        assert space.base.per_device_train_batch_size in rows_of(space)


def test_a_micro_batch_larger_than_a_mini_batch_is_refused() -> None:
    with pytest.raises(BatchSplitError) as raised:
        space_of("ppo", per_device_train_batch_size=8, num_mini_batches=2)
    assert raised.value.hint == "use --per_device_train_batch_size 1, 2 or 4, or remove --per_device_train_batch_size"


@pytest.mark.parametrize(
    ("effective", "batches", "hint"),
    [
        (16, 4, "use --effective_batch_size 32 or more, or --num_mini_batches 1 or 2"),
        (4, 1, "use --effective_batch_size 8 or more"),
    ],
)
def test_rewards_are_whitened_over_eight_rows_at_least(effective: int, batches: int, hint: str) -> None:
    """TRL asserts it once the models are loaded."""
    with pytest.raises(BatchSplitError) as raised:
        space_of("ppo", effective, num_mini_batches=batches, whiten_rewards=True)
    assert raised.value.hint == hint
    assert space_of("ppo", 8 * batches, num_mini_batches=batches, whiten_rewards=True)


def rollouts(knobs: Knobs) -> tuple[int, int | None]:
    return knobs.per_device_train_batch_size, knobs.local_rollout_forward_batch_size


def test_the_rows_generated_at_once_follow_the_micro_batch() -> None:
    space = space_of("ppo", 16)
    points = line(space, space.base, checkpointing=True)
    assert [rollouts(knobs) for knobs in points] == [(1, 1), (2, 2), (4, 4), (8, 8), (16, 64)]
    assert rollouts(least_demanding(space, levels(space)[0])) == (1, 1)


@pytest.mark.parametrize("words", [{"local_rollout_forward_batch_size": 64}, {"forbid": frozenset({"rollout_batch"})}])
def test_rows_generated_at_once_that_may_not_move_stay(words: dict[str, Any]) -> None:
    space = replace(space_of("ppo", 16), pinned=frozenset(words), forbid=words.get("forbid", frozenset()))
    assert {knobs.local_rollout_forward_batch_size for knobs in line(space, space.base, checkpointing=True)} == {64}


def test_as_many_rows_are_generated_at_once_as_fit() -> None:
    space = space_of("ppo", 64, use_peft=True, dtype="bfloat16", load_in_8bit=False, load_in_4bit=False)
    model = LinearMemory(budget_bytes=6 * GIB, rollout_bytes=150 * MIB)
    chosen = search(space, model).estimate.knobs
    rows, rolled_out = rollouts(chosen)
    assert rolled_out is not None
    assert rows < rolled_out < 64
    assert not model.estimate(replace(chosen, local_rollout_forward_batch_size=2 * rolled_out)).fits


def test_a_rollout_that_fits_whole_is_left_as_it_is() -> None:
    found = search(space_of("ppo", 8), LinearMemory(budget_bytes=100 * GIB))
    assert found.estimate.knobs.local_rollout_forward_batch_size == 64
    assert "local_rollout_forward_batch_size" not in [lever.name for lever in found.levers]


def test_an_error_names_a_rollout_that_was_pinned_too_large() -> None:
    space = space_of("ppo", 8, local_rollout_forward_batch_size=64, use_peft=True, dtype="bfloat16")
    space = replace(space, forbid=frozenset({"8bit_base", "4bit_base"}))
    with pytest.raises(DoesNotFitError) as raised:
        search(space, LinearMemory(budget_bytes=4 * GIB, rollout_bytes=100 * MIB))
    assert "--local_rollout_forward_batch_size 1" in raised.value.hint
    assert "1 x 8 completions of 53 tokens, with gradient checkpointing" in raised.value.message


# -- rows that are compared with each other ------------------------------------------------------------------------


def test_kto_takes_two_rows_at_least_but_for_a_loss_without_a_divergence() -> None:
    assert rows_of(space_of("kto", 8)) == [8, 4, 2]
    assert rows_of(space_of("kto", 8, loss_type="apo_zero_unpaired")) == [8, 4, 2, 1]


@pytest.mark.parametrize("given", [{"per_device_train_batch_size": 1}, {"gradient_accumulation_steps": 8}])
def test_one_row_is_refused_with_what_would_do(given: dict[str, int]) -> None:
    with pytest.raises(BatchSplitError, match="takes 2 at least") as refused:
        space_of("kto", 8, **given)
    assert "--per_device_train_batch_size 2" in refused.value.hint
    with pytest.raises(BatchSplitError, match="takes 2 at least") as refused:
        space_of("kto", 1)
    assert "--effective_batch_size 2" in refused.value.hint
