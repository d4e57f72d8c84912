"""Reads what is to go wrong on a simulated card, as it is written (``fault_injection`` does it)."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """An allocation is refused as if the card were full."""

    phase: Phase
    at: int

    def __str__(self) -> str:
        return f"oom:{self.phase}:{self.at}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Another process holds a part of the card; less where less is free."""

    size_bytes: int
    at: int
    until: int | None

    def __str__(self) -> str:
        return f"taken:{self.size_bytes}B:{self.at}" + ("" if self.until is None else f":until:{self.until}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Killed:
    """SIGKILL, as the host's out-of-memory killer sends it."""

    at: int

    def __str__(self) -> str:
        return f"kill:{self.at}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """SIGSTOP: a process that hangs, for all that others see of it."""

    at: int

    def __str__(self) -> str:
        return f"stop:{self.at}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskFull:
    """Nothing can be written any more but checkpoints: no file of the output folder, and no line of the log."""

    at: int

    def __str__(self) -> str:
        return f"disk:{self.at}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AtSave:
    """Something that befalls a checkpoint."""

    kind: Literal["oom", "kill", "disk", "torn", "rot", "clock"]
    """Saving itself mostly asks for nothing of the card, so ``oom`` counts checkpoints, too."""
    save: int
    file: str = ""
    """That is torn or rots; empty for the largest."""

    def __str__(self) -> str:
        return f"{self.kind}:save:{self.save}" + (f":{self.file}" if self.file else "")


def over(lasting: Taken | DiskFull) -> str:
    """Says what is marked when the other process has ended, or the training."""
    return f"{lasting} is over"


Mishap = Refused | Taken | Killed | Stopped | DiskFull | AtSave


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
            return Refused(phase=Phase(phase), at=_count(at))
        case ["taken", size, at]:
            return Taken(size_bytes=parse_bytes(size), at=_count(at), until=None)
        case ["taken", size, at, "until", until] if _count(until) > _count(at):
            return Taken(size_bytes=parse_bytes(size), at=_count(at), until=_count(until))
        case ["kill", at]:
            return Killed(at=_count(at))
        case ["stop", at]:
            return Stopped(at=_count(at))
        case ["disk", at]:
            return DiskFull(at=_count(at))
        case ["oom" | "kill" | "disk" | "torn" | "rot" | "clock" as kind, "save", save]:
            return AtSave(kind=kind, save=_count(save))
        case ["torn" | "rot" as kind, "save", save, file] if file and pathlib.PurePath(file).name == file:
            return AtSave(kind=kind, save=_count(save), file=file)
        case _:
            raise ValueError


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)
