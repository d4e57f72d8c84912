"""Every micro-batch that is offered is one that the trainer's own config takes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_memory import ONLINE, PPO, TRL, LinearMemory, rows_of, search
from synthetic_memory import space_of as any_space_of

from autotrain_mem.search.levels import line
from autotrain_mem.search.space import Space, with_rows
from autotrain_mem.support import codec
from autotrain_mem.support.errors import BatchSplitError, DoesNotFitError, UsageError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Harm

DEFAULTS = {"grpo": ONLINE, "rloo": ONLINE, "ppo": PPO}


def space_of(method: str, effective: int | None = None, processes: int = 1, **words: Any) -> Space:
    defaults = replace(DEFAULTS.get(method, TRL), per_device_eval_batch_size=8, processes=processes)
    return any_space_of(method=method, effective_batch_size=effective, defaults=defaults, longest=100, **words)


def trl_config(method: str, processes: int = 1, **arguments: Any) -> Any:
    import trl

    of_trl = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[method]
    kind = type("Config", (of_trl,), {"world_size": property(lambda self: processes)})
    return kind(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **arguments)


NAMES = (
    *("effective", "num_generations", "generation_batch_size", "steps_per_generation", "gradient_accumulation_steps"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "num_generations_eval"),
)


@st.composite
def words_of_groups(draw: st.DrawFn) -> dict[str, Any]:
    sizes = st.sampled_from((1, 2, 3, 4, 5, 6, 8, 12, 16, 24))
    words: dict[str, Any] = {name: draw(sizes) for name in sorted(draw(st.sets(st.sampled_from(NAMES))))}
    words["processes"] = draw(st.sampled_from((1, 2, 3, 4)))
    return words | ({"eval_strategy": "steps"} if draw(st.booleans()) else {})


@given(st.sampled_from(("grpo", "rloo")), words_of_groups(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_trl_takes_every_split_that_is_offered_and_refuses_what_is_refused(
    method: str, words: dict[str, Any], is_free: bool
) -> None:
    """Where the user leaves nothing to choose, an error of ours is one of TRL's."""
    asked = {name: value for name, value in words.items() if name != "effective"}
    if not is_free:
        words = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 8} | asked
    try:
        space = space_of(method, **words)
    except (BatchSplitError, UsageError):
        if not is_free:
            with pytest.raises(ValueError, match=r"divisible|same time|at least 2"):
                trl_config(method, **words)
        return
    assert space.effective_batch_size % words["processes"] == 0
    assert space.base.per_device_train_batch_size in rows_of(space)
    for rows in {min(rows_of(space)), space.base.per_device_train_batch_size, max(rows_of(space))}:
        split = codec.to_json(with_rows(space.base, rows))
        knobs = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps")
        config = trl_config(method, **asked | {name: split[name] for name in knobs})
        assert config.generation_batch_size % config.num_generations == 0


def test_rows_that_a_trainer_takes_are_offered() -> None:
    for method, effective, words, rows in (
        ("grpo", 16, {}, [16, 8, 4, 2, 1]),  # a generation is the effective batch
        ("grpo", 16, {"steps_per_generation": 2}, [16, 8, 4]),  # whole groups
        ("rloo", 12, {"generation_batch_size": 8, "num_generations": 4}, [4, 2, 1]),
        ("ppo", 12, {"num_mini_batches": 2}, [6, 3, 2, 1]),
        ("ppo", 16, {"num_mini_batches": 2, "whiten_rewards": True}, [8, 4, 2, 1]),
        ("kto", 8, {}, [8, 4, 2]),  # rows are compared with each other
        ("kto", 8, {"loss_type": "apo_zero_unpaired"}, [8, 4, 2, 1]),
    ):
        assert rows_of(space_of(method, effective, **words)) == rows, (method, words)


def test_sizes_that_make_no_generation_are_refused() -> None:
    for name in ("generation_batch_size", "steps_per_generation", "num_generations_eval", "num_mini_batches"):
        with pytest.raises(UsageError, match=f"--{name} 0"):
            space_of("ppo" if name == "num_mini_batches" else "grpo", **{name: 0})
    with pytest.raises(UsageError, match="at least two are needed"):
        space_of("rloo", num_generations=1)


ROWS, STEPS, WHOLE = "--per_device_train_batch_size", "--gradient_accumulation_steps", "--effective_batch_size"


