"""A plugin of pytest: gives TRL's tests the stand-ins, our classes if asked for, and a time limit; writes outcomes."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OUTCOMES, CLASSES, SECONDS = "TRL_SUITE_OUTCOMES", "TRL_SUITE_CLASSES", "TRL_SUITE_SECONDS"
"""Variables with the file for outcomes, whose classes are tested (``trl`` or ``ours``), and each test's limit."""


def pytest_configure() -> None:
    import datasets
    import trl

    from trl_suite_parts import stand_ins

    datasets.load_dataset = functools.partial(stand_ins.load_dataset, datasets.load_dataset)
    if os.environ[CLASSES] == "ours":
        import autotrain_mem

        for name in ("SFT", "Reward", "DPO", "KTO", "GRPO", "RLOO"):
            setattr(trl, f"{name}Trainer", getattr(autotrain_mem, f"{name}Trainer"))


class _TooSlowError(Exception):
    pass


def _too_slow(*_: object) -> None:
    faulthandler.dump_traceback()
    raise _TooSlowError(f"took longer than {os.environ[SECONDS]} s")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(int(os.environ[SECONDS]))
    yield
    signal.alarm(0)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        error = "" if call.excinfo is None else (call.excinfo.exconly().splitlines() or [""])[0]
        row = {"test": item.nodeid.split("::", 1)[1], "outcome": report.outcome, "error": error}
        with Path(os.environ[OUTCOMES]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
