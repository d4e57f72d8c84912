"""The bars of ``scripts/accuracy``."""

from types import SimpleNamespace
from typing import Any

import pytest
from accuracy_rows.public import Bars, Result, report

BARS = Bars(limit=0.04, median=0.015, reserved_limit=0.06, reserved_median=0.03, smi_median=0.05)


def result(family: str = "a family", **errors: Any) -> Result:
    chosen: dict[str, Any] = {"counted": True, "allocated": 0.0, "other": None, "reserved": None, "smi": None, **errors}
    case: Any = SimpleNamespace(family=family)
    return Result(case=case, **chosen)


SMI_BY_FAMILY = [*(result("large", smi=0.5) for _ in range(9)), result("small", smi=0.01), result("other", smi=-0.01)]


@pytest.mark.parametrize(
    ("rows", "passes"),
    [
        ([result(allocated=0.01, reserved=-0.02, smi=0.04)], True),
        ([result(counted=False, allocated=9.0, reserved=9.0, smi=9.0)], True),
        (SMI_BY_FAMILY, True),  # the median over families
        ([result(allocated=-0.05), result(), result()], False),
        ([result(allocated=0.02)], False),
        ([result(reserved=0.07), result(reserved=0.0), result(reserved=0.0)], False),
        ([result(reserved=-0.04)], False),
        ([result(smi=0.06)], False),
    ],
)
def test_one_bar_that_is_broken_fails(rows: list[Result], passes: bool) -> None:
    assert report(rows, BARS) is passes
