"""Runs a small job in a process of its own, and turns what becomes of it into our errors."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autotrain_mem.errands.errand import Errand
from autotrain_mem.support import errors
from autotrain_mem.support.errors import TrainingError
from autotrain_mem.support.processes import Child, ChildDied
from autotrain_mem.types import codec

PROCESS = "autotrain_mem.errands.process.main"
ENVIRONMENT = {"HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}

Event = Mapping[str, Any]


class ErrandProcess:
    """The parent's side of a small job that is under way."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand over one object."""
        try:
            self._child.send(message)
        except ChildDied as death:
            raise _died(death) from death

    def receive(self) -> Event:
        """Wait for the next object. Raises what the process says that went wrong."""
        try:
            message = self._child.receive()
        except ChildDied as death:
            raise _died(death) from death
        if "error" in message:
            raise errors.from_json(message)
        return message


@contextlib.contextmanager
def started(errand: Errand) -> Iterator[ErrandProcess]:
    """Start the process of a job; it ends with the context, in the middle of whatever it does."""
    child = Child(PROCESS, ENVIRONMENT, has_children=True)  # out of reach of the terminal's Ctrl-C: we end it
    try:
        process = ErrandProcess(child)
        process.send(codec.to_json(errand))
        yield process
    finally:
        child.kill()  # what it writes is in a folder of another name until it is whole
        child.stop()


def finish(errand: Errand, on_event: Callable[[Event], None] = lambda event: None) -> Event:
    """Do a job to its end; returns its last word.

    Args:
        on_event: Hears of the way there: a ``note``, with what to say.
    """
    with started(errand) as process:
        while (event := process.receive())["event"] != "end":
            on_event(event)
        return event


def _died(death: ChildDied) -> TrainingError:
    tail = death.log_tail.strip()
    if death.code == -signal.SIGKILL:
        return TrainingError(
            "The process was killed, most likely since the host ran out of memory.",
            hint="Close other programs, or take a machine with more memory.",
        )
    return TrainingError(f"The process ended before its time: exit status {death.code}.", hint=tail)
