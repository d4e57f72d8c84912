from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_memory import TRL, space_of

from autotrain_mem.errors import BatchSplitError, ContextLengthError, UsageError
from autotrain_mem.planner.space import Space, make_space, micro_batches, with_rows
from autotrain_mem.spec import Job
from autotrain_mem.spec.model import ModelFacts


def rows_of(space: Space) -> list[int]:
    return list(micro_batches(space))


def test_trl_defaults_are_the_base_when_nothing_is_given() -> None:
    space = space_of()
    assert space.base == TRL
    assert space.pinned == frozenset()
    assert space.effective_batch_size == 8


@pytest.mark.parametrize(
    ("words", "effective", "splits", "base"),
    [
        # Every divisor is a choice, largest first; the base is the largest that is not above TRL's micro-batch.
        ({"effective_batch_size": 12}, 12, [12, 6, 4, 3, 2, 1], (6, 2)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, 12, [4], (4, 3)),
        ({"per_device_train_batch_size": 4}, 4, [4], (4, 1)),
        ({"gradient_accumulation_steps": 4}, 32, [8], (8, 4)),
        ({"per_device_train_batch_size": 4, "effective_batch_size": 64}, 64, [4], (4, 16)),
        ({"gradient_accumulation_steps": 16, "effective_batch_size": 64}, 64, [4], (4, 16)),
    ],
    ids=str,
)
def test_batch_flags_decide_the_splits(
    words: dict[str, Any], effective: int, splits: list[int], base: tuple[int, int]
) -> None:
    space = space_of(**words)
    assert (space.effective_batch_size, rows_of(space)) == (effective, splits)
    assert (space.base.per_device_train_batch_size, space.base.gradient_accumulation_steps) == base


@given(st.integers(1, 600))
def test_every_split_makes_the_effective_batch(effective: int) -> None:
    space = space_of(effective_batch_size=effective)
    splits = [with_rows(space.base, rows) for rows in micro_batches(space)]
    assert {knobs.effective_batch_size for knobs in (space.base, *splits)} == {effective}


@pytest.mark.parametrize(
    ("rows", "steps", "effective", "hint"),
    [
        (
            *(4, None, 10),
            "keep --per_device_train_batch_size 4 and use --effective_batch_size 8 or --effective_batch_size 12,\n"
            "or keep --effective_batch_size 10 and use --per_device_train_batch_size 1, 2, 5 or 10",
        ),
        (
            *(None, 4, 3),
            "keep --gradient_accumulation_steps 4 and use --effective_batch_size 4,\n"
            "or keep --effective_batch_size 3 and use --gradient_accumulation_steps 1 or 3",
        ),
        (4, 2, 16, "use --effective_batch_size 8 with both flags, or --effective_batch_size 16 alone"),
    ],
)
def test_sizes_that_contradict_are_told_what_would_do(
    rows: int | None, steps: int | None, effective: int, hint: str
) -> None:
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
    with pytest.raises(BatchSplitError) as raised:
        space_of(effective_batch_size=effective, **{name: size for name, size in sizes.items() if size})
    assert raised.value.hint == hint


def test_sizes_below_one_are_all_named_at_once() -> None:
    with pytest.raises(UsageError, match=r"--per_device_train_batch_size 0, --max_length -1, --effective_batch_size 0"):
        space_of(per_device_train_batch_size=0, max_length=-1, effective_batch_size=0)


@pytest.mark.parametrize("words", [{}, {"max_length": "auto"}], ids=["absent", "auto"])
@pytest.mark.parametrize(
    ("longest", "context_length", "length"),
    [(80, 2048, 80), (9000, 2048, 2048), (80, None, 80), (None, 2048, 1024), (None, 512, 512), (None, None, 1024)],
)
def test_auto_length_is_the_longest_row_within_the_context(
    words: dict[str, str], longest: int | None, context_length: int | None, length: int
) -> None:
    space = space_of(**words, longest=longest, context_length=context_length)
    assert space.base.max_length == length
    assert "max_length" not in space.pinned


@pytest.mark.parametrize(("context_length", "length"), [(2048, 70), (64, 64)])
def test_a_percentile_is_what_the_data_answer_to_it_within_the_context(context_length: int, length: int) -> None:
    job = Job(method="sft", model="toy-1B", dataset=None, arguments={"max_length": "p99"})
    facts = ModelFacts(context_length=context_length, is_quantized=False)
    space = make_space(TRL, job, facts, longest=80, asked_length=70)
    assert space.base.max_length == length
    assert "max_length" not in space.pinned


def test_a_given_length_is_pinned_and_rows_count_as_long_as_they_are_unless_packed() -> None:
    space = space_of(max_length=512, longest=80)
    assert (space.base.max_length, "max_length" in space.pinned) == (512, True)
    assert space.row_tokens(512) == 80
    assert space_of(max_length=512, longest=80, packing=True).row_tokens(512) == 512


def test_length_beyond_the_context_is_refused_with_the_length_that_works() -> None:
    with pytest.raises(ContextLengthError) as raised:
        space_of(max_length=4096, context_length=2048)
    assert raised.value.hint == "use --max_length 2048 or less, or --max_length auto"


def test_arguments_that_are_no_knobs_pin_nothing() -> None:
    assert space_of(learning_rate=1e-4, dtype="bfloat16").pinned == {"dtype"}
