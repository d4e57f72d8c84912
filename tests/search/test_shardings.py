"""Where a plan tries to share the tokens of rows among GPUs, and what becomes of its batches."""

from dataclasses import replace
from typing import Any

import pytest

from autotrain_mem.search.levels import levels
from autotrain_mem.search.shardings import LONG_ROW_TOKENS, degrees, shared, way_of
from autotrain_mem.search.space import micro_batches, with_rows
from autotrain_mem.support.errors import BatchSplitError
from autotrain_mem.types import Job
from tests.search.synthetic_memory import EIGHT, space_of

PAIRS = replace(EIGHT, sharding="fsdp2", cp_size=2)


def tried(tokens: int = LONG_ROW_TOKENS, *, layers: bool = True, **words: Any) -> tuple[int, ...]:
    given = {"max_length": tokens, **words}
    forbid = frozenset(given.pop("forbid", ()))
    space = space_of(defaults=EIGHT, forbid=forbid, **given)
    return degrees(replace(space, shares_tokens=layers), Job(model="toy", dataset=None, method="sft", arguments=given))


@pytest.mark.parametrize(
    "words",
    [
        *({"tokens": LONG_ROW_TOKENS - 1}, {"layers": False}, {"packing": True}),
        *({"cp_size": 2}, {"forbid": ("cp_size",)}, {"sp_size": 2}, {"sharding": "ddp"}),
        {"sharding": "zero3", "forbid": ("sp_size",)},
        {"attn_implementation": "flash_attention_2"},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    ],
    ids=str,
)
def test_tokens_of_long_rows_are_shared_by_what_divides_the_gpus_and_as_what_is_said_allows(
    words: dict[str, Any],
) -> None:
    assert (tried(), tried(**words)) == ((2, 4, 8), ())


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
    assert micro_batches(space) == (8, 4, 2, 1)
    assert {with_rows(space.base, rows).effective_batch_size for rows in micro_batches(space)} == {32}
    with pytest.raises(BatchSplitError, match="4 groups of 2 GPUs do not divide the effective batch size 6"):
        space_of(defaults=PAIRS, effective_batch_size=6)


def test_shared_tokens_are_tried_with_fsdp2_alone() -> None:
    space = space_of(defaults=PAIRS, longest=2048)
    ways = {way.sharding for level in levels(space) for setting in level.settings for way in shared(space, setting)}
    assert ways == {"fsdp2", "fsdp2-no-reshard"}
