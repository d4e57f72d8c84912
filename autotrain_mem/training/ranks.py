"""Starts the processes of one training, one for each device, listens to all of them at once, and ends them together."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autotrain_mem.support.processes import GRACE_SECONDS, Child, ChildDied, ChildTimeout
from autotrain_mem.training.machines.lead import Elsewhere
from autotrain_mem.training.machines.remote import MachineGone, RemoteChild

LOOK_SECONDS = 0.5
"""A signal handler of Python's runs only between two waits."""

Message = dict[str, Any]


class Ranks:
    """The parent's side of all processes of a training, which has one at least.

    Each leads a group of its own processes, out of reach of the terminal's Ctrl-C, and whatever ends it ends those.

    Args:
        module: Run as ``python -m module`` by each.
        environments: Of each rank, over this process's own.
        logs: Where each rank's stderr goes.
        keeps_open: Open files that all of this machine's inherit.
        elsewhere: Starts those of other machines; None where there are none.
    """

    def __init__(
        self,
        module: str,
        environments: Sequence[Mapping[str, str]],
        logs: Sequence[Path],
        *,
        keeps_open: Sequence[int] = (),
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._children: list[Child | RemoteChild] = []
        try:
            for rank, (environment, log) in enumerate(zip(environments, logs, strict=True)):
                on_line = partial(self._put, rank)
                remote = None if elsewhere is None else elsewhere(rank, environment, log, on_line)
                self._children.append(
                    remote or Child(module, environment, log, has_children=True, keeps_open=keeps_open, on_line=on_line)
                )
        except BaseException:
            self.stop()
            raise

    def send(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Send one object to each rank. Raises RankDied where one no longer reads."""
        for rank, (child, message) in enumerate(zip(self._children, messages, strict=True)):
            try:
                child.send(message)
            except ChildDied as death:
                raise RankDied(rank, death) from death

    def receive(self, timeout_seconds: float | None = None) -> tuple[int, Message]:
        """Return the next object of any rank, and whose it is.

        Raises:
            RankDied: a rank ended, well or not.
            ChildTimeout: there was none within the time; None waits for ever.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            wait = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, deadline - time.monotonic())
            if wait <= 0:
                raise ChildTimeout
            try:
                rank, line = self._lines.get(timeout=wait)
            except queue.Empty:
                for child in self._children:
                    child.end_orphans()
                continue
            if line is None:
                raise RankDied(rank, self._children[rank].death())
            return rank, json.loads(line)

    def interrupt(self) -> None:
        """Ask every rank to end as after Ctrl-C."""
        for child in self._children:
            child.interrupt()

    def wait(self, timeout_seconds: float) -> None:
        """Give ranks that are done the time to end by themselves; returns when they have, or when it is up."""
        deadline = time.monotonic() + timeout_seconds
        for child in self._children:
            child.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """End all at once; a process that is stopped ends too."""
        for child in self._children:
            child.kill()
        self.wait(GRACE_SECONDS)

    def stop(self) -> None:
        """End all within ``GRACE_SECONDS`` together: those that do not end by themselves are killed."""
        for child in self._children:
            child.close_input()
        self.wait(GRACE_SECONDS)
        self.kill()
        for child in self._children:
            child.stop(0)

    def _put(self, rank: int, line: str | None) -> None:
        self._lines.put((rank, line))


class RankDied(ChildDied):
    """One of the ranks ended without an answer."""

    def __init__(self, rank: int, death: ChildDied) -> None:
        super().__init__(death.code, death.log_tail)
        self.rank = rank
        self.gone = death if isinstance(death, MachineGone) else None
        """Its machine, where that is gone with it."""
