"""How scripts/throughput tells whether an order is kept."""

from __future__ import annotations

import pytest
from throughput_rows.ranks import Result, distinct, line, tau


def rows(*pairs: tuple[float, float]) -> list[Result]:
    return [Result(model="m", family="f", mark=" ", measured=one, predicted=other) for one, other in pairs]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 10), (2, 20), (3, 30)], 1.0),
        ([(1, 30), (2, 20), (3, 10)], -1.0),
        ([(1, 10), (2, 30), (3, 20)], 1 / 3),
        ([(1, 10), (2, 10), (3, 20)], 2 / 3),
        ([(1, 10), (1, 20), (2, 30)], 1.0),
    ],
    ids=["kept", "turned", "one-pair-out-of-order", "predicted-as-equal", "measured-as-equal"],
)
def test_tau_counts_pairs_that_were_measured_as_different(pairs: list[tuple[float, float]], expected: float) -> None:
    assert tau(rows(*pairs)) == pytest.approx(expected)


def test_two_speeds_make_no_order() -> None:
    assert distinct(rows((1, 1), (1, 2), (2, 3))) == 2
    assert line("f", rows((1, 1), (2, 3))).split() == ["-", "1.25", "1.00", "1.50", "2", "f"]
