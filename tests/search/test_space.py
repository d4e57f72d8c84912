"""What a job leaves to the search, and how GPUs share rows and tokens; each micro-batch is one that TRL takes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_memory import EIGHT, ONLINE, PPO, TRL, LinearMemory, search, space_of

from autotrain_mem.search.levels import levels, line
from autotrain_mem.search.shardings import LONG_ROW_TOKENS, degrees, shardings, shared, way_of
from autotrain_mem.search.space import Space, make_space, micro_batches, precise_for, with_rows
from autotrain_mem.support import codec
from autotrain_mem.support.errors import BatchSplitError, DoesNotFitError, UsageError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import DataProfile, Harm, Job, ModelFacts
from autotrain_mem.types.hardware import lacks_bf16


def test_trl_defaults_are_the_base_when_nothing_is_given_and_knobs_alone_are_pinned() -> None:
    space = space_of()
    assert (space.base, space.pinned, space.effective_batch_size) == (TRL, frozenset(), 8)
    assert space_of(weight_decay=0.1, dtype="bfloat16").pinned == {"dtype"}


def test_batch_flags_decide_the_splits_and_the_effective_batch_is_that_of_all_processes() -> None:
    for processes, words, effective, splits, base in (
        # Every divisor is a choice, largest first; the base is the largest that is not above TRL's micro-batch.
        (1, {"effective_batch_size": 12}, 12, [12, 6, 4, 3, 2, 1], (6, 2)),
        (1, {"per_device_train_batch_size": 4}, 4, [4], (4, 1)),
        (1, {"gradient_accumulation_steps": 4}, 32, [8], (8, 4)),
        (1, {"per_device_train_batch_size": 4, "effective_batch_size": 64}, 64, [4], (4, 16)),
        (4, {}, 32, [8, 4, 2, 1], (8, 1)),
        (4, {"effective_batch_size": 64}, 64, [16, 8, 4, 2, 1], (8, 2)),
        (4, {"effective_batch_size": 64, "gradient_accumulation_steps": 16}, 64, [1], (1, 16)),
        (4, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, 48, [4], (4, 3)),
    ):
        space = space_of(defaults=replace(TRL, processes=processes), **words)
        assert (space.effective_batch_size, [*micro_batches(space)]) == (effective, splits), words
        assert (space.base.per_device_train_batch_size, space.base.gradient_accumulation_steps) == base, words
        assert with_rows(space.base, splits[-1]).effective_batch_size == effective, words


def test_gpus_that_do_not_divide_the_effective_batch_are_told_how_many_would() -> None:
    facts = ModelFacts(context_length=None, is_quantized=False)
    for machines, effective, hint in (
        (1, 12, "--gpus 1, 2, 3, 4, 6 or 12"),
        (128, 64, "8 --nodes 1, 2, 4 or 8"),
        (3, 20, "GPUs in all: 1, 2, 4, 5, 10 or 20"),
    ):
        job = Job(method="sft", model="toy-1B", dataset=None, effective_batch_size=effective)
        with pytest.raises(BatchSplitError) as refused:
            make_space(replace(TRL, processes=8 * machines), job, facts, longest=None, nodes=machines)
        assert refused.value.hint.endswith(hint)


AUTO, P99 = {"max_length": "auto"}, {"max_length": "p99"}


def test_the_length_is_what_the_data_answer_within_the_context() -> None:
    for words, longest, context_length, length in (
        *(({}, 80, 2048, 80), (AUTO, 9000, 2048, 2048), (AUTO, 80, None, 80)),
        *(({}, None, 2048, 1024), (AUTO, None, 512, 512), ({}, None, None, 1024)),
        *((P99, 80, 2048, 70), (P99, 80, 64, 64)),
    ):
        job = Job(method="sft", model="any", dataset=None, arguments=words)
        facts = ModelFacts(context_length=context_length, is_quantized=False)
        profile = None if longest is None else DataProfile(rows_by_length={70: 99, longest: 1})
        space = make_space(TRL, job, facts, longest=longest, profile=profile)
        assert space.base.max_length == length, (words, longest, context_length)
        assert "max_length" not in space.pinned


def test_a_given_length_is_pinned_and_rows_count_as_long_as_they_are_unless_packed() -> None:
    space = space_of(max_length=512, longest=80)
    assert (space.base.max_length, "max_length" in space.pinned) == (512, True)
    packed = space_of(max_length=512, longest=80, packing=True)
    assert (space.row_tokens(space.base), packed.row_tokens(packed.base)) == (80, 512)


T4, V100, A100 = (7, 5), (7, 0), (8, 0)


def test_a_card_before_ampere_trains_in_fp16_unless_the_user_chose() -> None:
    chosen = [(T4, {"bf16": True}, False), (T4, {"bf16": False}, False), (T4, {"fp16": False}, False)]
    for card, words, fp16 in ((T4, {"use_peft": True}, True), (V100, {}, True), (A100, {}, False), *chosen):
        assert precise_for(TRL, words, card) == replace(TRL, fp16=fp16)
        assert lacks_bf16(card) is (card != A100)


def test_a_config_of_deepspeeds_says_how_a_model_is_divided_also_where_all_limits_are_let_go() -> None:
    """Under another sharding the trainer would be DeepSpeed's all the same."""
    divided = replace(TRL, processes=2, sharding="zero2")
    said = space_of(defaults=divided, deepspeed={"zero_optimization": {"stage": 2}})
    free = space_of(defaults=divided)
    assert shardings(replace(said, pinned=frozenset())) == ("zero2",)
    assert len(shardings(free)) > 1


