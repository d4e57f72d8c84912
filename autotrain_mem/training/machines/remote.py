"""Stands on the first machine for a process of another: what ``processes.Child`` is for one of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from autotrain_mem.support.processes import GRACE_SECONDS, ChildDied
from autotrain_mem.training.machines.link import Link

OnLine = Callable[[str | None], None]


class MachineGone(ChildDied):
    """A process is gone with its machine."""

    def __init__(self, machine: str, why: str) -> None:
        super().__init__(None, "")
        self.machine, self.why = machine, why


class RemoteChild:
    """One process on another machine.

    Args:
        link: To that machine.
        key: Names the process there.
        on_line: Takes each line of its answers, and None at their end.
    """

    def __init__(self, link: Link, key: Mapping[str, int], on_line: OnLine) -> None:
        self._link, self._key, self._on_line = link, dict(key), on_line
        self._ended = threading.Event()
        self._death: ChildDied | None = None

    # -- what its machine says of it -----------------------------------------------------------------------------------

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take a line, or the end."""
        if "line" in message:
            self._on_line(message["line"])
        else:
            self.end(ChildDied(message["code"], str(message["tail"])))

    def end(self, death: ChildDied) -> None:
        """It has ended, or its machine has."""
        if self._death is None:
            self._death = death
            self._ended.set()
            self._on_line(None)

    # -- what Child does -----------------------------------------------------------------------------------------------

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one object. Raises ChildDied where the process or its machine is gone."""
        if not self._order("send", message=message) or self._death is not None:
            raise self.death()

    def interrupt(self) -> None:
        """Ask it to end as after Ctrl-C."""
        self._order("interrupt")

    def close_input(self) -> None:
        """Tell it to end."""
        self._order("close")

    def kill(self) -> None:
        """End it at once, and what it started."""
        self._order("kill")

    def wait(self, timeout_seconds: float) -> None:
        """Give it the time to end by itself."""
        self._ended.wait(timeout_seconds if self._link.is_open else 0)

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """End it: close its stdin, wait, then kill."""
        self.close_input()
        self.wait(grace_seconds)
        if not self._ended.is_set():
            self.kill()

    def end_orphans(self) -> None:
        """Its machine ends what it leaves behind."""

    def death(self) -> ChildDied:
        """Say how it ended, which it has, or is about to."""
        self.wait(GRACE_SECONDS)
        return self._death or ChildDied(None, "")

    def _order(self, do: str, **more: Any) -> bool:
        return self._death is None and self._link.send({"do": do, **self._key, **more})
