"""Machines of one training: they find each other over real sockets; processes are stood in for."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem.machine.catalog import named
from autotrain_mem.parallel.place import Place
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, OutputFolderError, TrainingError, UsageError
from autotrain_mem.support.processes import ChildDied
from autotrain_mem.training.machines import follow as following
from autotrain_mem.training.machines import lead, link
from autotrain_mem.training.machines.lead import JOIN_VARIABLE, Hello, Machines
from autotrain_mem.training.machines.link import introduced
from autotrain_mem.training.rank_processes import RankDied, RankProcesses
from autotrain_mem.training.run_folder import KEY_NAME, hold_folder
from autotrain_mem.training.task import Request
from autotrain_mem.types import Hardware, Job, Topology
from tests.waiting import until

TOKEN = "hf_secret"
WORDS = ("--nodes", "2", "--hub_token", TOKEN)
CARD = replace(named("rtx3060"), topology=Topology(devices=1, nodes=2))
SOON = 10.0


class FakeChild:
    """A process that says back what it is told, and ends when its stdin closes."""

    started: list[FakeChild]

    def __init__(
        self, module: str, environment: Mapping[str, str], log: Path, *, on_line: Callable[[str | None], None], **_: Any
    ) -> None:
        self.environment, self.on_line, self.is_told = environment, on_line, threading.Event()
        self._code: int | None = None
        self.started.append(self)

    def send(self, message: Mapping[str, Any]) -> None:
        self.on_line(json.dumps({"event": "echo", **message}))

    def interrupt(self) -> None:
        self.is_told.set()

    def end(self, code: int) -> None:
        if self._code is None:
            self._code = code
            self.on_line(None)

    def stop(self, grace_seconds: float = 0.0) -> None:
        self.end(0)

    close_input = stop

    def kill(self) -> None:
        self.end(-9)

    def death(self) -> ChildDied:
        return ChildDied(self._code, "its last words")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeChild.started, Second.folder = [], tmp_path
    monkeypatch.setattr(following, "Child", FakeChild)
    monkeypatch.setattr(following, "TRY_SECONDS", 0.05)
    monkeypatch.setattr(link, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(following, "SHARED_SECONDS", 0.1)
    monkeypatch.setattr(lead, "FAREWELL_SECONDS", 1.0)
    monkeypatch.setattr(lead, "LIVELY_SECONDS", 0.5)
    monkeypatch.setenv(JOIN_VARIABLE, str(SOON))


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def place(rank: int, port: int) -> Place:
    return Place(rank=rank, machines=2, address=Second.address, port=port)


class Second:
    """The second machine's command, in a thread."""

    folder: Path
    address = "127.0.0.1"

    def __init__(self, port: int, words: tuple[str, ...] = WORDS, card: Hardware = CARD) -> None:
        self.error: AutofitError | None = None
        self.said: list[str] = []
        self.is_dead = False
        self._thread = threading.Thread(target=self._run, args=(port, words, card), daemon=True)
        self._thread.start()

    def _run(self, port: int, words: tuple[str, ...], card: Hardware) -> None:
        try:
            following.follow(place(1, port), words, self.folder, card, real=False, say=self._say)
        except AutofitError as error:
            self.error = error
        except SystemExit:
            pass

    def _say(self, line: str) -> None:
        self.said.append(line)
        if self.is_dead:
            raise SystemExit

    def end(self) -> AutofitError | None:
        self._thread.join(SOON)
        assert not self._thread.is_alive()
        return self.error


def lead_alone(port: int, min_nodes: int | None = None, say: Callable[[str], None] = lambda line: None) -> Machines:
    return Machines(place(0, port), WORDS, Second.folder, min_nodes=min_nodes, say=say)


@contextlib.contextmanager
def together(port: int, **more: Any) -> Iterator[tuple[Machines, Second]]:
    with lead_alone(port) as machines:
        yield machines, Second(port, **more)


def ranks_on(machines: Machines, folder: Path) -> RankProcesses:
    """The second machine's rank alone: the first one's would be a real process."""
    start = machines.begin_attempt(1)

    def elsewhere(rank: int, *rest: Any) -> Any:
        return start(1, *rest)

    logs = [folder / "train.log"]
    return RankProcesses("module", [{"RANK": "1"}], logs, names=["rank 1"], silent_seconds=1800, elsewhere=elsewhere)