PAIRS = replace(EIGHT, sharding="fsdp2", cp_size=2)


def tried(tokens: int = LONG_ROW_TOKENS, *, layers: bool = True, **words: Any) -> tuple[int, ...]:
    given = {"max_length": tokens, **words}
    forbid = frozenset(given.pop("forbid", ()))
    space = space_of(defaults=EIGHT, forbid=forbid, **given)
    return degrees(replace(space, shares_tokens=layers), Job(model="toy", dataset=None, method="sft", arguments=given))


def test_tokens_of_long_rows_are_shared_by_what_divides_the_gpus_and_as_what_is_said_allows() -> None:
    assert tried() == (2, 4, 8)
    for words in (
        *({"tokens": LONG_ROW_TOKENS - 1}, {"layers": False}, {"packing": True}),
        *({"cp_size": 2}, {"forbid": ("cp_size",)}, {"sp_size": 2}, {"sharding": "ddp"}),
        {"sharding": "zero3", "forbid": ("sp_size",)},
        {"attn_implementation": "flash_attention_2"},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    ):
        assert tried(**words) == (), words


def test_under_zero_they_are_shared_in_its_way() -> None:
    assert tried(sharding="zero3", attn_implementation="flash_attention_2") == (2, 4, 8)
    jobs = (Job(model="toy", dataset=None, method="sft", arguments=each) for each in ({}, {"sharding": "zero3"}))
    assert [way_of(job).name for job in jobs] == ["cp_size", "sp_size"]
    assert replace(PAIRS, cp_size=1, sp_size=4, sharding="zero3").data_parallel_size == 2


def test_the_effective_batch_is_of_those_that_have_rows_of_their_own() -> None:
    assert PAIRS.data_parallel_size == 4
    assert PAIRS.effective_batch_size == EIGHT.effective_batch_size / 2
    space = space_of(defaults=PAIRS, effective_batch_size=32)
    assert space.share == 8
    assert [*micro_batches(space)] == [8, 4, 2, 1]
    assert {with_rows(space.base, rows).effective_batch_size for rows in micro_batches(space)} == {32}
    with pytest.raises(BatchSplitError, match="4 groups of 2 GPUs do not divide the effective batch size 6"):
        space_of(defaults=PAIRS, effective_batch_size=6)


def test_shared_tokens_are_tried_with_fsdp2_alone() -> None:
    space = space_of(defaults=PAIRS, longest=2048)
    ways = {way.sharding for level in levels(space) for setting in level.settings for way in shared(space, setting)}
    assert ways == {"fsdp2", "fsdp2-no-reshard"}


DEFAULTS = {"grpo": ONLINE, "rloo": ONLINE, "ppo": PPO}


def of_method(method: str, effective: int | None = None, processes: int = 1, **words: Any) -> Space:
    defaults = replace(DEFAULTS.get(method, TRL), per_device_eval_batch_size=8, processes=processes)
    return space_of(method=method, effective_batch_size=effective, defaults=defaults, longest=100, **words)


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
def test_trl_takes_offered_splits_and_refuses_refused_ones(method: str, words: dict[str, Any], is_free: bool) -> None:
    """Where the user leaves nothing to choose, an error of ours is one of TRL's."""
    asked = {name: value for name, value in words.items() if name != "effective"}
    if not is_free:
        words = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 8} | asked
    try:
        space = of_method(method, **words)
    except (BatchSplitError, UsageError):
        if not is_free:
            with pytest.raises(ValueError, match=r"divisible|same time|at least 2"):
                trl_config(method, **words)
        return
    assert space.effective_batch_size % words["processes"] == 0
    assert space.base.per_device_train_batch_size in micro_batches(space)
    for rows in {min(micro_batches(space)), space.base.per_device_train_batch_size, max(micro_batches(space))}:
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
        assert [*micro_batches(of_method(method, effective, **words))] == rows, (method, words)


