"""What truncation cuts, from a histogram of row lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotrain_mem.spec import DataProfile

NINETY_NINE_SHORT = DataProfile(rows_by_length={10: 99, 80: 1})


def test_rows_tokens_and_the_longest_are_read_off_the_histogram() -> None:
    assert NINETY_NINE_SHORT.rows == 100
    assert NINETY_NINE_SHORT.tokens == 99 * 10 + 80
    assert NINETY_NINE_SHORT.longest == 80


def test_only_rows_longer_than_the_limit_are_truncated() -> None:
    assert NINETY_NINE_SHORT.truncated_rows_fraction(80) == 0
    assert NINETY_NINE_SHORT.truncated_rows_fraction(79) == 0.01
    assert NINETY_NINE_SHORT.truncated_rows_fraction(10) == 0.01
    assert NINETY_NINE_SHORT.truncated_rows_fraction(9) == 1


def test_only_the_tokens_beyond_the_limit_are_cut() -> None:
    assert NINETY_NINE_SHORT.truncated_tokens_fraction(80) == 0
    assert NINETY_NINE_SHORT.truncated_tokens_fraction(40) == pytest.approx(40 / 1070)
    assert NINETY_NINE_SHORT.truncated_tokens_fraction(5) == pytest.approx((99 * 5 + 75) / 1070)


def test_no_limit_cuts_nothing() -> None:
    assert NINETY_NINE_SHORT.truncated_rows_fraction(None) == 0
    assert NINETY_NINE_SHORT.truncated_tokens_fraction(None) == 0


lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=50)


@given(lengths, st.integers(1, 6000))
def test_the_fractions_are_those_of_truncating_row_by_row(rows: list[int], limit: int) -> None:
    profile = DataProfile(rows_by_length={length: rows.count(length) for length in rows})
    kept = sum(min(length, limit) for length in rows)
    assert profile.truncated_tokens_fraction(limit) == pytest.approx(1 - kept / sum(rows))
    assert profile.truncated_rows_fraction(limit) == sum(length > limit for length in rows) / len(rows)
    assert 0 <= profile.truncated_tokens_fraction(limit) < 1


@given(lengths, st.integers(1, 6000), st.integers(1, 6000))
def test_a_longer_limit_never_cuts_more(rows: list[int], first: int, second: int) -> None:
    profile = DataProfile(rows_by_length={length: rows.count(length) for length in rows})
    short, long = sorted([first, second])
    assert profile.truncated_tokens_fraction(long) <= profile.truncated_tokens_fraction(short)
    assert profile.truncated_rows_fraction(long) <= profile.truncated_rows_fraction(short)
