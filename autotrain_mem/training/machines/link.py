"""Exchanges JSON objects between two machines, with a heartbeat each way every second.

Objects travel as messages of ``multiprocessing.connection``; none is unpickled. Both ends first prove that they hold
the key in the output folder (:func:`introduced`). Messages are not encrypted, nor are those of torch's store and NCCL,
so the network must be trusted.

torchrun's rendezvous is not used: it unpickles what anybody who reaches its port writes there, and so runs a stranger's
code (``torch/distributed/elastic/rendezvous/dynamic_rendezvous.py: _BackendRendezvousStateHolder.sync``; tried with
torch 2.13).
"""

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from functools import partialmethod
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from autotrain_mem.support.errors import described
from autotrain_mem.support.processes import GRACE_SECONDS, ChildDied

BEAT_SECONDS = 1.0
LOST_SECONDS = 30.0
"""A machine without a heartbeat for this long is lost: it has no power or no network. If only its process dies, its
system closes the connection at once."""
INTRODUCE_SECONDS = 10.0
"""How long the other end may be silent while it authenticates."""
MOST_BYTES = 64 << 20
"""The most bytes of one object; a request takes a few KiB."""

Message = dict[str, Any]


def introduced(reached: socket.socket, key: bytes, *, leads: bool) -> Connection:
    """Authenticates both ends of a socket with the key; the leader challenges first. The caller closes the socket.

    Raises ConnectionAbortedError if the other end does not hold the key, or is silent for :data:`INTRODUCE_SECONDS`,
    and another OSError if it hangs up.
    """
    reached.setblocking(True)
    _limit_waits(reached, INTRODUCE_SECONDS)
    connection = Connection(os.dup(reached.fileno()))
    try:
        for prove in (deliver_challenge, answer_challenge) if leads else (answer_challenge, deliver_challenge):
            prove(connection, key)
        _limit_waits(reached, LOST_SECONDS)
    except (EOFError, ConnectionError) as error:
        connection.close()
        raise ConnectionResetError("it hung up") from error
    except (OSError, ValueError, AssertionError, AuthenticationError) as error:
        connection.close()
        raise ConnectionAbortedError("it does not hold the key") from error
    return connection


def _limit_waits(reached: socket.socket, seconds: float) -> None:
    """Makes a read or write raise BlockingIOError after ``seconds`` without a byte (socket(7), SO_RCVTIMEO)."""
    wait = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        reached.setsockopt(socket.SOL_SOCKET, option, wait)


class Link:
    """Represents one end of a connection. In a thread of the link, ``on_message`` is called with each object, and
    ``on_end`` once, with the reason."""

    def __init__(
        self, connection: Connection, on_message: Callable[[Message], None], on_end: Callable[[str], None]
    ) -> None:
        self._connection, self._on_message, self._on_end = connection, on_message, on_end
        self._sending, self._closed = threading.Lock(), threading.Event()
        self._heard, self._why = time.monotonic(), ""
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()

    @property
    def is_open(self) -> bool:
        return not self._closed.is_set()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last message from the other end."""
        return time.monotonic() - self._heard

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends one object; returns whether that was possible."""
        try:
            with self._sending:
                self._connection.send_bytes(json.dumps(message).encode())
        except BlockingIOError:  # half of it may be on its way, so nothing can follow it
            self.close(f"it has read nothing for {LOST_SECONDS:.0f} s")
            return False
        except (OSError, ValueError):
            return False
        return True

    def close(self, why: str = "this machine ended the connection") -> None:
        if self.is_open:
            self._why = why
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self.send({})

    def _read(self) -> None:
        try:
            while not self._closed.is_set():
                if message := self._next():
                    self._on_message(message)
                if self.silent_seconds > LOST_SECONDS:
                    raise BlockingIOError
        except BlockingIOError:  # also within a message
            self.close(f"it has given no sign of life for {LOST_SECONDS:.0f} s")
        except (EOFError, OSError):
            self.close("its process or its network has failed")
        except Exception as error:  # whatever it is, the link must end, or its machine would be waited for
            self.close(unreadable(error))
        with contextlib.suppress(OSError), self._sending:
            self._connection.close()
        self._on_end(self._why)

    def _next(self) -> Message:
        """Returns the next object; empty for a heartbeat, or if none came in time."""
        before = time.monotonic()
        if not self._connection.poll(BEAT_SECONDS):
            if time.monotonic() - before > LOST_SECONDS:  # this process itself was suspended
                self._heard = time.monotonic()
            return {}
        message = json.loads(self._connection.recv_bytes(MOST_BYTES))
        self._heard = time.monotonic()
        if not isinstance(message, dict):
            raise TypeError("not an object")
        return message


def unreadable(error: Exception) -> str:
    """Returns why a connection ended whose other end sent an object without the expected fields."""
    return f"it sent something that autofit does not understand ({described(error)})"


OnLine = Callable[[str | None], None]


class MachineLost(ChildDied):
    """Raised for a process whose machine is gone."""

    def __init__(self, machine: str, why: str) -> None:
        super().__init__(None, "")
        self.machine, self.why = machine, why


class RemoteChild:
    """Represents a process on another machine, which ``key`` identifies there. ``on_line`` is called with each line of
    its output, and with None at the end."""

    def __init__(self, link: Link, key: Mapping[str, int], on_line: OnLine) -> None:
        self._link, self._key, self._on_line = link, dict(key), on_line
        self._ended = threading.Event()
        self._death: ChildDied | None = None

    def hear(self, message: Mapping[str, Any]) -> None:
        """Handles a message about a line of output, or about the end of the process."""
        if "line" in message:
            self._on_line(message["line"])
        else:
            self.end(ChildDied(message["code"], str(message["tail"])))

    def end(self, death: ChildDied) -> None:
        """Marks the process, or its machine, as ended."""
        if self._death is None:
            self._death = death
            self._ended.set()
            self._on_line(None)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one object. Raises ChildDied if the process or its machine is gone."""
        if not self._order("send", message=message) or self._death is not None:
            raise self.death()

    def _order(self, do: str, **more: Any) -> bool:
        return self._death is None and self._link.send({"do": do, **self._key, **more})

    interrupt = partialmethod(_order, "interrupt")
    close_input = partialmethod(_order, "close")
    kill = partialmethod(_order, "kill")
    """Kills the process and its children."""

    def wait(self, timeout_seconds: float) -> None:
        self._ended.wait(timeout_seconds if self._link.is_open else 0)

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Stops the process: closes its stdin, waits, then kills."""
        self.close_input()
        self.wait(grace_seconds)
        if not self._ended.is_set():
            self.kill()

    def end_orphans(self) -> None:
        """Does nothing: the other machine kills orphans."""

    def death(self) -> ChildDied:
        """Waits up to ``GRACE_SECONDS`` for the process to end, and returns how it ended."""
        self.wait(GRACE_SECONDS)
        return self._death or ChildDied(None, "")
