"""The bars of ``scripts/accuracy``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from accuracy_rows.public import Bars, Result, report

BARS = Bars(limit=0.04, median=0.015, reserved_limit=0.06, reserved_median=0.03, smi_median=0.05)


def result(family: str = "a family", **errors: Any) -> Result:
    chosen: dict[str, Any] = {"counted": True, "allocated": 0.0, "other": None, "reserved": None, "smi": None, **errors}
    case: Any = SimpleNamespace(family=family)
    return Result(case=case, **chosen)


def test_rows_within_every_bar_and_rows_that_do_not_count_pass() -> None:
    assert report([result(allocated=0.01, reserved=-0.02, smi=0.04)], BARS)
    assert report([result(counted=False, allocated=9.0, reserved=9.0, smi=9.0)], BARS)


@pytest.mark.parametrize(
    "errors",
    [
        [{"allocated": -0.05}, {"allocated": 0.0}, {"allocated": 0.0}],
        [{"allocated": 0.02}],
        [{"reserved": 0.07}, {"reserved": 0.0}, {"reserved": 0.0}],
        [{"reserved": -0.04}],
        [{"smi": 0.06}],
    ],
)
def test_one_bar_that_is_broken_fails(errors: list[dict[str, float]]) -> None:
    assert not report([result(**each) for each in errors], BARS)


def test_nvidia_smi_is_judged_by_the_median_over_families() -> None:
    rows = [*(result("large", smi=0.5) for _ in range(9)), result("small", smi=0.01), result("other", smi=-0.01)]
    assert report(rows, BARS)
