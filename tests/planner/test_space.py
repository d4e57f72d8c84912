import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_memory import TRL, space_of

from autotrain_mem.errors import BatchSplitError, ContextLengthError, UsageError
from autotrain_mem.planner.space import Space, batch_splits, make_space
from autotrain_mem.spec import Job
from autotrain_mem.spec.model import ModelFacts


def rows_of(space: Space) -> list[int]:
    return [split.per_device_train_batch_size for split in batch_splits(space)]


def test_trl_defaults_are_the_base_when_nothing_is_given() -> None:
    space = space_of()
    assert space.base == TRL
    assert space.pinned == frozenset()
    assert space.effective_batch_size == 8


def test_every_divisor_of_the_effective_batch_is_a_choice_largest_first() -> None:
    assert rows_of(space_of(effective_batch_size=12)) == [12, 6, 4, 3, 2, 1]


def test_base_takes_the_largest_divisor_that_is_not_above_trls_micro_batch() -> None:
    base = space_of(effective_batch_size=12).base
    assert (base.per_device_train_batch_size, base.gradient_accumulation_steps) == (6, 2)


def test_both_pinned_sizes_leave_exactly_one_split() -> None:
    space = space_of(per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert rows_of(space) == [4]
    assert space.effective_batch_size == 12


def test_pinned_rows_alone_mean_one_accumulation_step() -> None:
    space = space_of(per_device_train_batch_size=4)
    assert (space.effective_batch_size, rows_of(space)) == (4, [4])


def test_pinned_steps_alone_keep_trls_eight_rows() -> None:
    space = space_of(gradient_accumulation_steps=4)
    assert (space.effective_batch_size, rows_of(space)) == (32, [8])


def test_pinned_rows_and_effective_batch_give_the_accumulation() -> None:
    (split,) = batch_splits(space_of(per_device_train_batch_size=4, effective_batch_size=64))
    assert split.gradient_accumulation_steps == 16


def test_pinned_steps_and_effective_batch_give_the_rows() -> None:
    (split,) = batch_splits(space_of(gradient_accumulation_steps=16, effective_batch_size=64))
    assert split.per_device_train_batch_size == 4


@given(st.integers(1, 600))
def test_every_split_makes_the_effective_batch(effective: int) -> None:
    space = space_of(effective_batch_size=effective)
    assert all(s.per_device_train_batch_size * s.gradient_accumulation_steps == effective for s in batch_splits(space))
    assert space.base.effective_batch_size == effective


def test_rows_that_do_not_divide_are_told_what_would() -> None:
    with pytest.raises(BatchSplitError) as raised:
        space_of(per_device_train_batch_size=4, effective_batch_size=10)
    assert raised.value.message == "--per_device_train_batch_size 4 does not divide the effective batch size 10"
    assert raised.value.hint == (
        "keep --per_device_train_batch_size 4 and use --effective_batch_size 8 or --effective_batch_size 12,\n"
        "or keep --effective_batch_size 10 and use --per_device_train_batch_size 1, 2, 5 or 10"
    )


def test_steps_beyond_the_effective_batch_are_told_the_only_multiple() -> None:
    with pytest.raises(BatchSplitError) as raised:
        space_of(gradient_accumulation_steps=4, effective_batch_size=3)
    assert raised.value.hint == (
        "keep --gradient_accumulation_steps 4 and use --effective_batch_size 4,\n"
        "or keep --effective_batch_size 3 and use --gradient_accumulation_steps 1 or 3"
    )


def test_three_sizes_that_contradict_are_told_both_ways_out() -> None:
    with pytest.raises(BatchSplitError) as raised:
        space_of(per_device_train_batch_size=4, gradient_accumulation_steps=2, effective_batch_size=16)
    assert raised.value.hint == "use --effective_batch_size 8 with both flags, or --effective_batch_size 16 alone"


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


def test_given_length_is_pinned_even_where_rows_are_shorter() -> None:
    space = space_of(max_length=512, longest=80)
    assert space.base.max_length == 512
    assert "max_length" in space.pinned


def test_length_beyond_the_context_is_refused_with_the_length_that_works() -> None:
    with pytest.raises(ContextLengthError) as raised:
        space_of(max_length=4096, context_length=2048)
    assert raised.value.hint == "use --max_length 2048 or less, or --max_length auto"


def test_rows_count_as_long_as_they_are_unless_packed() -> None:
    assert space_of(max_length=512, longest=80).row_tokens(512) == 80
    assert space_of(max_length=512, longest=80, packing=True).row_tokens(512) == 512


def test_arguments_that_are_no_knobs_pin_nothing() -> None:
    assert space_of(learning_rate=1e-4, dtype="bfloat16").pinned == {"dtype"}
