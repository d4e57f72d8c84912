"""Out of memory, explained: the columns add up, and what was measured stands beside what was predicted."""

import re

from report_examples import PLAN
from shortage_examples import MISHAP, ON_A_CARD, SIMULATED

from autotrain_mem.report.shortage_view import explained, shortage_text
from autotrain_mem.support import codec, errors
from autotrain_mem.support.errors import GpuOutOfMemoryError
from autotrain_mem.types.report import Shortage


def columns(text: str) -> list[tuple[str, str, float, float]]:
    """(sign, name, predicted, measured) of every row of the table that has both."""
    rows = re.findall(r"^([+=])  (.*?) {2,}([\d.]+) +([\d.]+)  [GM]iB$", text, re.MULTILINE)
    return [(sign, name, float(predicted), float(measured)) for sign, name, predicted, measured in rows]


def test_both_columns_add_up_to_what_the_run_held() -> None:
    for shortage in (SIMULATED, ON_A_CARD, MISHAP):
        *parts, total = columns(shortage_text(shortage, PLAN))
        assert total[:2] == ("=", "held by this run")
        assert [round(sum(row[column] for row in parts), 2) for column in (2, 3)] == list(total[2:])


def test_the_figures_go_with_the_error_to_another_process() -> None:
    sent = codec.to_json(explained(SIMULATED, PLAN, None))
    received = errors.from_json(sent)
    assert isinstance(received, GpuOutOfMemoryError)
    assert received.details is not None
    assert codec.from_json(Shortage, received.details) == SIMULATED
    assert "details" not in GpuOutOfMemoryError("x").to_json()
