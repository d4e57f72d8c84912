"""Starts the processes of one run, one for each device, reads events from all of them, and ends them together."""

import json
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.host import oom_kills
from autotrain_mem.support.processes import GRACE_SECONDS, Child, ChildDied, ChildTimeout
from autotrain_mem.training.exit_causes import Ending, blames_others
from autotrain_mem.training.machines.lead import StartRemote
from autotrain_mem.training.machines.link import MachineLost, RemoteChild
from autotrain_mem.training.pulses import Pulses
from autotrain_mem.training.task import largest
from autotrain_mem.types.report import MemoryReading

LOOK_SECONDS = 0.5
"""The longest single wait for an event: Python runs a signal handler only between two waits."""

CULPRIT_SECONDS = 5.0
"""How long to wait for a lost rank's own error, after another rank failed because of the loss. It can arrive later: a
killed process's socket closes before its parent is notified, and a process that raised writes its traceback first."""

MUTE_PULSES = 3.0
"""Seconds without a heartbeat after which a rank counts as stopped, once a collective has failed on another rank."""

Event = dict[str, Any]


class RankDied(ChildDied):
    """Raised when a rank has ended and sends no more events."""

    def __init__(self, rank: int, death: ChildDied) -> None:
        super().__init__(death.code, death.log_tail)
        self.rank = rank
        self.gone = death if isinstance(death, MachineLost) else None
        """How the rank's machine was lost; None if only the process died."""


