"""Leads a run from the first machine: waits for the others, starts processes there, and reports the outcome."""

import _thread
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self

from autotrain_mem.parallel.place import Place
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, InterruptedByUser, TrainingError, UsageError, described
from autotrain_mem.support.files import read_start, replace_file
from autotrain_mem.support.units import format_bytes
from autotrain_mem.support.versions import versions_key
from autotrain_mem.training.machines.link import MOST_BYTES, Link, MachineLost, Message, OnLine, RemoteChild, introduced
from autotrain_mem.training.run_folder import KEY_NAME, unwritable
from autotrain_mem.types import Hardware

JOIN_SECONDS = 600.0
"""How long to wait for the others, at the beginning and when one is lost; the value of torchrun's ``join_timeout``
(``torch/distributed/elastic/rendezvous/dynamic_rendezvous.py: RendezvousTimeout``)."""
JOIN_VARIABLE = "AUTOFIT_JOIN_SECONDS"
LIVELY_SECONDS = 5.0
"""A machine counts as present if it sent a heartbeat within this time."""
FAREWELL_SECONDS = 5.0
"""How long to wait until the others have received the outcome."""
MOST_UNKNOWN = 32
"""The most connections that have not shown the key yet: the oldest is closed for a new one. A machine shows it in
milliseconds, and tries again if it is closed."""

Say = Callable[[str], None]
StartRemote = Callable[[int, Mapping[str, str], Path, OnLine], RemoteChild | None]
"""Starts a rank on its machine, with its environment and log; returns None for a rank of this machine."""


def join_seconds() -> float:
    """Returns how long machines wait for each other. Raises UsageError if the environment variable for it is not a
    number."""
    text = os.environ.get(JOIN_VARIABLE, str(JOIN_SECONDS))
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"{JOIN_VARIABLE}={text} is not a number of seconds.", hint="Unset it, or set it to 600."
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message from a machine that joins."""

    place: Place
    command: tuple[str, ...]
    """The command-line arguments that are the same on all machines."""
    hardware: Hardware
    """The machine's GPUs."""
    version: str | None = field(default_factory=lambda: versions_key()["autotrain_mem"])
    host: str = field(default_factory=socket.gethostname)

    @property
    def name(self) -> str:
        return name_of_machine(self.place.rank, self.host)


@dataclass(slots=True)
class _Member:
    hello: Hello
    link: Link = field(init=False)
    children: dict[tuple[int, int], RemoteChild] = field(default_factory=dict)
    gone: str = ""
    """Why the machine is gone; empty if it is not."""


