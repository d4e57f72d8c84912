"""Trains on two machines with one simulated card each; one is killed at a random moment and started again.

Both machines run the same command, as a scheduler would start it. All processes of the killed machine are killed at
once, and its command is started again. In half of the runs its network fails first, as in a power failure. The runs
alternate between DDP and FSDP2, and between killing the first and the second machine. In further runs none is killed,
but a stranger attacks the first one's port (``survival_cases/attack.py``).

Losses are compared with those of the undisturbed run, as in ``survival_cases/faults.py``. No process may be left
running: each run's processes have its name in their environment.

The machines are network namespaces of this host, connected by a pair of virtual interfaces (ip-netns(8), veth(4)). Each
has its own loopback and its own address. A power failure is simulated by taking the link down, so that peers are not
notified of closed connections. This needs root; without it, both machines are this host, at 127.0.0.1.
"""

import contextlib
import itertools
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import psutil

from autotrain_mem import api
from survival_cases import attack, command, faults
from survival_cases.attack import ATTACKS, OTHER_CARD
from survival_cases.command import Ended, Running, autofit, surroundings
from survival_cases.jobs import filled_card
from survival_cases.kept import Kept, Row

RUNS = 20
FAULTS = ("node", *ATTACKS)
EPOCHS = 9
SHARDINGS = ("ddp", "fsdp2")
AWAY_SECONDS = 0.5
"""How long a killed machine is away."""
BOUND_SECONDS = 240.0
"""The time limit of a whole run, whose commands import, plan and load twice."""
FAREWELL_SECONDS = 20.0
"""The second machine must exit within this time after the first one."""
MARK = "AUTOFIT_SURVIVAL_RUN"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run, the machine that is killed or how the first one is attacked, and when."""

    fault: str
    number: int
    sharding: str
    machine: int
    moment: float
    """The time of the kill, as a share of the undisturbed run's time."""
    silent: bool = False
    """Whether its network fails before it is killed, if the machines have their own networks."""

    def __str__(self) -> str:
        return f"{self.fault} {self.number:02} {self.sharding} {self.machine}"


def flags(sharding: str) -> list[str]:
    """Returns the flags of a run of 108 steps of 8 rows, with a checkpoint every 4 steps."""
    kind = f"--dataset short_text --effective_batch_size 8 --bf16 false --num_train_epochs {EPOCHS}"
    return f"{faults.SHARED} {kind} --sharding {sharding} --gpus 1".split()


def undisturbed(
    workers: api.Workers, place: pathlib.Path, kept: Kept, shardings: Iterable[str], *, apart: bool
) -> dict[str, Row]:
    """Returns the card, losses and seconds of the undisturbed run for each sharding. ``apart``: whether each machine
    has its own network."""

    def trained(sharding: str) -> Row:
        card = filled_card(workers, "sft", [*flags(sharding), "--gpus", "2"], faults.SHARE)
        with two_hosts(apart=apart) as hosts:
            ended, second, _ = _run(hosts, _words(sharding, card, hosts), place, f"nodes-{sharding}")
        if not ended.finished or second:
            raise RuntimeError(f"the undisturbed run of {sharding} failed: {ended.error or ended.code} {second}")
        losses = {str(step): loss for step, loss in ended.losses().items()}
        return {"card": card, "losses": losses, "seconds": ended.seconds, "outcome": "undisturbed"}

    return dict(kept.fill(shardings, trained, processes=1))


def cases() -> list[Case]:
    """Returns 20 cases of each fault; the moments are random in the whole undisturbed run, with planning."""
    random = Random(0)
    return [
        Case(
            fault=fault,
            number=number,
            sharding=SHARDINGS[number % 2],
            machine=number // 2 % 2,
            moment=round(random.uniform(0.02, 0.98), 3),
            silent=number // 4 % 2 == 1,
        )
        for fault in FAULTS
        for number in range(RUNS)
    ]


def run(case: Case, quiet: Mapping[str, Row], place: pathlib.Path, *, apart: bool) -> Row:
    still, name = quiet[case.sharding], f"nodes-{case.fault}-{case.number:02}".replace(" ", "-")
    at = round(case.moment * still["seconds"], 2)
    with two_hosts(apart=apart) as hosts:
        words = _words(case.sharding, still["card"], hosts)
        ended, second, came = _run(hosts, words, place, name, replace(case, moment=at))
    losses = {int(step): loss for step, loss in still["losses"].items()}
    row = faults.judged(ended, came=came, losses=losses)
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == name and process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline())[:200])
    if left:
        row["outcome"] = f"left behind: {left}"
    elif second:
        row["outcome"] = f"machine 1: {second[-300:]}"
    elif ended.seconds > BOUND_SECONDS:
        row["outcome"] = "too late"
    return {"moment": at, "seconds": round(ended.seconds, 1), **row}


