"""What a job leaves to the search, the precision of its card, and how GPUs share rows and the tokens of a row."""

from dataclasses import replace
from typing import Any

import pytest
from synthetic_memory import EIGHT, TRL, rows_of, space_of

from autotrain_mem.search.levels import levels
from autotrain_mem.search.shardings import LONG_ROW_TOKENS, degrees, shardings, shared, way_of
from autotrain_mem.search.space import make_space, precise_for, with_rows
from autotrain_mem.support.errors import BatchSplitError
from autotrain_mem.types import DataProfile, Job
from autotrain_mem.types.hardware import lacks_bf16
from autotrain_mem.types.model import ModelFacts


def test_trl_defaults_are_the_base_when_nothing_is_given_and_knobs_alone_are_pinned() -> None:
    space = space_of()
    assert (space.base, space.pinned, space.effective_batch_size) == (TRL, frozenset(), 8)
    assert space_of(weight_decay=0.1, dtype="bfloat16").pinned == {"dtype"}


@pytest.mark.parametrize(
    ("processes", "words", "effective", "splits", "base"),
    [
        # Every divisor is a choice, largest first; the base is the largest that is not above TRL's micro-batch.
        (1, {"effective_batch_size": 12}, 12, [12, 6, 4, 3, 2, 1], (6, 2)),
        (1, {"per_device_train_batch_size": 4}, 4, [4], (4, 1)),
        (1, {"gradient_accumulation_steps": 4}, 32, [8], (8, 4)),
        (1, {"per_device_train_batch_size": 4, "effective_batch_size": 64}, 64, [4], (4, 16)),
        (4, {}, 32, [8, 4, 2, 1], (8, 1)),
        (4, {"effective_batch_size": 64}, 64, [16, 8, 4, 2, 1], (8, 2)),
        (4, {"effective_batch_size": 64, "gradient_accumulation_steps": 16}, 64, [1], (1, 16)),
        (4, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, 48, [4], (4, 3)),
    ],
    ids=str,
)
def test_batch_flags_decide_the_splits_and_the_effective_batch_is_that_of_all_processes(
    processes: int, words: dict[str, Any], effective: int, splits: list[int], base: tuple[int, int]
) -> None:
    space = space_of(defaults=replace(TRL, processes=processes), **words)
    assert (space.effective_batch_size, rows_of(space)) == (effective, splits)
    assert (space.base.per_device_train_batch_size, space.base.gradient_accumulation_steps) == base
    assert with_rows(space.base, splits[-1]).effective_batch_size == effective


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
    assert rows_of(space) == [8, 4, 2, 1]
    assert {with_rows(space.base, rows).effective_batch_size for rows in rows_of(space)} == {32}
    with pytest.raises(BatchSplitError, match="4 groups of 2 GPUs do not divide the effective batch size 6"):
        space_of(defaults=PAIRS, effective_batch_size=6)


def test_shared_tokens_are_tried_with_fsdp2_alone() -> None:
    space = space_of(defaults=PAIRS, longest=2048)
    ways = {way.sharding for level in levels(space) for setting in level.settings for way in shared(space, setting)}
    assert ways == {"fsdp2", "fsdp2-no-reshard"}
