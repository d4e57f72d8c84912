"""How scripts/throughput tells whether an order is kept."""

import pytest
from throughput_rows.ranks import Result, tau


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 10), (2, 20), (3, 30)], 1.0),
        ([(1, 30), (2, 20), (3, 10)], -1.0),
        ([(1, 10), (2, 30), (3, 20)], 1 / 3),
        ([(1, 10), (2, 10), (3, 20)], 2 / 3),  # predicted as equal
        ([(1, 10), (1, 20), (2, 30)], 1.0),  # measured as equal
    ],
)
def test_tau_counts_pairs_that_were_measured_as_different(pairs: list[tuple[float, float]], expected: float) -> None:
    rows = [Result(model="m", family="f", mark=" ", measured=one, predicted=other) for one, other in pairs]
    assert tau(rows) == pytest.approx(expected)
