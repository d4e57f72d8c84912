"""The rows that are run first: in order, padded as the run pads them, again where they are too few."""

from types import SimpleNamespace

from autotrain_mem.data.longest_rows import cut, longest_rows, repeated


def test_a_padded_batch_holds_a_shorter_row_where_there_is_one() -> None:
    """Without padding there is no mask, and it takes less than a batch of the run that has one."""
    assert longest_rows([9, 5, 9, 6], 2, padded=True) == [0, 3]
    assert longest_rows([9, 9], 2, padded=True) == [0, 1]
    assert longest_rows([9, 8, 7], 2, padded=True) == [0, 1]
    assert longest_rows([9, 8], 1, padded=True) == [0]
    cut_by_the_collator = cut([12, 11, 9, 6], SimpleNamespace(max_length=9))
    assert longest_rows(cut_by_the_collator, 2, padded=True) == [0, 3]


def test_longest_rows_come_in_order_and_again_where_they_are_too_few() -> None:
    assert (longest_rows([3, 9, 1, 9, 4], 3), longest_rows([3], 8)) == ([1, 3, 4], [0])
    assert repeated([1, 0], 5) == [1, 0, 1, 0, 1]
