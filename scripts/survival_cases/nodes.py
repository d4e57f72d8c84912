"""Two machines of one simulated card each, of which one is killed at a random moment and started again.

Both run the same command, as a scheduler would start it. Every other one that is killed falls silent first, as one that
loses its power; then all its processes are killed at once, and its command is started as it was. Under DDP and FSDP2 in
turn, the first machine and the second in turn.

Losses are held against those of the undisturbed run, as in ``survival_cases/faults.py``. Nothing may be left behind:
each run's processes carry its name in their environment.
"""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import psutil

from autotrain_mem import api
from survival_cases import command, faults
from survival_cases.command import Ended, Running, autofit, surroundings
from survival_cases.hosts import Hosts, two_hosts
from survival_cases.kept import Kept, Row
from survival_cases.sizes import filled_card

RUNS = 20
FAULT = "node"
EPOCHS = 9
SHARDINGS = ("ddp", "fsdp2")
AWAY_SECONDS = 0.5
"""How long a machine is away."""
BOUND_SECONDS = 240.0
"""Of a whole run, whose commands import, plan and load twice."""
FAREWELL_SECONDS = 20.0
"""How long the second machine may take to end after the first."""
MARK = "AUTOFIT_SURVIVAL_RUN"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run, the machine that is killed, and when."""

    number: int
    sharding: str
    machine: int
    moment: float
    """A share of what the undisturbed run takes."""
    silent: bool = False
    """It is off the network before it is killed, where the machines have one."""

    def __str__(self) -> str:
        return f"{FAULT} {self.number:02} {self.sharding} {self.machine}"


def flags(sharding: str) -> list[str]:
    """Of a run of 108 steps of 8 rows, a checkpoint every 4."""
    kind = f"--dataset short_text --effective_batch_size 8 --bf16 false --num_train_epochs {EPOCHS}"
    return f"{faults.SHARED} {kind} --sharding {sharding} --gpus 1".split()


def undisturbed(
    workers: api.Workers, place: pathlib.Path, kept: Kept, shardings: Iterable[str] = SHARDINGS, *, apart: bool = False
) -> dict[str, Row]:
    """By sharding: the card, the losses, and how long it took.

    Args:
        apart: The machines have a network (``survival_cases/hosts.py``).
    """

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
    """20; moments are drawn from the whole of the undisturbed run, planning included."""
    random = Random(0)
    return [
        Case(
            number=number,
            sharding=SHARDINGS[number % 2],
            machine=number // 2 % 2,
            moment=round(random.uniform(0.02, 0.98), 3),
            silent=number // 4 % 2 == 1,
        )
        for number in range(RUNS)
    ]


def run(case: Case, quiet: Mapping[str, Row], place: pathlib.Path, *, apart: bool = False) -> Row:
    """One case; judged as a fault's."""
    still, name = quiet[case.sharding], f"nodes-{case.number:02}"
    at = round(case.moment * still["seconds"], 2)
    with two_hosts(apart=apart) as hosts:
        words = _words(case.sharding, still["card"], hosts)
        ended, second, came = _run(hosts, words, place, name, replace(case, moment=at))
    losses = {int(step): loss for step, loss in still["losses"].items()}
    row = faults.judged(ended, came=came, losses=losses)
    if left := _left_behind(name):
        row["outcome"] = f"left behind: {left}"
    elif second:
        row["outcome"] = f"machine 1: {second[-300:]}"
    elif ended.seconds > BOUND_SECONDS:
        row["outcome"] = "too late"
    return {"moment": at, "seconds": round(ended.seconds, 1), **row}


# -- two machines ------------------------------------------------------------------------------------------------------


def _words(sharding: str, card: str, hosts: Hosts) -> list[str]:
    port = _free_port()
    place = ["--nodes", "2", "--main_process_ip", hosts.address, "--main_process_port", str(port)]
    return ["sft", *flags(sharding), "--gpu", card, "--simulate", "--no_probe", *place]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _run(
    hosts: Hosts, words: Sequence[str], place: pathlib.Path, run: str, killed: Case | None = None
) -> tuple[Ended, str, bool]:
    """Returns how the first machine ended, what the second said if it did not end well, and whether one was killed.

    Args:
        killed: Which, with its moment in seconds.
    """
    machine = None if killed is None else killed.machine
    came = False
    folder, mark = place / "runs" / run, {MARK: run}
    shutil.rmtree(folder, ignore_errors=True)
    with _second(hosts, words, place, folder, mark) as second:

        def kill_one(running: Running) -> None:
            nonlocal came
            if killed is None:
                return
            _sleep(running, killed.moment)
            came = running.process.poll() is None  # else it ended sooner than the undisturbed run
            if killed.silent:
                hosts.unplug(killed.machine)
            _kill(second.process if machine else running.process)
            time.sleep(AWAY_SECONDS)
            if killed.silent:
                hosts.plug(killed.machine)
            if machine and came:
                second.start()

        argv = [*words, "--machine_rank", "0"]
        ended = autofit(argv, place, run, mark, folder=folder, meanwhile=kill_one, on=hosts.on(0))
        if machine == 0 and not ended.finished:
            rest = autofit(argv, place, run, mark, folder=folder, meanwhile=lambda running: None, on=hosts.on(0))
            ended = replace(rest, seconds=ended.seconds + rest.seconds)
        return ended, second.wait(), came


@dataclass(slots=True)
class _Second:
    """The second machine's command."""

    on: Sequence[str]
    argv: Sequence[str]
    place: pathlib.Path
    log: pathlib.Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        with self.log.open("ab") as log:
            around = surroundings(self.place, self.environment)
            argv = [*self.on, sys.executable, "-m", command.AUTOFIT, *self.argv]
            self.process = subprocess.Popen(argv, cwd=self.place, stdout=log, stderr=log, env=around)

    def wait(self) -> str:
        """Returns the end of its log where it did not end well; empty where it did."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process.wait(FAREWELL_SECONDS) == 0:
                return ""
        return self.log.read_text(errors="replace")[-1000:] or f"status {self.process.returncode}"


@contextlib.contextmanager
def _second(
    hosts: Hosts, words: Sequence[str], place: pathlib.Path, folder: pathlib.Path, mark: Mapping[str, str]
) -> Iterator[_Second]:
    argv = [*words, "--machine_rank", "1", "--output_dir", str(folder), "--json"]
    log = folder.with_name(f"{folder.name}-second.txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    second = _Second(hosts.on(1), argv, place, log, mark)
    second.start()
    try:
        yield second
    finally:
        _kill(second.process)


def _sleep(running: Running, seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.process.wait(seconds)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """As a machine that loses its power: all processes at once."""
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


def _left_behind(run: str) -> list[str]:
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == run and process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline())[:200])
    return left