def asked(folder: Path) -> Mapping[str, Any]:
    knobs = replace(TRL_DEFAULTS, processes=2, sharding="ddp")
    job = Job(method="sft", model="m", dataset=None, arguments={})
    request = Request(
        task="train", job=job, knobs=knobs, hardware=CARD, simulate=True, output_dir=str(folder), folder="first's"
    )
    return dict(codec.to_json(request.of_rank(1)))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"][: 1 + socket.has_dualstack_ipv6()])
def test_a_remote_rank_acts_as_local(port: int, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Second, "address", address)
    with together(port) as (machines, second), hold_folder(str(tmp_path), resuming=False):
        free = machines.gather(replace(CARD, free_bytes=CARD.free_bytes + 1))
        assert (free.free_bytes, free.topology.nodes) == (CARD.free_bytes, 2)
        assert machines.name_of(1, 1) == f"machine 1 ({socket.gethostname()})"
        ranks = ranks_on(machines, tmp_path)
        ranks.send([asked(tmp_path)])
        echo = ranks.receive(SOON)
        assert echo["folder"] not in ("", "first's")  # as the second machine sees it
        (child,) = FakeChild.started
        assert child.environment["RANK"] == "1"
        ranks.interrupt()
        assert child.is_told.wait(SOON)  # over a socket: else it might end before that came
        child.end(3)
        with pytest.raises(RankDied) as death:
            ranks.receive(SOON)
        assert (death.value.code, death.value.log_tail, death.value.gone) == (3, "its last words", None)
        ranks.stop()
    assert second.end() is None
    assert second.said[0].endswith(f"at {address if address[0] == '1' else '[::1]'}:{port}")


def test_a_lost_machine_is_named_and_may_come_again(port: int, tmp_path: Path) -> None:
    with together(port) as (machines, second), hold_folder(str(tmp_path), resuming=False):
        machines.gather(CARD)
        ranks = ranks_on(machines, tmp_path)
        second.is_dead = True
        machines._members[1].link.close()  # as its system does when it dies
        with pytest.raises(RankDied) as death:
            ranks.receive(SOON)
        assert death.value.gone is not None
        assert death.value.gone.machine.startswith("machine 1 (")
        ranks.stop()
        third = Second(port)
        machines.gather(CARD)
        again = ranks_on(machines, tmp_path)
        again.send([asked(tmp_path)])
        assert again.receive(SOON)["event"] == "echo"
        again.stop()
        double = Second(port).end()
        assert isinstance(double, UsageError)
        assert "machine 1 is already present" in double.message
    assert third.end() is None


def test_without_it_the_run_goes_on_with_those_that_are_left(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOIN_VARIABLE, "0.2")
    said: list[str] = []
    with lead_alone(port, min_nodes=1, say=said.append) as machines:
        assert machines.gather(CARD).topology.nodes == 1
        assert machines.present == (0,)
    assert said[-1] == "Continuing with 1 of 2 machines (--min_nodes)"


def test_the_folder_must_be_the_first_ones_and_the_others_learn_what_ended_it(port: int, tmp_path: Path) -> None:
    full = OutputFolderError("The disk is full.", hint="Free some space.")
    with contextlib.suppress(OutputFolderError), together(port) as (machines, second):
        machines.gather(CARD)
        told = ranks_on(machines, tmp_path).receive(SOON)  # which nobody holds
        assert told["error"] == OutputFolderError.__name__
        assert "file system that all machines share" in told["hint"]
        raise full
    error = second.end()
    assert isinstance(error, OutputFolderError)
    assert (error.message, error.hint) == ("The disk is full.", "Free some space.")


def test_a_lost_first_machine_ends_the_ranks_here_and_is_waited_for(port: int, tmp_path: Path) -> None:
    first = lead_alone(port)
    second = Second(port)
    with hold_folder(str(tmp_path), resuming=False):
        first.gather(CARD)
        ranks = ranks_on(first, tmp_path)
        ranks.send([asked(tmp_path)])
        ranks.receive(SOON)
        first.stop_listening()
        first._members[1].link.close()  # as its system does when it dies
        with lead_alone(port) as machines:
            machines.gather(CARD)
            assert FakeChild.started[0].death().code == -9
    assert second.end() is None
    assert any("Lost machine 0" in line for line in second.said)


