"""Makes go wrong on a simulated card what it is told to: try what your run would survive.

``AUTOFIT_MISHAPS="oom:backward:37 kill:save:2" autofit sft ... --simulate``. Each mishap comes once in a run: a file in
the output folder tells the process that goes on after it that it was there. On a real card nothing is made up.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import pathlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn
from unittest.mock import patch

from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import parse_bytes
from autotrain_mem.types import Phase

VARIABLE = "AUTOFIT_MISHAPS"
MARKS_NAME = ".autofit-mishaps"
"""The file in the output folder that lists what has come."""
COUNT = "count"
_PHASES = tuple(str(phase) for phase in Phase if phase not in (Phase.LOAD, Phase.SAVE))
SYNTAX = f"""Mishaps stand one after the other, with blanks between:
oom:PHASE:N              the Nth allocation of that phase is refused: {", ".join(_PHASES)}
taken:SIZE:N[:until:M]   from the Nth allocation (to the Mth) another process holds that much, such as 40MiB
kill:N                   the process is killed at its Nth allocation
kill:save:N              ... in the middle of writing its Nth checkpoint
oom:save:N               the card is full in the middle of writing the Nth checkpoint
disk:save:N              the disk is full in the middle of writing the Nth checkpoint
torn:save:N[:FILE]       a file of the Nth checkpoint, or its largest, is cut short, and the process is killed
rot:save:N[:FILE]        ... has one other byte, and the process is killed
clock:save:N             the clock is set back by an hour before the Nth checkpoint
disk:N                   from the Nth allocation on the disk is full, for all but checkpoints, until the training ends
stop:N                   the process stands still from its Nth allocation on, as under SIGSTOP
rank:R:...               any of these befalls the process with that rank, of several that train together; else the first
count                    nothing goes wrong; {MARKS_NAME} in the output folder then tells how many there are of each
Every process counts anew, its checkpoints too."""


CHECKPOINTS = "checkpoint-*"
STDERR = 2
SET_BACK_SECONDS = 3600.0  # as where summer time ends in a machine that keeps local time
OPTIMIZER_NAME = "optimizer.pt"
"""Of a checkpoint's files the one that is written after the weights and before the trainer's state
(``transformers/trainer.py: _save_checkpoint``): where it breaks off, the checkpoint has begun and is not whole."""
SHARDED_NAME = "scheduler.pt"
"""The first one that comes after, where the optimizer's state is in shards, and not written by torch.save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mishap:
    """One thing that goes wrong, as :data:`SYNTAX` says."""

    kind: Literal["oom", "taken", "kill", "stop", "disk", "torn", "rot", "clock"]
    at: int
    """The number of the allocation at which it comes, or of the checkpoint."""
    phase: Phase | None = None
    """The phase whose allocations are counted, or ``SAVE`` for checkpoints, since saving itself mostly asks for nothing
    of the card; None: all allocations are counted."""
    size_bytes: int = 0
    """That another process takes; it gets less where less is free."""
    until: int | None = None
    """The allocation before which it gives them back."""
    file: str = ""
    """That is torn or rots; empty for the largest."""

    def __str__(self) -> str:
        if self.kind == "taken":
            return f"taken:{self.size_bytes}B:{self.at}" + ("" if self.until is None else f":until:{self.until}")
        counted = "" if self.phase is None else f"{self.phase}:"
        return f"{self.kind}:{counted}{self.at}" + (f":{self.file}" if self.file else "")

    @property
    def over(self) -> str:
        """What is marked when the other process has ended, or the training whose disk was full."""
        return f"{self} is over"

    @property
    def lasts(self) -> bool:
        """Whether it goes on once it has come."""
        return self.kind == "taken" or (self.kind, self.phase) == ("disk", None)


def parse_mishaps(text: str, rank: int | None = None) -> tuple[Mishap, ...]:
    """Read the variable's text; with a rank, what befalls the process of that rank.

    >>> [str(mishap) for mishap in parse_mishaps("oom:backward:37 taken:1MiB:500:until:900 disk:save:2")]
    ['oom:backward:37', 'taken:1048576B:500:until:900', 'disk:save:2']

    Raises:
        UsageError: with what is wrong, and how mishaps are written.
    """
    wrong: list[str] = []
    mishaps: list[Mishap] = []
    for word in text.split():
        if word == COUNT:
            continue
        try:
            parts = word.split(":")
            whose, parts = (int(parts[1]), parts[2:]) if parts[0] == "rank" and len(parts) > 2 else (0, parts)
            mishap = _parse(parts)
            mishaps += [mishap] if rank in (None, whose) else []
        except ValueError:
            wrong.append(word)
    if wrong:
        raise UsageError(f"{VARIABLE} holds what is no mishap: {', '.join(wrong)}.", hint=SYNTAX)
    return tuple(mishaps)


def check_mishaps(environment: Mapping[str, str]) -> None:
    """Fail before minutes of planning, not after.

    Args:
        environment: What the run is given beside this process's own.

    Raises:
        UsageError: the variable cannot be read.
    """
    parse_mishaps({**os.environ, **environment}.get(VARIABLE, ""))