def test_sizes_that_make_no_generation_are_refused() -> None:
    for name in ("generation_batch_size", "steps_per_generation", "num_generations_eval", "num_mini_batches", "lora_r"):
        with pytest.raises(UsageError, match=f"--{name} 0"):
            of_method("ppo" if name == "num_mini_batches" else "grpo", **{name: 0})
    with pytest.raises(UsageError, match="at least two are needed"):
        of_method("rloo", num_generations=1)


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
            of_method(method, **words)
        assert raised.value.hint == hint


def followed(space: Space, name: str) -> list[tuple[int, int | None]]:
    """Returns the micro-batch of each point, and the batch that follows it."""
    points = line(space, space.base, checkpointing=True)
    return [(knobs.per_device_train_batch_size, getattr(knobs, name)) for knobs in points]


ROLLOUT, EVALUATION = "local_rollout_forward_batch_size", "per_device_eval_batch_size"


def test_rows_generated_or_evaluated_at_once_follow_the_micro_batch_up_to_the_whole_rollout_or_trls_own() -> None:
    assert followed(of_method("ppo", 16), ROLLOUT) == [(1, 1), (2, 2), (4, 4), (8, 8), (16, 64)]
    evaluated = of_method("sft", 16, eval_strategy="steps")
    assert followed(evaluated, EVALUATION) == [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8)]
    for method in ("sft", "dpo"):
        assert EVALUATION not in codec.to_json(of_method(method, precompute_ref_log_probs=method == "dpo").base)


def test_a_batch_that_is_given_or_may_not_move_stays() -> None:
    rollout = [("ppo", ROLLOUT, words) for words in ({ROLLOUT: 64}, {"forbid": frozenset({"rollout_batch"})})]
    evaluated = [("sft", EVALUATION, words) for words in ({EVALUATION: 8}, {"forbid": frozenset({"eval_batch"})})]
    evaluated += [(method, EVALUATION, {}) for method in ("grpo", "rloo", "ppo")]
    for method, name, words in rollout + evaluated:
        space = of_method(method, 16, eval_strategy="steps", **words)
        assert {rows for _, rows in followed(space, name)} == {getattr(space.base, name)}, (method, name, words)


def test_as_many_rows_are_generated_at_once_as_fit() -> None:
    space = of_method("ppo", 64, use_peft=True, dtype="bfloat16", load_in_8bit=False, load_in_4bit=False)
    model = LinearMemory(budget_bytes=6 * GIB, rollout_bytes=150 * MIB)
    chosen = search(space, model).estimate.knobs
    rolled_out = chosen.local_rollout_forward_batch_size
    assert rolled_out is not None
    assert chosen.per_device_train_batch_size < rolled_out < 64
    assert not model.estimate(replace(chosen, local_rollout_forward_batch_size=2 * rolled_out)).fits


def test_an_error_names_a_rollout_that_was_pinned_too_large() -> None:
    pins = {ROLLOUT: 64, "use_peft": True, "dtype": "bfloat16"}
    space = of_method("ppo", 8, forbid=frozenset({"8bit_base", "4bit_base"}), **pins)
    with pytest.raises(DoesNotFitError) as raised:
        search(space, LinearMemory(budget_bytes=4 * GIB, rollout_bytes=100 * MIB))
    assert f"--{ROLLOUT} 1" in raised.value.hint
    assert "1 x 8 completions of 53 tokens, with gradient checkpointing" in raised.value.message


def test_an_evaluation_that_would_be_the_peak_gives_way_before_anything_else() -> None:
    model = LinearMemory(budget_bytes=20 * GIB, evaluated_bytes=1_000_000)
    pins = {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
    space = of_method("sft", eval_strategy="steps", max_length=1024, **pins)
    assert not model.estimate(space.base).fits
    (lever,) = search(space, model).levers
    assert (lever.name, lever.before, lever.after, lever.harm) == (EVALUATION, 8, 1, Harm.NONE)
    assert lever.why == "the evaluation batch is no larger than the micro-batch: the same results, in more batches"
