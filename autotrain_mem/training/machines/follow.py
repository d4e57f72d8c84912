"""Follows the leading machine: starts the processes that it requests here, and passes on their output.

It makes no plans or decisions. If the leader is lost, the processes here are ended, since they would wait for it
forever. Then it waits for the leader to come back: a scheduler starts that machine's command again.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autotrain_mem.parallel.place import Place
from autotrain_mem.support import codec, errors
from autotrain_mem.support.errors import AutofitError, InterruptedByUser, OutputFolderError, TrainingError
from autotrain_mem.support.files import open_own
from autotrain_mem.support.processes import GRACE_SECONDS, Child, ChildDied
from autotrain_mem.training.environment import seen_cards
from autotrain_mem.training.launch import RUN_PROCESS, SIMULATED_PROCESS
from autotrain_mem.training.machines.lead import Hello, capitalized, how_to_reach, join_seconds
from autotrain_mem.training.machines.link import Link, Message, introduced
from autotrain_mem.training.run_folder import KEY_NAME, LOCK_NAME, identity_of, is_held_by
from autotrain_mem.training.task import Request
from autotrain_mem.types import Hardware

TRY_SECONDS = 1.0
"""Seconds between two attempts to reach the leading machine."""
SHARED_SECONDS = 30.0
"""How long a file written by the leader may take to appear here: NFS caches a folder's entries for up to 30 or 60 s
(nfs(5), ``acdirmin``, ``acdirmax``), but looks a name up again when it is opened."""
FORWARD_SECONDS = 1.0
"""Delay after Ctrl-C here before it is sent to the leader, unless the leader has asked to end meanwhile: a scheduler
sends its signals to all machines at once, and a second one would end the training in the middle of a step."""
LOOK_SECONDS = 0.2

Say = Callable[[str], None]
_LOST = "lost"


def follow(place: Place, command: Sequence[str], folder: Path, hardware: Hardware, *, real: bool, say: Say) -> None:
    """Takes part in a training until the leading machine reports its end.

    Args:
        folder: The output folder, in which the leader writes the key.
        hardware: This machine's devices.
        real: Whether the devices exist; else they are simulated.
        say: Prints a line for the user.

    Raises:
        AutofitError: what ended the training, as reported by the leader.
        TrainingError: the leader cannot be reached, or was lost and has not come back.
        InterruptedByUser: Ctrl-C before the training began, or twice.
    """
    hello = Hello(place=place, command=tuple(command), hardware=hardware)
    why = ""
    while True:
        connection = _reached(place, folder, why, say)
        following = _Following(connection, hello, hardware, real=real, say=say)
        try:
            ended = following.serve()
        finally:
            following.stop()
        if ended is None:
            say("The training has ended well; its report is on machine 0")
            return
        if isinstance(ended, AutofitError):
            raise ended
        why = ended
        say(f"Machine 0 ({place.address}) is gone: {why}. Its ranks here have ended; waiting for it to come back")


def _reached(place: Place, folder: Path, lost: str, say: Say) -> Connection:
    deadline, stranger = time.monotonic() + join_seconds(), ""
    if not lost:
        say(f"Machine {place.rank} of {place.machines} looks for machine 0 at {place.address}:{place.port}")
    while True:
        try:
            with socket.create_connection((place.address, place.port), timeout=10 * TRY_SECONDS) as reached:
                try:
                    with os.fdopen(open_own(folder / KEY_NAME), "rb") as file:
                        return introduced(reached, file.read(), leads=False)
                except OSError as error:
                    if not stranger:
                        stranger = f"what answers there does not hold the key in {folder / KEY_NAME}"
                        say(f"{capitalized(stranger)}: trying again")
                    raise ConnectionAbortedError(stranger) from error
        except OSError as error:
            if time.monotonic() > deadline:
                what = "was lost, and has not come back" if lost else "cannot be reached"
                raise TrainingError(
                    f"Machine 0 {what} within {join_seconds():.0f} s: {error.strerror or error}.",
                    hint=how_to_reach(place),
                ) from error
        try:
            time.sleep(TRY_SECONDS)
        except KeyboardInterrupt as interrupt:
            raise InterruptedByUser(
                "Interrupted while it waited for machine 0.", hint="Run the command again when you like."
            ) from interrupt


class _Following:
    """Holds one connection to the leading machine, and the processes that the leader started here."""

    def __init__(self, connection: Connection, hello: Hello, hardware: Hardware, *, real: bool, say: Say) -> None:
        self._hardware, self._real, self._say, self._name = hardware, real, say, hello.name
        self._messages: queue.Queue[Message] = queue.Queue()
        self._children: dict[tuple[int, int], Child] = {}
        self._interrupted_at: float | None = None
        self._is_asked_to_end = False
        with contextlib.suppress(OSError):  # the link reports its end
            connection.send_bytes(json.dumps(codec.to_json(hello)).encode())
        self._link = Link(connection, self._messages.put, lambda why: self._messages.put({"do": _LOST, "why": why}))

    def serve(self) -> AutofitError | str | None:
        """Serves requests; returns the error of a failed training, why the leader is gone, or None after success."""
        while True:
            try:
                at = self._interrupted_at
                if at is not None and not self._is_asked_to_end and time.monotonic() - at >= FORWARD_SECONDS:
                    self._is_asked_to_end = True
                    self._link.send({"do": "interrupt"})
                message = self._messages.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            except KeyboardInterrupt as interrupt:
                if self._interrupted_at is not None:
                    raise InterruptedByUser(
                        "Interrupted twice, in the middle of a step.",
                        hint="Checkpoints that were complete before stay valid.",
                    ) from interrupt
                self._say(
                    "Interrupted: machine 0 is asked to end the training after this step; Ctrl-C again ends it here now"
                )
                self._interrupted_at = time.monotonic()
                continue
            match message["do"]:
                case "finish":
                    return None if message["error"] is None else errors.from_json(message["error"])
                case "welcome":
                    self._say("Machine 0 has been reached; it plans, and says here when it has ended")
                case "lost":
                    return str(message["why"])
                case _:
                    self._obey(message)

    def stop(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.stop(max(0.0, deadline - time.monotonic()))
        self._link.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _obey(self, message: Message) -> None:
        key = message["attempt"], message["rank"]
        if message["do"] == "start":
            self._start(key, message)
            return
        child = self._children.get(key)
        if child is None:
            return
        match message["do"]:
            case "send":
                with contextlib.suppress(ChildDied):  # the end of a process is reported separately
                    child.send(self._own(message["message"]))
            case "interrupt":
                self._is_asked_to_end = True
                child.interrupt()
            case "close":
                child.close_input()
            case "kill":
                child.kill()
            case "ended":
                death = child.death()
                self._tell(key, code=death.code, tail=death.log_tail)

    def _start(self, key: tuple[int, int], order: Message) -> None:
        log = Path(order["log"])
        if not self._is_shared(log.parent, order["holder"]):
            error = OutputFolderError(
                f"{capitalized(self._name)} does not see the output folder {log.parent} of machine 0.",
                hint="Give an --output_dir that lies on a file system that all machines share.",
            )
            self._tell(key, line=json.dumps(error.to_json()))
            return
        earlier = [self._children.pop(each) for each in [*self._children] if each[0] != key[0]]
        for child in earlier:
            child.kill()
        for child in earlier:
            child.stop(0)
        self._is_asked_to_end, self._interrupted_at = False, None
        seen = seen_cards(self._hardware.topology.uuids) if self._real else {}
        try:
            module = RUN_PROCESS if self._real else SIMULATED_PROCESS
            child = Child(
                module, {**order["environment"], **seen}, log, has_children=True, on_line=partial(self._on_line, key)
            )
        except OSError as error:
            self._tell(key, code=1, tail=f"{log}: {error.strerror}")
            return
        self._children[key] = child

    def _on_line(self, key: tuple[int, int], line: str | None) -> None:
        if line is not None:
            self._tell(key, line=line)
        else:
            self._messages.put({"do": "ended", "attempt": key[0], "rank": key[1]})

    def _tell(self, key: tuple[int, int], **what: Any) -> None:
        self._link.send({"attempt": key[0], "rank": key[1], **what})

    # -- this machine's own values -------------------------------------------------------------------------------------

    def _own(self, message: Message) -> Message:
        """Returns the request with this machine's device, and with the output folder's identity on this machine."""
        request = codec.from_json(Request, message)
        uuids = self._hardware.topology.uuids
        local = request.rank % max(1, request.hardware.topology.devices)
        device = replace(request.hardware, uuid=uuids[local] if uuids else None) if self._real else request.hardware
        identity = identity_of(Path(request.output_dir)) if request.folder else ""
        return dict(codec.to_json(replace(request, hardware=device, folder=identity)))

    def _is_shared(self, folder: Path, holder: Sequence[Any]) -> bool:
        deadline = time.monotonic() + SHARED_SECONDS
        while not is_held_by(folder, *holder):
            if time.monotonic() > deadline or not (folder / LOCK_NAME).exists():
                return False
            time.sleep(LOOK_SECONDS)
        return True