_NUMBERS = itertools.count()
"""Numbers the pairs of machines of this process, several of which may run at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    names: tuple[str, ...] = ()
    """The names of the two network namespaces; empty if both machines are this host."""
    address: str = "127.0.0.1"
    """The first machine's address, for both."""

    def on(self, machine: int) -> list[str]:
        """Returns the prefix of a command that runs it on this machine."""
        return ["ip", "netns", "exec", self.names[machine]] if self.names else []

    def unplug(self, machine: int) -> None:
        """Takes a machine off the network, if it has its own."""
        if self.names:
            _ip("-n", self.names[machine], "link", "set", "wire", "down")

    def plug(self, machine: int) -> None:
        if self.names:
            _ip("-n", self.names[machine], "link", "set", "wire", "up")


def can_be_made() -> bool:
    """Returns whether this user can create network namespaces here."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"autofit-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return tried.returncode == 0


@contextlib.contextmanager
def two_hosts(*, apart: bool) -> Iterator[Hosts]:
    """Creates two machines, and removes them at the end. ``apart``: whether each machine is a network namespace; else
    both are this host."""
    if not apart:
        yield Hosts()
        return
    number = next(_NUMBERS)
    names = tuple(f"autofit-{os.getpid()}-{number}-{machine}" for machine in range(2))
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for machine, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.77.0.{machine + 1}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
        yield Hosts(names=names, address="10.77.0.1")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _words(sharding: str, card: str, hosts: Hosts) -> list[str]:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    place = ["--nodes", "2", "--main_process_ip", hosts.address, "--main_process_port", str(port)]
    return ["sft", *flags(sharding), "--gpu", card, "--simulate", "--no_probe", *place]


def _run(
    hosts: Hosts, words: Sequence[str], place: pathlib.Path, run: str, killed: Case | None = None
) -> tuple[Ended, str, bool]:
    """Returns the first machine's result, the second one's output if it failed, and whether a machine was killed.
    ``killed``: the machine that is killed, with the moment in seconds."""
    machine = None if killed is None else killed.machine
    came, attacker = False, None
    folder, mark = place / "runs" / run, {MARK: run}
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_name(f"{run}-second.txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)

    own = ["--output_dir", str(folder), "--json"]

    def start(*argv: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            argv = (*hosts.on(1), sys.executable, "-m", *argv)
            return subprocess.Popen(argv, cwd=place, stdout=out, stderr=out, env=surroundings(place, mark))

    def start_second() -> subprocess.Popen[bytes]:
        return start(command.AUTOFIT, *words, "--machine_rank", "1", *own)

    second = start_second()

    def kill_one(running: Running) -> None:
        nonlocal came, second, attacker
        if killed is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(killed.moment)
        came = running.process.poll() is None  # else the run finished before the moment
        if killed.fault in ATTACKS:
            is_in_its_place = killed.fault == OTHER_CARD and came
            if is_in_its_place:
                _kill(second)
            attacker = start(attack.__name__, killed.fault, hosts.address, words[-1], str(folder), *words[1:], *own)
            if is_in_its_place:
                attacker.wait(BOUND_SECONDS)
                second = start_second()
            return
        if killed.silent:
            hosts.unplug(killed.machine)
        _kill(second if machine else running.process)
        time.sleep(AWAY_SECONDS)
        if killed.silent:
            hosts.plug(killed.machine)
        if machine and came:
            second = start_second()

    try:
        argv = [*words, "--machine_rank", "0"]
        ended = autofit(argv, place, run, mark, folder=folder, meanwhile=kill_one, on=hosts.on(0))
        if attacker is not None and attacker.poll():
            raise RuntimeError(f"the attack succeeded: {log.read_text(errors='replace')[-1000:]}")
        if attacker is None and machine == 0 and not ended.finished:
            rest = autofit(argv, place, run, mark, folder=folder, meanwhile=lambda running: None, on=hosts.on(0))
            ended = replace(rest, seconds=ended.seconds + rest.seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):
            if second.wait(FAREWELL_SECONDS) == 0:
                return ended, "", came
        return ended, log.read_text(errors="replace")[-1000:] or f"status {second.returncode}", came
    finally:
        for each in filter(None, (second, attacker)):
            _kill(each)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all its descendants at once, as a power failure would."""
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(process.pid)
        every = [own, *own.children(recursive=True)]
        for each in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()
        for each in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()