def test_sizes_that_do_not_divide_are_told_what_would() -> None:
    for method, words, hint in (
        (
            *("sft", {"effective": 3, "gradient_accumulation_steps": 4}),
            f"keep {STEPS} 4 and use {WHOLE} 4,\nor keep {WHOLE} 3 and use {STEPS} 1 or 3",
        ),
        ("grpo", {"per_device_train_batch_size": 3}, f"use {WHOLE} 24,\nor keep it and use --num_generations 3"),
        (
            "grpo",
            {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
            f"use {ROWS} 4, 8, 12 or 24, or remove {ROWS} and {STEPS}",
        ),
        ("grpo", {"effective": 6, "steps_per_generation": 2}, f"use {WHOLE} 8, or remove --steps_per_generation"),
        ("ppo", {"per_device_train_batch_size": 8, "num_mini_batches": 2}, f"use {ROWS} 1, 2 or 4, or remove {ROWS}"),
        ("ppo", {"effective": 4, "whiten_rewards": True}, f"use {WHOLE} 8 or more"),
        ("kto", {"effective": 8, "per_device_train_batch_size": 1}, f"use {ROWS} 2 or more, or remove {ROWS}"),
        ("kto", {"effective": 8, "gradient_accumulation_steps": 8}, f"use {ROWS} 2 or more, or remove {STEPS}"),
        ("kto", {"effective": 1}, f"use {WHOLE} 2 or more"),
        ("kto", {"effective": 4, "processes": 4}, f"use {WHOLE} 8 or more"),
        (
            *("sft", {"effective": 20, "per_device_train_batch_size": 4, "processes": 2}),
            f"keep {ROWS} 4 and use {WHOLE} 16 or {WHOLE} 24,\nor keep {WHOLE} 20 and use {ROWS} 1, 2, 5 or 10",
        ),
        (
            "sft",
            {"effective": 16, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "processes": 2},
            f"use {WHOLE} 32 with both flags, or {WHOLE} 16 alone",
        ),
        (*("grpo", {"generation_batch_size": 8, "processes": 3}), "use --generation_batch_size 24"),
        (
            *("grpo", {"num_generations": 6, "effective": 12, "eval_strategy": "steps", "processes": 2}),
            "use --per_device_eval_batch_size 6 or 9, or --num_generations_eval 1, 2, 4, 8 or 16",
        ),
        (
            "ppo",
            {"effective": 24, "num_mini_batches": 5, "processes": 2},
            f"use {WHOLE} 20 or 30, or --num_mini_batches 1, 2, 3, 4, 6 or 12",
        ),
        (  # TRL asserts eight rows once the models are loaded
            *("ppo", {"effective": 16, "num_mini_batches": 2, "whiten_rewards": True, "processes": 2}),
            f"use {WHOLE} 32 or more, or --num_mini_batches 1",
        ),
    ):
        with pytest.raises(BatchSplitError) as raised:
            space_of(method, **words)
        assert raised.value.hint == hint


def followed(space: Space, name: str) -> list[tuple[int, int | None]]:
    """Returns the micro-batch of each point, and the batch that follows it."""
    points = line(space, space.base, checkpointing=True)
    return [(knobs.per_device_train_batch_size, getattr(knobs, name)) for knobs in points]


ROLLOUT, EVALUATION = "local_rollout_forward_batch_size", "per_device_eval_batch_size"


def test_rows_generated_or_evaluated_at_once_follow_the_micro_batch_up_to_the_whole_rollout_or_trls_own() -> None:
    assert followed(space_of("ppo", 16), ROLLOUT) == [(1, 1), (2, 2), (4, 4), (8, 8), (16, 64)]
    evaluated = space_of("sft", 16, eval_strategy="steps")
    assert followed(evaluated, EVALUATION) == [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8)]
    assert followed(space_of("dpo", 8, precompute_ref_log_probs=True), EVALUATION)[0] == (1, 1)
    assert EVALUATION not in codec.to_json(space_of("sft").base)


def test_a_batch_that_is_given_or_may_not_move_stays() -> None:
    rollout = [("ppo", ROLLOUT, words) for words in ({ROLLOUT: 64}, {"forbid": frozenset({"rollout_batch"})})]
    evaluated = [("sft", EVALUATION, words) for words in ({EVALUATION: 8}, {"forbid": frozenset({"eval_batch"})})]
    evaluated += [(method, EVALUATION, {}) for method in ("grpo", "rloo", "ppo")]
    for method, name, words in rollout + evaluated:
        space = space_of(method, 16, eval_strategy="steps", **words)
        assert {rows for _, rows in followed(space, name)} == {getattr(space.base, name)}, (method, name, words)


def test_as_many_rows_are_generated_at_once_as_fit() -> None:
    space = space_of("ppo", 64, use_peft=True, dtype="bfloat16", load_in_8bit=False, load_in_4bit=False)
    model = LinearMemory(budget_bytes=6 * GIB, rollout_bytes=150 * MIB)
    chosen = search(space, model).estimate.knobs
    rolled_out = chosen.local_rollout_forward_batch_size
    assert rolled_out is not None
    assert chosen.per_device_train_batch_size < rolled_out < 64
    assert not model.estimate(replace(chosen, local_rollout_forward_batch_size=2 * rolled_out)).fits


def test_an_error_names_a_rollout_that_was_pinned_too_large() -> None:
    pins = {ROLLOUT: 64, "use_peft": True, "dtype": "bfloat16"}
    space = space_of("ppo", 8, forbid=frozenset({"8bit_base", "4bit_base"}), **pins)
    with pytest.raises(DoesNotFitError) as raised:
        search(space, LinearMemory(budget_bytes=4 * GIB, rollout_bytes=100 * MIB))
    assert f"--{ROLLOUT} 1" in raised.value.hint
    assert "1 x 8 completions of 53 tokens, with gradient checkpointing" in raised.value.message


def test_an_evaluation_that_would_be_the_peak_gives_way_before_anything_else() -> None:
    model = LinearMemory(budget_bytes=20 * GIB, evaluated_bytes=1_000_000)
    pins = {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
    space = space_of("sft", eval_strategy="steps", max_length=1024, **pins)
    assert not model.estimate(space.base).fits
    (lever,) = search(space, model).levers
    assert (lever.name, lever.before, lever.after, lever.harm) == (EVALUATION, 8, 1, Harm.NONE)
    assert lever.why == "evaluation takes no more rows at once than training does: the same results, in more batches"
