"""Follows the leading machine: starts the processes that it requests here, and forwards their output.

If the leader is lost, the processes here are killed, since they would wait for it forever. A scheduler starts the
leader's command again, so this machine waits until it can reconnect.
"""

import contextlib
import json
import os
import queue
import socket
import time
from collections.abc import Sequence
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
from autotrain_mem.training.machines.lead import Hello, Say, capitalized, how_to_reach, join_seconds
from autotrain_mem.training.machines.link import Link, Message, introduced, unreadable
from autotrain_mem.training.run_folder import KEY_NAME, LOCK_NAME, identity_of, is_held_by
from autotrain_mem.training.task import Request
from autotrain_mem.types import Hardware

TRY_SECONDS = 1.0
"""Seconds between two attempts to reach the leading machine."""
SHARED_SECONDS = 90.0
"""How long the leader's lock may take to appear here: NFS caches folders for 30 to 60 s (nfs(5), ``acdirmax``)."""
FORWARD_SECONDS = 1.0
"""Delay before Ctrl-C is forwarded: a scheduler signals all machines at once, and the leader must count that once."""
LOOK_SECONDS = 0.2


def follow(place: Place, command: Sequence[str], folder: Path, hardware: Hardware, *, real: bool, say: Say) -> None:
    """Takes part in a run until the leading machine reports its end. ``folder``: the output folder, in which the leader
    writes the key. ``real``: whether the devices exist; else they are simulated.

    Raises:
        AutofitError: the training failed, with the leader's error.
        TrainingError: the leader cannot be reached, or was lost and did not return.
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
            say("Training finished; machine 0 has the report")
            return
        if isinstance(ended, AutofitError):
            raise ended
        why = ended
        say(f"Lost machine 0 ({place.address}): {why}. Its ranks here were killed; waiting for it to return")


def _reached(place: Place, folder: Path, lost: str, say: Say) -> Connection:
    deadline, key_file, is_said = time.monotonic() + join_seconds(), folder / KEY_NAME, False
    if not lost:
        say(f"Machine {place.rank} of {place.machines}: connecting to machine 0 at {place.endpoint}")
    while True:
        try:
            reached = socket.create_connection((place.address, place.port), timeout=10 * TRY_SECONDS)
            with reached, os.fdopen(open_own(key_file), "rb") as file:
                return introduced(reached, file.read(), leads=False)
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, (ConnectionAbortedError, FileNotFoundError)):
                reason = f"the server there does not hold the key in {key_file}"
                if not is_said:
                    say(f"{capitalized(reason)}: trying again")
                is_said = True
            if time.monotonic() > deadline:
                what = "was lost, and did not return" if lost else "cannot be reached"
                raise TrainingError(
                    f"Machine 0 {what} within {join_seconds():.0f} s: {reason}.", hint=how_to_reach(place)
                ) from error
        try:
            time.sleep(TRY_SECONDS)
        except KeyboardInterrupt as interrupt:
            raise InterruptedByUser(
                "Interrupted while waiting for machine 0.", hint="Run the command again at any time."
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
        self._link = Link(connection, self._messages.put, lambda why: self._messages.put({"do": "lost", "why": why}))

    def serve(self) -> AutofitError | str | None:
        """Serves requests; returns the error of a failed training, why the leader was lost, or None after success."""
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
                        "Interrupted twice, in the middle of a step.", hint="Earlier complete checkpoints stay valid."
                    ) from interrupt
                self._say("Interrupted: asking machine 0 to stop after this step; Ctrl-C again stops this machine now")
                self._interrupted_at = time.monotonic()
                continue
            try:
                match message["do"]:
                    case "finish":
                        return None if message["error"] is None else errors.from_json(message["error"])
                    case "welcome":
                        self._say("Connected to machine 0, which plans and leads the run")
                    case "lost":
                        return str(message["why"])
                    case _:
                        self._obey(message)
            except (KeyError, TypeError, ValueError) as error:
                return unreadable(error)

    def stop(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.stop(max(0.0, deadline - time.monotonic()))
        self._link.close()

    def _obey(self, message: Message) -> None:
        key = message["attempt"], message["rank"]
        if message["do"] == "start":
            self._start(key, message)
            return
        if (child := self._children.get(key)) is None:
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
                f"{capitalized(self._name)} does not share machine 0's output folder {log.parent}.",
                hint="Choose an --output_dir on a file system that all machines share.",
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

    def _own(self, message: Message) -> Message:
        """Returns the request with the device and the output folder's identity as this machine sees them."""
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
