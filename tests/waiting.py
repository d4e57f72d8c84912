"""Waits for what another thread or process does."""

import time
from collections.abc import Callable


def until(is_so: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