OTHER_CARD = replace(CARD, name="a100-80gb")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"words": (*WORDS[:-1], "hf_other", "--bf16")}, "other arguments than machine 0: --hub_token --bf16."),
        ({"card": OTHER_CARD}, "1 x a100-80gb"),
        ({"card": replace(CARD, topology=Topology(devices=0))}, "has 0 x"),
    ],
)
def test_an_unlike_machine_ends_itself_alone(port: int, more: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with lead_alone(port, say=said.append) as machines, ThreadPoolExecutor() as pool:
        for _ in range(2):  # at the start, before the first one's card is known, and when it comes again
            told = Second(port, **more)
            until(lambda: any("joined" in line or "Refused" in line for line in said[-1:]))
            waiting = pool.submit(machines.gather, CARD)
            error = told.end()
            assert isinstance(error, UsageError)
            assert words in error.message
            right = Second(port)
            assert waiting.result(SOON).topology.nodes == 2
            right.is_dead = True
            machines._members[1].link.close()
            until(lambda: not machines._there())
        monkeypatch.setenv(JOIN_VARIABLE, "0.5")
        late = Second(port, **more)
        with pytest.raises(TrainingError, match=f"within 0 s. The last one that tried to join was refused: .*{words}"):
            machines.gather(CARD)
        late.end()
    assert sum(line.startswith("Refused: Machine 1 (") for line in said) == 3
    assert TOKEN not in f"{error} {said}"


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ended: list[str] = []
    monkeypatch.setattr(lead._thread, "interrupt_main", lambda: ended.append("interrupted"))
    return ended


def heard(connection: Connection) -> bytes:
    words = b""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            assert connection.poll(SOON), "it does not hang up"
            words += connection.recv_bytes()
    return words


INTERRUPT = json.dumps({"do": "interrupt"}).encode()
HELLO = Hello(place=place(1, 0), command=WORDS, hardware=CARD)


@pytest.mark.parametrize(
    "sent", [[b"", b"{}", INTERRUPT], [INTERRUPT], [json.dumps(codec.to_json(HELLO)).encode(), INTERRUPT], [b"x" * 300]]
)
def test_without_the_key_nothing_is_told_or_ended(port: int, interrupts: list[str], sent: list[bytes]) -> None:
    with lead_alone(port) as machines:
        stranger = Connection(socket.create_connection(("127.0.0.1", port)).detach())
        with contextlib.suppress(OSError):
            for message in sent:
                stranger.send_bytes(message)
        answers = heard(stranger)
        assert answers.startswith(b"#CHALLENGE#")
        assert len(answers) < 100
        assert TOKEN.encode() not in answers
        assert not machines._members
    assert interrupts == []


def test_a_silent_one_keeps_no_other_waiting_and_is_hung_up_on(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "INTRODUCE_SECONDS", 0.3)
    with lead_alone(port) as machines:
        silent = Connection(socket.create_connection(("127.0.0.1", port)).detach())
        assert silent.recv_bytes().startswith(b"#CHALLENGE#")
        monkeypatch.setattr(link, "INTRODUCE_SECONDS", SOON)
        second = Second(port)
        machines.gather(CARD)
        assert heard(silent) == b""
    assert second.end() is None


def test_a_crowd_without_the_key_takes_few_threads_and_bars_nobody(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, fails = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def short_of_files(own: socket.socket) -> Any:
        if fails:
            raise fails.pop()
        return accept(own)

    monkeypatch.setattr(socket.socket, "accept", short_of_files)
    before = threading.active_count()
    with lead_alone(port) as machines, contextlib.ExitStack() as crowd:
        for _ in range(200):
            crowd.enter_context(socket.create_connection(("127.0.0.1", port)))
        until(lambda: len(machines._unknown) == lead.MOST_UNKNOWN)
        until(lambda: threading.active_count() - before <= lead.MOST_UNKNOWN + 1)
        second = Second(port)
        machines.gather(CARD)
    assert second.end() is None


def joining(port: int, hello: Any = HELLO) -> Connection:
    key = (Second.folder / KEY_NAME).read_bytes()
    connection = introduced(socket.create_connection(("127.0.0.1", port)), key, leads=False)
    connection.send_bytes(json.dumps(codec.to_json(hello)).encode())
    return connection


@pytest.mark.parametrize(
    ("hello", "answered"),
    [
        (replace(HELLO, command=()), "finish"),
        (replace(HELLO, place=place(7, 0)), "finish"),
        (replace(HELLO, version="another"), "another version of autotrain_mem"),
        ({"host": "b", "place": 7}, "another version of autotrain_mem"),
        (HELLO, "welcome"),
    ],
    ids=["other words", "no rank", "other version", "before versions", "it joins"],
)
def test_only_who_has_joined_may_end_the_run(port: int, interrupts: list[str], hello: Any, answered: str) -> None:
    with lead_alone(port):
        connection = joining(port, hello)
        assert answered in connection.recv_bytes().decode()
        connection.send_bytes(INTERRUPT)
        connection.send_bytes(b"[]")  # for which it is hung up on
        heard(connection)
    assert interrupts == ["interrupted"] * (answered == "welcome")


def test_one_that_was_refused_after_it_joined_may_end_nothing(port: int, interrupts: list[str]) -> None:
    with lead_alone(port, min_nodes=1) as machines, pytest.MonkeyPatch.context() as patch:
        patch.setenv(JOIN_VARIABLE, "0")
        connection = joining(port, replace(HELLO, hardware=OTHER_CARD))
        until(machines._there)
        assert machines.gather(CARD).topology.nodes == 1
        connection.send_bytes(INTERRUPT)
        connection.send_bytes(b"[]")
        heard(connection)
    assert interrupts == []


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (struct.pack("!i", 100) + b"half of it", "no sign of life"),
        (b"", "no sign of life"),
        (struct.pack("!i", 14) + b'{"attempt": 1}', "does not understand .KeyError"),
        (struct.pack("!i", 100_000) + b"[" * 100_000, "does not understand .RecursionError"),
    ],
    ids=["silent within a message", "reads nothing", "without its fields", "deep"],
)
def test_who_breaks_the_protocol_is_lost(port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes, why: str) -> None:
    monkeypatch.setattr(link, "LOST_SECONDS", 0.5)
    with lead_alone(port) as machines, joining(port) as connection:
        until(lambda: machines._members)
        member = machines._members[1]
        os.write(connection.fileno(), sent)
        if not sent:
            member.link.send({"do": "x" * 20_000_000})
        until(lambda: member.gone)
        assert re.search(why, member.gone)


