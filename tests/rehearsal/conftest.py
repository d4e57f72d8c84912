"""Its folder holds what the tests in the folders below share: ``real_run``, ``trace_reading``."""

import pytest


@pytest.fixture(autouse=True)
def _no_precision_is_left_behind() -> None:
    """accelerate keeps the mixed precision of a process's last trainer, and refuses another with the next one."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state()
    PartialState()  # what logs through accelerate needs it, trainer or not