class RankTimeout(Exception):
    """Raised when the other ranks have waited too long for one rank."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank, self.why = rank, why


class RankProcesses:
    """Starts all processes of a run, reads their events as one stream, and stops them together.

    Each process leads a process group of its own: the terminal's Ctrl-C does not reach it, and the group ends with it.

    Errors and a probe's answers are passed on from every rank; incidents, notes and signs of the watch once, from the
    first rank that sends them; other events from rank 0 only. ``step`` events have the maximum measured on any rank.

    Args:
        module: Each process runs ``python -m module``.
        environments: Each rank's variables, in addition to this process's own.
        logs: Each rank's file for stderr.
        names: Each rank's name in messages.
        silent_seconds: Seconds without progress after which the rank that the others wait for is named.
        keeps_open: Open files that all processes of this machine inherit.
        elsewhere: Starts the ranks of other machines; None for a single machine.
    """

    def __init__(
        self,
        module: str,
        environments: Sequence[Mapping[str, str]],
        logs: Sequence[Path],
        *,
        names: Sequence[str],
        silent_seconds: float,
        keeps_open: Sequence[int] = (),
        elsewhere: StartRemote | None = None,
    ) -> None:
        self.names = names
        self._pulses = Pulses(len(names), silent_seconds)
        self._seen: set[str] = set()
        self._readings: dict[int, MemoryReading] = {}
        self._done: set[int] = set()
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

    @property
    def are_several(self) -> bool:
        return len(self.names) > 1

    def send(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Sends one object to each rank. Raises RankDied if a rank no longer reads."""
        for rank, (child, message) in enumerate(zip(self._children, messages, strict=True)):
            try:
                child.send(message)
            except ChildDied as death:
                raise RankDied(rank, death) from death

    def interrupt(self) -> None:
        """Interrupts every rank as Ctrl-C does."""
        for child in self._children:
            child.interrupt()

    def wait(self, timeout_seconds: float) -> None:
        """Waits until all ranks have exited, or until the time is up."""
        deadline = time.monotonic() + timeout_seconds
        for child in self._children:
            child.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Kills all processes, including suspended ones."""
        for child in self._children:
            child.kill()
        self.wait(GRACE_SECONDS)

    def stop(self) -> None:
        """Stops all processes within ``GRACE_SECONDS`` in total; those that do not exit by themselves are killed."""
        for child in self._children:
            child.close_input()
        self.wait(GRACE_SECONDS)
        self.kill()
        for child in self._children:
            child.stop(0)

    def receive(self, timeout_seconds: float | None = None) -> Event:
        """Returns the next event. With several ranks, an error has the ``rank`` that sent it.

        Raises:
            RankDied: a rank has ended; after its ``end`` event, only rank 0.
            RankTimeout: no rank makes progress any more, or one sends no heartbeats.
            ChildTimeout: no event came within ``timeout_seconds``; None waits forever.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            wait = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, deadline - time.monotonic())
            if wait <= 0:
                raise ChildTimeout
            if (overdue := self._pulses.overdue()) is not None:
                raise RankTimeout(*overdue)
            try:
                rank, message = self._next(wait)
            except ChildTimeout:
                continue
            except RankDied as death:
                if death.rank and death.rank in self._done:
                    continue
                if not self.are_several or not blames_others(death.log_tail):
                    raise
                other = self._other_failure(death.rank)
                raise (other if isinstance(other, Exception) else death) from death
            if not self.are_several and message.get("event") != "pulse":
                return message
            if "error" in message:
                # Return the error of the rank that failed first; the others fail because it is gone.
                error = {**message, "rank": rank}
                if not blames_others(str(error.get("message", ""))):
                    return error
                if isinstance(other := self._other_failure(rank), Exception):
                    raise other
                return other or error
            if (event := self._event(rank, message)) is not None:
                return event

    def _put(self, rank: int, line: str | None) -> None:
        self._lines.put((rank, line))

    def _next(self, wait_seconds: float) -> tuple[int, Event]:
        """Returns the next event and its rank. Raises RankDied if a rank ended, ChildTimeout after ``wait_seconds``."""
        try:
            rank, line = self._lines.get(timeout=wait_seconds)
        except queue.Empty:
            for child in self._children:
                child.end_orphans()
            raise ChildTimeout from None
        if line is None:
            raise RankDied(rank, self._children[rank].death())
        message: Event = json.loads(line)
        self._pulses.see(rank, message)
        return rank, message

    def _event(self, rank: int, event: Event) -> Event | None:
        """Returns the event in the form in which it is passed on; None if it is dropped."""
        match event["event"]:
            case "pulse":
                return None
            case "probe":
                return {**event, "rank": rank}
            case "incident" | "note" | "sign":
                return self._once(rank, event)
            case "step" if event["memory"] is not None:
                self._readings[rank] = codec.from_json(MemoryReading, event["memory"])
                event = {**event, "memory": codec.to_json(largest([*self._readings.values()]))}
            case "end":
                self._done.add(rank)
        return None if rank else event

    def _once(self, rank: int, event: Event) -> Event | None:
        """Returns an event that no rank has sent before, with the rank's name; None for a repeated one."""
        incident = event.get("incident", event)
        names = ("event", "step", "phase", "remedy", "kind")
        key = "|".join(str(incident[name]) for name in names if name in incident)
        key += "" if {"incident", "kind"} & event.keys() else event["message"]
        if key in self._seen:
            return None
        self._seen.add(key)
        if not rank:
            return event
        named = {**incident, "message": f"{self.names[rank]}: {incident['message']}"}
        return {**event, "incident": named} if "incident" in event else named

    def _other_failure(self, left: int) -> Event | RankDied | RankTimeout | None:
        """Returns another rank's own failure if it comes soon; else the rank that is stopped or behind, if any."""
        deadline, gone = time.monotonic() + CULPRIT_SECONDS, {left}
        while (wait := deadline - time.monotonic()) > 0:
            try:
                rank, message = self._next(min(wait, LOOK_SECONDS))
            except ChildTimeout:
                continue
            except RankDied as death:
                if death.rank != left and not blames_others(death.log_tail):
                    return death
                gone.add(death.rank)
                continue
            if rank != left and "error" in message:
                if not blames_others(str(message.get("message", ""))):
                    return {**message, "rank": rank}
                gone.add(rank)
        if mute := self._pulses.mute(MUTE_PULSES) - gone:
            return RankTimeout(min(mute), "its process sends no heartbeats")
        behind = self._pulses.behind()
        return None if behind is None or behind[0] in gone else RankTimeout(*behind)


class Progress:
    """Follows a run's events, to report its progress if it ends without an ``end`` event."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._kills = oom_kills()
        self._facts: dict[str, Any] = {"step": 0, "began_at": 0}

    def follow(self, event: Event) -> None:
        match event["event"]:
            case "start":
                self._facts |= {"began_at": event["step"], "step": event["step"]}
            case "step":
                peak = event["memory"] and event["memory"]["peak_reserved_bytes"]
                self._facts |= {"step": event["step"], "peak_reserved_bytes": peak}
            case "saving":
                self._facts["saving"] = event["path"]
            case "checkpoint" | "save_failed":
                self._facts["saving"] = ""
        self._on_event(event)

    def ending(self, error: AutofitError, **more: Any) -> Ending:
        """Returns an ending with the progress of training. ``more``: the other fields of the ending."""
        return Ending(error=error, host_kills=oom_kills() - self._kills, **self._facts, **more)