def test_a_first_machine_that_breaks_the_protocol_is_lost_and_waited_for(port: int) -> None:
    with together(port) as (machines, second):
        machines.gather(CARD)
        before = machines._members[1]
        before.link.send({"do": "send"})
        until(lambda: machines._members[1] is not before)
    assert second.end() is None
    assert any("does not understand (KeyError: 'attempt')" in line for line in second.said)


def test_the_key_is_the_users_alone_another_for_each_run_that_has_the_port_and_gone_with_it(port: int) -> None:
    path, victim = Second.folder / KEY_NAME, Second.folder / "victim"
    victim.write_text("mine")
    path.symlink_to(victim)
    keys = []
    for _ in range(2):
        with lead_alone(port):
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            keys.append(path.read_bytes())
            with pytest.raises(UsageError, match=f"port {port}"):  # it is taken
                lead_alone(port)
            assert path.read_bytes() == keys[-1]
        assert not path.exists()
    assert [len(key) for key in keys] == [32, 32]
    assert keys[0] != keys[1]
    assert victim.read_text() == "mine"


def test_the_key_stays_in_the_output_folder_where_another_run_is_moved_aside(port: int) -> None:
    folder = Second.folder / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    with (
        Machines(place(0, port), WORDS, folder, say=lambda line: None),
        hold_folder(str(folder), resuming=False, overwrite=True),
    ):
        assert len((folder / KEY_NAME).read_bytes()) == 32
    assert not (Second.folder / "run.previous-1" / KEY_NAME).exists()
    assert not (folder / KEY_NAME).exists()


@pytest.mark.parametrize("key", [None, b"an earlier run's"])
def test_another_machine_that_does_not_see_the_key_says_so_and_tells_nothing(
    port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: bytes | None
) -> None:
    monkeypatch.setenv(JOIN_VARIABLE, "0.2")
    with lead_alone(port) as machines:
        monkeypatch.setattr(Second, "folder", tmp_path / "not shared")
        if key is not None:
            Second.folder.mkdir()
            (Second.folder / KEY_NAME).write_bytes(key)
        second = Second(port)
        error = second.end()
        assert not machines._members
    assert isinstance(error, TrainingError)
    assert f"does not hold the key in {Second.folder / KEY_NAME}" in error.message
    assert "a shared --output_dir" in error.hint
    assert sum("trying again" in line for line in second.said) == 1