class Machines:
    """Represents the other machines on the leading one. As a context manager it sends them the outcome at the end.
    Raises UsageError if the port cannot be listened on, and OutputFolderError if the key cannot be written.

    Args:
        place: This machine's place: rank 0.
        command: The command-line arguments that are the same on all machines.
        folder: The output folder, in which the others find the key.
        min_nodes: The fewest machines with which training continues if others are lost.
    """

    def __init__(
        self, place: Place, command: Sequence[str], folder: Path, *, min_nodes: int | None = None, say: Say
    ) -> None:
        self.place, self.command = place, tuple(command)
        self.min_nodes = place.machines if min_nodes is None else min_nodes
        self._say = say
        self._members: dict[int, _Member] = {}
        self._changed = threading.Condition()
        self._unknown: list[socket.socket] = []
        self._hardware: Hardware | None = None
        self._refused: list[str] = []
        """Why machines were refused, the last one last."""
        self._attempt = 0
        self.present: tuple[int, ...] = (0,)
        """The machines that train, in rank order."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            self._socket = socket.create_server(
                ("", place.port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=dual
            )
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"Cannot listen on port {place.port}, where the other machines join: {error}.",
                hint="Give all machines another --main_process_port.",
            ) from error
        self._key, self._key_file = secrets.token_bytes(), folder / KEY_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._key_file, self._key, mode=0o600)
        except OSError as error:
            raise unwritable(folder, f"{KEY_NAME}: {error.strerror}") from error
        threading.Thread(target=self._accept, daemon=True).start()

    def gather(self, hardware: Hardware) -> Hardware:
        """Waits for the other machines; returns one machine's devices, with the least free memory of any machine.

        From now on, machines with different or fewer GPUs are refused. Raises TrainingError if fewer than ``min_nodes``
        joined in time.
        """
        deadline, said = time.monotonic() + join_seconds(), ""
        with self._changed:
            self._hardware = hardware
            for member in self._there():
                if (why := self._why_unlike(member.hello)) is not None:
                    del self._members[member.hello.place.rank]
                    self._refuse(member.link, why)
            while missing := self._missing():
                words = f"Waiting for machine{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of "
                words += f"{self.place.machines} at {self.place.endpoint}"
                if words != said:
                    said = words
                    self._say(words)
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left, 0.5))  # interrupts are handled between two waits
            self.present = (0, *sorted(each.hello.place.rank for each in self._there()))
        if len(self.present) < self.min_nodes:
            last = "".join(f" The last one that tried to join was refused: {why}" for why in self._refused[-1:])
            raise TrainingError(
                f"Machine{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.place.machines} did not "
                f"join within {join_seconds():.0f} s.{last}",
                hint=f"{how_to_reach(self.place)}\n--min_nodes {len(self.present)} continues with these machines.",
            )
        if missing:
            self._say(f"Continuing with {len(self.present)} of {self.place.machines} machines (--min_nodes)")
        self._refused.clear()
        free_bytes = min([hardware.free_bytes, *(each.hello.hardware.free_bytes for each in self._there())])
        machines = len(self.present)
        topology = replace(hardware.topology, nodes=machines)
        if machines == 1:
            topology = replace(topology, network="", network_bytes_per_second=None)
        return replace(hardware, free_bytes=free_bytes, topology=topology)

    def _missing(self) -> list[int]:
        there = {each.hello.place.rank for each in self._there()}
        return [rank for rank in range(1, self.place.machines) if rank not in there]

    def _there(self) -> list[_Member]:
        return [each for each in self._members.values() if each.link.is_open]

    def name_of(self, rank: int, devices: int) -> str:
        """Returns the name of a rank's machine: ``machine 1 (node-b)``."""
        machine = self.present[rank // devices]
        return self._members[machine].hello.name if machine else name_of_machine(0, socket.gethostname())

    def begin_attempt(self, devices: int) -> StartRemote:
        """Returns a function that starts the ranks of a new attempt, ``devices`` of them on each machine."""
        self._attempt += 1

        def start(rank: int, environment: Mapping[str, str], log: Path, on_line: OnLine) -> RemoteChild | None:
            if not (machine := self.present[rank // devices]):
                return None
            member, key = self._members[machine], {"attempt": self._attempt, "rank": rank}
            child = RemoteChild(member.link, key, on_line)
            member.children = {name: each for name, each in member.children.items() if name[0] == self._attempt}
            member.children[self._attempt, rank] = child
            order = {"do": "start", **key, "environment": dict(environment), "log": str(log)}
            order["holder"] = [os.getpid(), socket.gethostname()]
            if member.gone or not member.link.send(order):
                child.end(MachineLost(member.hello.name, member.gone or "it cannot be reached"))
            return child

        return start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Sends the run's outcome to the other machines, and waits until they disconnect."""
        if isinstance(error, KeyboardInterrupt):
            error = InterruptedByUser("It was interrupted.")
        elif error is not None and not isinstance(error, AutofitError):
            error = TrainingError(described(error))
        self.stop_listening()
        with contextlib.suppress(OSError):
            if read_start(self._key_file, len(self._key)) == self._key:  # else it is another run's
                self._key_file.unlink()
        there = self._there()
        for member in there:
            member.link.send({"do": "finish", "error": codec.to_json(error)})
        deadline = time.monotonic() + FAREWELL_SECONDS
        while any(each.link.is_open for each in there) and time.monotonic() < deadline:
            time.sleep(0.05)

    def stop_listening(self) -> None:
        """Stops accepting machines. Closing alone does not stop a socket from listening while a thread waits on it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                came, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(0.05)  # such as EMFILE, or ECONNABORTED
                continue
            self._unknown.append(came)
            if len(self._unknown) > MOST_UNKNOWN:
                with contextlib.suppress(OSError):
                    self._unknown.pop(0).shutdown(socket.SHUT_RDWR)  # which ends its thread
            threading.Thread(target=self._welcome, args=(came,), daemon=True).start()

    def _welcome(self, came: socket.socket) -> None:
        try:
            connection = introduced(came, self._key, leads=True)
            told = json.loads(connection.recv_bytes(MOST_BYTES))
            is_known = told.get("version") == versions_key()["autotrain_mem"]
            hello = codec.from_json(Hello, told) if is_known else None
        except (OSError, EOFError, ValueError, AttributeError, RecursionError):  # no key, or no JSON object
            return
        finally:
            with contextlib.suppress(ValueError):
                self._unknown.remove(came)
            came.close()
        if hello is None:
            other = UsageError(
                f"{told.get('host')} has another version of autotrain_mem than machine 0.",
                hint="Install the same version, or the same state of a checkout, on all machines.",
            )
            self._refuse(Link(connection, lambda message: None, lambda why: None), other)
            return
        member = _Member(hello)
        member.link = Link(connection, partial(self._hear, member), partial(self._end, member))
        with self._changed:  # the same machine's earlier connection may end in a moment
            self._changed.wait_for(lambda: not self._is_lively(hello.place.rank), LIVELY_SECONDS)
            if (refusal := self._why_not(hello)) is not None:
                self._refuse(member.link, refusal)
                return
            before = self._members.get(hello.place.rank)
            self._members[hello.place.rank] = member
            self._changed.notify_all()
        if before is not None:
            before.link.close()  # the same machine, started again
        member.link.send({"do": "welcome"})
        self._say(f"{capitalized(hello.name)} joined")

    def _refuse(self, link: Link, why: UsageError) -> None:
        """Sends a machine the reason why it may not take part; prints each reason once."""
        link.send({"do": "finish", "error": why.to_json()})
        if why.message not in self._refused:
            self._say(f"Refused: {why.message}")
        self._refused = [*(each for each in self._refused if each != why.message), why.message]

    def _hear(self, member: _Member, message: Message) -> None:
        if self._members.get(member.hello.place.rank) is not member:  # it was refused, or has joined again
            return
        if message.get("do") == "interrupt":
            _thread.interrupt_main()
        elif (child := member.children.get((message["attempt"], message["rank"]))) is not None:
            child.hear(message)

    def _end(self, member: _Member, why: str) -> None:
        member.gone = why
        for child in list(member.children.values()):
            child.end(MachineLost(member.hello.name, why))
        with self._changed:
            self._changed.notify_all()

    def _is_lively(self, rank: int) -> bool:
        member = self._members.get(rank)
        return member is not None and member.link.is_open and member.link.silent_seconds < LIVELY_SECONDS

    def _why_not(self, hello: Hello) -> UsageError | None:
        rank, machines = hello.place.rank, hello.place.machines
        if not 0 < rank < self.place.machines or machines != self.place.machines:
            return UsageError(
                f"Machine {rank} of {machines} ({hello.host}) joined a run of {self.place.machines}.",
                hint="Give all machines the same --nodes, and each its own --machine_rank.",
            )
        if self._is_lively(rank):
            present = self._members[rank].hello.host
            return UsageError(
                f"{capitalized(hello.name)} joined, but machine {rank} is already present ({present}).",
                hint="Give each machine its own --machine_rank.",
            )
        if hello.command == self.command:
            return self._why_unlike(hello)
        unlike, pairs = {*hello.command} ^ {*self.command}, (*pairwise(hello.command), *pairwise(self.command))
        # A value is named by the word before it, since it may be secret.
        flags = [word if word.startswith("--") else flag for flag, word in pairs if word in unlike]
        return UsageError(
            f"{capitalized(hello.name)} was started with other arguments than machine 0: "
            f"{' '.join(dict.fromkeys(flag.partition('=')[0] for flag in flags))}.",
            hint="Start the same command on all machines, except for --machine_rank.",
        )

    def _why_unlike(self, hello: Hello) -> UsageError | None:
        """Returns why a machine's GPUs cannot train with this one's; None if they can, or if these are not known."""
        theirs, ours = hello.hardware, self._hardware
        if ours is None or (theirs.name == ours.name and theirs.topology.devices >= ours.topology.devices):
            return None
        return UsageError(
            f"{capitalized(hello.name)} has {theirs.topology.devices} x {theirs.name} of "
            f"{format_bytes(theirs.total_bytes)}, but machine 0 has {ours.topology.devices} x {ours.name} of "
            f"{format_bytes(ours.total_bytes)}.",
            hint="Train on machines with the same GPUs; --gpus N uses N GPUs of each machine.",
        )


def name_of_machine(rank: int, host: str) -> str:
    """Returns a machine's name in messages.

    >>> name_of_machine(1, "node-b")
    'machine 1 (node-b)'
    """
    return f"machine {rank} ({host})"


def capitalized(text: str) -> str:
    """Returns the text with its first letter capitalized, to begin a sentence."""
    return text[:1].upper() + text[1:]


def how_to_reach(place: Place) -> str:
    """Returns the hint of an error for machines that cannot reach each other."""
    return (
        "Run the same command on each machine, with its own --machine_rank and a shared --output_dir. Each must reach "
        f"{place.endpoint}: check firewall, address and port. {JOIN_VARIABLE} sets how long they wait."
    )
