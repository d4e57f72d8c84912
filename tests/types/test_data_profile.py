"""What truncation cuts and what batches hold, from a histogram of row lengths."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotrain_mem.types import DataProfile

lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=50)


@given(lengths, st.integers(1, 6000))
def test_the_fractions_are_those_of_truncating_row_by_row(rows: list[int], limit: int) -> None:
    profile = of(rows)
    assert profile.truncated_rows_fraction(None) == profile.truncated_tokens_fraction(None) == 0
    assert (profile.rows, profile.tokens, profile.longest) == (len(rows), sum(rows), max(rows))
    kept = sum(min(length, limit) for length in rows)
    assert profile.truncated_tokens_fraction(limit) == pytest.approx(1 - kept / sum(rows))
    assert profile.truncated_rows_fraction(limit) == sum(length > limit for length in rows) / len(rows)
    assert 0 <= profile.truncated_tokens_fraction(limit) < 1


def test_a_percentile_is_the_nearest_rank() -> None:
    hundred = DataProfile(rows_by_length=dict.fromkeys(range(1, 101), 1))
    assert [hundred.percentile(share) for share in (0.07, 0.5, 0.95, 0.99, 0.999, 1)] == [7, 50, 95, 99, 100, 100]
    for share in (0, -0.5, 1.01):
        with pytest.raises(ValueError, match="share of rows"):
            hundred.percentile(share)
    evaluated = replace(hundred, longest_evaluated=200)
    assert (evaluated.asked_length(1), evaluated.asked_length(0.99)) == (200, 99), "all rows include the evaluated ones"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 50))
def test_the_expected_longest_and_the_padding_are_those_of_every_batch_that_can_be_drawn(
    lengths: list[int], rows: int, limit: int
) -> None:
    drawn = min(rows, len(lengths))
    batches = list(itertools.combinations([min(length, limit) for length in lengths], drawn))
    assert of(lengths).expected_longest(rows, limit) == pytest.approx(sum(map(max, batches)) / len(batches))
    batches = list(itertools.combinations(lengths, drawn))
    real, padded = sum(map(sum, batches)), sum(drawn * max(batch) for batch in batches)
    assert of(lengths).padding_fraction(rows) == pytest.approx(1 - real / padded)


def test_a_million_rows_are_no_less_exact() -> None:
    """With so many rows, drawing with and without replacement are the same."""
    million = DataProfile(rows_by_length={10: 990_000, 80: 10_000})
    assert million.expected_longest(4) == pytest.approx(80 - 70 * 0.99**4, rel=1e-5)


pairs = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6)


@given(pairs, st.integers(1, 4))
def test_both_sequences_of_a_pair_are_padded_to_the_longest(sides: list[tuple[int, int]], rows: int) -> None:
    drawn = min(rows, len(sides))
    batches = list(itertools.combinations(sides, drawn))
    real = sum(sum(map(sum, batch)) for batch in batches)
    padded = sum(2 * drawn * max(map(max, batch)) for batch in batches)
    profile = of_pairs(sides)
    assert profile.tokens == sum(map(sum, sides))
    assert profile.padding_fraction(rows) == pytest.approx(1 - real / padded)


@given(pairs, st.integers(1, 45))
def test_dropped_pairs_take_all_their_tokens_with_them(sides: list[tuple[int, int]], limit: int) -> None:
    kept = [pair for pair in sides if max(pair) <= limit]
    profile = of_pairs(sides, drops=True)
    assert profile.kept_tokens(limit) == sum(map(sum, kept))
    assert profile.expected_longest(1, limit) == pytest.approx(sum(map(max, kept)) / len(kept) if kept else 0)


def of(lengths: list[int]) -> DataProfile:
    return DataProfile(rows_by_length={length: lengths.count(length) for length in lengths})


def of_pairs(sides: list[tuple[int, int]], *, drops: bool = False) -> DataProfile:
    longer = [max(pair) for pair in sides]
    shorter = {length: sum(min(pair) for pair in sides if max(pair) == length) for length in longer}
    return replace(of(longer), shorter_sides=shorter, drops=drops)
