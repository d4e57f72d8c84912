"""Out of memory, explained: the figures go with the error; golden texts are elsewhere."""

from report_examples import PLAN
from shortage_examples import SIMULATED

from autotrain_mem.report.shortage_view import explained
from autotrain_mem.support import codec, errors
from autotrain_mem.support.errors import GpuOutOfMemoryError
from autotrain_mem.types.report import Shortage


def test_the_figures_go_with_the_error_to_another_process() -> None:
    sent = codec.to_json(explained(SIMULATED, PLAN, None))
    received = errors.from_json(sent)
    assert isinstance(received, GpuOutOfMemoryError)
    assert received.details is not None
    assert codec.from_json(Shortage, received.details) == SIMULATED
    assert "details" not in GpuOutOfMemoryError("x").to_json()