def _parse(parts: Sequence[str]) -> Mishap:
    """Raises ValueError."""
    match parts:
        case ["oom", phase, at] if phase in _PHASES:
            return Mishap(kind="oom", phase=Phase(phase), at=_count(at))
        case ["taken", size, at]:
            return Mishap(kind="taken", size_bytes=parse_bytes(size), at=_count(at))
        case ["taken", size, at, "until", until] if _count(until) > _count(at):
            return Mishap(kind="taken", size_bytes=parse_bytes(size), at=_count(at), until=_count(until))
        case ["kill" | "stop" | "disk" as kind, at]:
            return Mishap(kind=kind, at=_count(at))
        case ["oom" | "kill" | "disk" | "torn" | "rot" | "clock" as kind, "save", at]:
            return Mishap(kind=kind, phase=Phase.SAVE, at=_count(at))
        case ["torn" | "rot" as kind, "save", at, file] if file and pathlib.PurePath(file).name == file:
            return Mishap(kind=kind, phase=Phase.SAVE, at=_count(at), file=file)
        case _:
            raise ValueError


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


@contextlib.contextmanager
def beset(
    gpu: SimulatedGpu, environment: Mapping[str, str], folder: pathlib.Path, phase: Callable[[], Phase]
) -> Iterator[None]:
    """Inside, what ``environment`` asks for befalls this process, each mishap when it is due.

    Args:
        folder: The run's output folder, where it is marked what has come.
        phase: Tells where the run is.

    Raises:
        UsageError: the variable cannot be read.
    """
    rank = int(os.environ.get("RANK", "0"))
    mishaps = parse_mishaps(environment.get(VARIABLE, ""), rank)
    counts = COUNT in environment.get(VARIABLE, "").split() and not rank
    marks = Marks(folder / MARKS_NAME, f"rank:{rank}:" if rank else "")
    pending = [mishap for mishap in mishaps if mishap not in marks or mishap.lasts]
    if not pending and not counts:
        yield
        return
    import torch  # only a run that already trains comes here

    fate = Fate(gpu, pending, marks, phase)
    fate.save, fate.clock = torch.save, time.time
    gpu.before_allocation = fate.allocation
    with (
        patch.object(torch, "save", fate.saving),
        patch.object(time, "time", fate.time),
        full_disk(folder, fate.is_disk_full),
        fate.log_restored(),
    ):
        yield
    gpu.before_allocation = None
    fate.end()
    for line in fate.counted() if counts else ():
        marks.add(line)


@contextlib.contextmanager
def full_disk(folder: pathlib.Path, is_full: Callable[[], bool]) -> Iterator[None]:
    """Inside, what is written to the folder's files fails while the disk is full; those of checkpoints have room."""

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if set(mode) & set("wax+") and isinstance(file, (str, os.PathLike)):
            path = pathlib.Path(file).absolute()
            names = path.relative_to(folder.absolute()).parts if path.is_relative_to(folder.absolute()) else ()
            if names and names[0] != MARKS_NAME and not pathlib.Path(names[0]).match(CHECKPOINTS) and is_full():
                return io_open("/dev/full", mode.replace("x", "w"), *args, **{**options, "opener": None})
        return io_open(file, mode, *args, **options)

    io_open = io.open
    with patch.object(builtins, "open", opened), patch.object(io, "open", opened):
        yield


class Marks:
    """Holds what has come in this run, over all of its processes: one line each, written before it comes."""

    def __init__(self, path: pathlib.Path, whose: str = "") -> None:
        self._path, self._whose = path, whose
        self._lines = set(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else set()

    def __contains__(self, mark: object) -> bool:
        return f"{self._whose}{mark}" in self._lines

    def add(self, mark: object) -> None:
        """The system keeps the line when the process is killed."""
        self._lines.add(f"{self._whose}{mark}")
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(f"{self._whose}{mark}\n")


class Fate:
    """Counts what one process does, and lets come what is due.

    Args:
        pending: What has not come, or is not over.
        phase: Tells where the run is.
    """

    save: Callable[..., Any]
    """``torch.save`` as it was."""
    clock: Callable[[], float]
    """``time.time`` as it was."""

    def __init__(self, gpu: SimulatedGpu, pending: Sequence[Mishap], marks: Marks, phase: Callable[[], Phase]) -> None:
        self._gpu = gpu
        self._marks = marks
        self._phase = phase
        self._at_save = [mishap for mishap in pending if mishap.phase is Phase.SAVE]
        self._at_allocation = [mishap for mishap in pending if mishap.phase is not Phase.SAVE]
        self._set_back_seconds = 0.0
        self._held: dict[Mishap, int] = {}
        self._allocations = 0
        self._of_phase = Counter[Phase]()
        self._saves = 0
        self._checkpoint = pathlib.Path()

    def allocation(self, size_bytes: int) -> None:
        """Comes before each; raises torch.OutOfMemoryError for one that is refused."""
        phase = self._phase()
        self._allocations += 1
        self._of_phase[phase] += 1
        for taken in self._lasting("taken"):
            self._come_and_go(taken)
        for full in self._lasting("disk"):
            if full in self._marks or full.at == self._allocations:
                self._fill_disk(full)
        for hurt in self._due_at_save("torn", "rot"):
            if phase is not Phase.SAVE:
                self._hurt(hurt)
        for mishap in self._at_allocation:
            number = self._allocations if mishap.phase is None else self._of_phase[mishap.phase]
            if mishap.lasts or mishap in self._marks or mishap.at != number or mishap.phase not in (None, phase):
                continue
            self._marks.add(mishap)
            if mishap.kind == "kill":
                self._kill(mishap)
            elif mishap.kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                self._gpu.refuse(size_bytes)

    def counted(self) -> list[str]:
        """``backward 4711 allocations``, ``all 9999 allocations``, ``save 3 checkpoints``."""
        phases = [f"{phase} {number} allocations" for phase, number in self._of_phase.items()]
        return [*phases, f"all {self._allocations} allocations", f"save {self._saves} checkpoints"]

    def saving(self, value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """In the place of ``torch.save``: the file of a checkpoint that is due is written by half."""
        path = pathlib.Path(file) if isinstance(file, (str, os.PathLike)) else pathlib.Path()
        is_late = path.name == SHARDED_NAME and not (path.parent / OPTIMIZER_NAME).exists()
        if path.name != OPTIMIZER_NAME and not is_late:
            self.save(value, file, *args, **kwargs)
            return
        self._saves, self._checkpoint = self._saves + 1, path.parent
        for clock in self._due_at_save("clock"):
            self._set_clock_back(clock)
        due = self._due_at_save("oom", "kill", "disk")
        if not due:
            self.save(value, file, *args, **kwargs)
            return
        whole = io.BytesIO()
        self.save(value, whole, *args, **kwargs)
        path.write_bytes(whole.getvalue()[: whole.tell() // 2])
        if due[0].kind == "kill":
            self._kill(due[0])
        self._marks.add(due[0])
        if due[0].kind == "oom":
            self._gpu.refuse(whole.tell())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def time(self) -> float:
        """In the place of ``time.time``."""
        return self.clock() - self._set_back_seconds

    def is_disk_full(self) -> bool:
        return any(full in self._marks for full in self._lasting("disk")) and self._phase() is not Phase.SAVE

    @contextlib.contextmanager
    def log_restored(self) -> Iterator[None]:
        """After it, what is printed goes where it went before."""
        with open(os.dup(STDERR), "wb") as before:
            yield
            os.dup2(before.fileno(), STDERR)

    def end(self) -> None:
        for full in self._lasting("disk"):
            if full in self._marks:
                self._marks.add(full.over)

    def _lasting(self, kind: str) -> list[Mishap]:
        """Lists what goes on once it has come, until it is over."""
        return [
            each for each in self._at_allocation if each.lasts and each.kind == kind and each.over not in self._marks
        ]

    def _due_at_save(self, *kinds: str) -> list[Mishap]:
        """Lists what is due at the checkpoint that is being written, or was last."""
        named = [mishap for mishap in self._at_save if mishap.kind in kinds and mishap.at == self._saves]
        return [mishap for mishap in named if mishap not in self._marks]

    def _fill_disk(self, full: Mishap) -> None:
        if full not in self._marks:
            self._marks.add(full)
        with open("/dev/full", "wb") as nowhere:
            os.dup2(nowhere.fileno(), STDERR)

    def _set_clock_back(self, clock: Mishap) -> None:
        """Give what was written before a time that is still to come: the system's clock is nobody's to set."""
        self._marks.add(clock)
        self._set_back_seconds = SET_BACK_SECONDS
        then = self.clock() + SET_BACK_SECONDS
        for earlier in set(self._checkpoint.parent.glob(CHECKPOINTS)) - {self._checkpoint}:
            os.utime(earlier, (then, then))

    def _come_and_go(self, taken: Mishap) -> None:
        """A process that came while an earlier one of this run was alive is still there."""
        comes = taken in self._marks or self._allocations >= taken.at
        if comes and taken not in self._held:
            self._held[taken] = self._gpu.occupy(taken.size_bytes)
            if taken not in self._marks:
                self._marks.add(taken)
        if taken.until is not None and self._allocations >= taken.until:
            self._gpu.vacate(self._held.pop(taken))
            self._marks.add(taken.over)

    def _hurt(self, mishap: Mishap) -> NoReturn:
        files = [path for path in self._checkpoint.iterdir() if path.is_file()]
        path = self._checkpoint / mishap.file if mishap.file else max(files, key=lambda each: each.stat().st_size)
        if path.is_file():
            middle = path.stat().st_size // 2
            if mishap.kind == "torn":
                os.truncate(path, middle)
            else:
                content = bytearray(path.read_bytes())
                content[middle] ^= 1
                path.write_bytes(content)
        self._kill(mishap)

    def _kill(self, mishap: Mishap) -> NoReturn:
        self._marks.add(mishap)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a process lived on after SIGKILL")
