"""Injects faults into a run on a simulated card, to try out what it survives.

Example: ``AUTOFIT_MISHAPS="oom:backward:37 kill:save:2" autofit sft ... --simulate``. Each fault occurs once in a run:
a file in the output folder lists those that occurred, for the process that resumes. A real card gets no faults.
"""

import builtins
import contextlib
import errno
import functools
import io
import os
import pathlib
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import parse_bytes
from autotrain_mem.types import Phase

VARIABLE = "AUTOFIT_MISHAPS"
MARKS_NAME = ".autofit-mishaps"
"""The file in the output folder that lists the faults that occurred."""
COUNT = "count"
_PHASES = tuple(str(phase) for phase in Phase if phase not in (Phase.LOAD, Phase.SAVE))
SYNTAX = f"""Separate faults by spaces:
oom:PHASE:N              refuses the Nth allocation of that phase: {", ".join(_PHASES)}
taken:SIZE:N             another process takes SIZE, such as 40MiB, from the Nth allocation on
kill:N                   kills the process at its Nth allocation
kill:save:N              ... in the middle of writing its Nth checkpoint
oom:save:N               the card is full in the middle of writing the Nth checkpoint
disk:save:N              the disk is full in the middle of writing the Nth checkpoint
torn:save:N[:FILE]       truncates a file of the Nth checkpoint, by default the largest, and kills the process
rot:save:N[:FILE]        ... changes one byte of it, and kills the process
disk:N                   the disk is full from the Nth allocation until training ends, except for checkpoints
stop:N                   stops the process at its Nth allocation, as SIGSTOP does
rank:R:...               any of these in the process with that rank; without it, in the first
count                    injects nothing, and writes the number of allocations and checkpoints to {MARKS_NAME} in
                         the output folder
Every process counts its own allocations and checkpoints, from 1."""

STDERR = 2
OPTIMIZER_NAME = "optimizer.pt"
"""The checkpoint file that is written after the weights and before the trainer's state (``transformers/trainer.py:
_save_checkpoint``): cut short, it leaves an incomplete checkpoint."""
SHARDED_NAME = "scheduler.pt"
"""The file written next. Faults use it if the optimizer's state is sharded: torch.save does not write that state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Describes one fault. :data:`SYNTAX` describes its notation."""

    text: str
    """The fault as the user wrote it, without a rank; also the line that records that it occurred."""
    kind: Literal["oom", "taken", "kill", "stop", "disk", "torn", "rot"]
    at: int
    """The number of the allocation, or of the checkpoint, at which it occurs."""
    phase: Phase | None = None
    """The phase whose allocations are counted. ``SAVE`` counts checkpoints, and None counts all allocations."""
    size_bytes: int = 0
    """Bytes that another process takes; it takes fewer if fewer are free."""
    file: str = ""
    """The file that is damaged; empty for the largest."""

    @property
    def over(self) -> str:
        """Returns the line that records the end of a lasting fault."""
        return f"{self.text} is over"

    @property
    def lasts(self) -> bool:
        """Returns True for taken memory and for a full disk."""
        return self.kind == "taken" or (self.kind, self.phase) == ("disk", None)


def parse_mishaps(text: str, rank: int | None = None) -> tuple[Fault, ...]:
    """Parses the text of ``AUTOFIT_MISHAPS``; with a rank, returns only the faults of that rank. Raises UsageError,
    with all words that are no fault; the hint gives the syntax.

    >>> [(fault.kind, fault.at) for fault in parse_mishaps("oom:backward:37 taken:1MiB:500 disk:save:2")]
    [('oom', 37), ('taken', 500), ('disk', 2)]
    """
    wrong: list[str] = []
    faults: list[Fault] = []
    for word in text.split():
        if word == COUNT:
            continue
        try:
            parts = word.split(":")
            whose, parts = (int(parts[1]), parts[2:]) if parts[0] == "rank" and len(parts) > 2 else (0, parts)
            fault = _parse(parts)
            faults += [fault] if rank in (None, whose) else []
        except ValueError:
            wrong.append(word)
    if wrong:
        raise UsageError(f"{VARIABLE} holds unknown faults: {', '.join(wrong)}.", hint=SYNTAX)
    return tuple(faults)


def _parse(parts: Sequence[str]) -> Fault:
    """Parses the parts of one word. Raises ValueError if they are not a fault."""
    fault = functools.partial(Fault, text=":".join(parts))
    match parts:
        case ["oom", phase, at] if phase in _PHASES:
            return fault(kind="oom", phase=Phase(phase), at=_count(at))
        case ["taken", size, at]:
            return fault(kind="taken", size_bytes=parse_bytes(size), at=_count(at))
        case ["kill" | "stop" | "disk" as kind, at]:
            return fault(kind=kind, at=_count(at))
        case ["oom" | "kill" | "disk" | "torn" | "rot" as kind, "save", at]:
            return fault(kind=kind, phase=Phase.SAVE, at=_count(at))
        case ["torn" | "rot" as kind, "save", at, file] if file and pathlib.PurePath(file).name == file:
            return fault(kind=kind, phase=Phase.SAVE, at=_count(at), file=file)
        case _:
            raise ValueError


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


@contextlib.contextmanager
def injected_faults(
    gpu: SimulatedGpu, environment: Mapping[str, str], folder: pathlib.Path, phase: Callable[[], Phase]
) -> Iterator[None]:
    """Injects the faults that ``environment`` requests into this process. Raises UsageError for unknown ones.
    ``MARKS_NAME`` in the run's output ``folder`` lists the faults that occurred, and ``phase`` returns the phase."""
    rank, text = int(os.environ.get("RANK", "0")), environment.get(VARIABLE, "")
    counts = COUNT in text.split() and not rank
    requested = parse_mishaps(text, rank)
    faults = Faults(gpu, folder / MARKS_NAME, f"rank:{rank}:" if rank else "", phase, requested)
    if not faults.pending and not counts:
        yield
        return
    import torch  # only a run that already trains comes here

    faults.save = torch.save
    gpu.before_allocation = faults.before_allocation
    with (
        patch.object(torch, "save", faults.saving),
        full_disk(folder, lambda: faults.is_disk_full and phase() is not Phase.SAVE),
        open(os.dup(STDERR), "wb") as log,
    ):
        yield
        os.dup2(log.fileno(), STDERR)
    gpu.before_allocation = None
    faults.end(counts=counts)


@contextlib.contextmanager
def full_disk(folder: pathlib.Path, is_full: Callable[[], bool]) -> Iterator[None]:
    """Makes writes to the folder fail while the disk is full, except those of checkpoints."""

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if set(mode) & set("wax+") and isinstance(file, (str, os.PathLike)):
            path = pathlib.Path(file).absolute()
            names = path.relative_to(folder.absolute()).parts if path.is_relative_to(folder.absolute()) else ()
            if names and names[0] != MARKS_NAME and not pathlib.Path(names[0]).match("checkpoint-*") and is_full():
                return io_open("/dev/full", mode.replace("x", "w"), *args, **{**options, "opener": None})
        return io_open(file, mode, *args, **options)

    io_open = io.open
    with patch.object(builtins, "open", opened), patch.object(io, "open", opened):
        yield


class Faults:
    """Counts allocations and checkpoints of one process, and triggers each fault when it is due.

    Args:
        marks: The file that lists the faults of all processes of this run, one line each.
        whose: The prefix of this process's lines.
        phase: Returns the run's current phase.
    """

    save: Callable[..., Any]
    """The original ``torch.save``."""

    def __init__(
        self, gpu: SimulatedGpu, marks: pathlib.Path, whose: str, phase: Callable[[], Phase], faults: Sequence[Fault]
    ) -> None:
        self._gpu, self._marks, self._whose, self._phase = gpu, marks, whose, phase
        self._marked = set(marks.read_text(encoding="utf-8").splitlines()) if marks.is_file() else set()
        self._begun: set[Fault] = set()
        self._allocations = 0
        self._of_phase = Counter[Phase]()
        self._saves, self._checkpoint = 0, pathlib.Path()
        pending = [each for each in faults if not self._is_marked(each.over if each.lasts else each.text)]
        self.pending = sorted(pending, key=lambda each: not each.lasts)
        """Faults that have not occurred, and lasting ones, which come first."""
        self.is_disk_full = any(each.kind == "disk" and each.lasts and self._is_marked(each.text) for each in pending)

    def _mark(self, mark: str) -> None:
        """Writes a fault to the file before it occurs, so that the mark survives if the process is killed."""
        if not self._is_marked(mark):
            self._marked.add(f"{self._whose}{mark}")
            with self._marks.open("a", encoding="utf-8") as lines:
                lines.write(f"{self._whose}{mark}\n")

    def _is_marked(self, mark: str) -> bool:
        return f"{self._whose}{mark}" in self._marked

    def before_allocation(self, size_bytes: int) -> None:
        """Triggers the faults that are due at this allocation. Raises torch.OutOfMemoryError to refuse it."""
        phase = self._phase()
        self._allocations += 1
        self._of_phase[phase] += 1
        for fault in self.pending:
            if fault.lasts:
                self._begin(fault)
            elif self._is_marked(fault.text):
                continue
            elif fault.kind in ("torn", "rot"):
                if fault.at == self._saves and phase is not Phase.SAVE:
                    self._damage(fault)
            elif fault.phase is None and fault.at == self._allocations:
                self._end_process(fault)
            elif fault.phase is phase is not Phase.SAVE and fault.at == self._of_phase[phase]:
                self._mark(fault.text)
                self._gpu.refuse(size_bytes)

    def saving(self, value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """Replaces ``torch.save``: writes half of the file if a fault of this checkpoint is due."""
        path = pathlib.Path(file) if isinstance(file, (str, os.PathLike)) else pathlib.Path()
        is_late = path.name == SHARDED_NAME and not (path.parent / OPTIMIZER_NAME).exists()
        if path.name != OPTIMIZER_NAME and not is_late:
            self.save(value, file, *args, **kwargs)
            return
        self._saves, self._checkpoint = self._saves + 1, path.parent
        at_save = (each for each in self.pending if each.phase is Phase.SAVE and each.at == self._saves)
        now = (each for each in at_save if each.kind not in ("torn", "rot"))
        if (fault := next((each for each in now if not self._is_marked(each.text)), None)) is None:
            self.save(value, file, *args, **kwargs)
            return
        whole = io.BytesIO()
        self.save(value, whole, *args, **kwargs)
        path.write_bytes(whole.getvalue()[: whole.tell() // 2])
        if fault.kind == "kill":
            self._end_process(fault)
        self._mark(fault.text)
        if fault.kind == "oom":
            self._gpu.refuse(whole.tell())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def end(self, *, counts: bool) -> None:
        """Frees the full disk after training; ``counts`` also writes lines such as ``backward 4711 allocations``."""
        for fault in self.pending:
            if fault.kind == "disk" and fault.lasts and self._is_marked(fault.text):
                self._mark(fault.over)
        if counts:
            for phase, number in self._of_phase.items():
                self._mark(f"{phase} {number} allocations")
            self._mark(f"all {self._allocations} allocations")
            self._mark(f"save {self._saves} checkpoints")

    def _begin(self, fault: Fault) -> None:
        """Takes memory or fills the disk; either outlasts this process."""
        if fault not in self._begun and (self._is_marked(fault.text) or self._allocations >= fault.at):
            self._begun.add(fault)
            self._gpu.occupy(fault.size_bytes)
            self._mark(fault.text)
            if fault.kind == "disk":
                self.is_disk_full = True
                with open("/dev/full", "wb") as nowhere:
                    os.dup2(nowhere.fileno(), STDERR)

    def _damage(self, fault: Fault) -> None:
        files = [path for path in self._checkpoint.iterdir() if path.is_file()]
        path = self._checkpoint / fault.file if fault.file else max(files, key=lambda each: each.stat().st_size)
        if path.is_file():
            content = bytearray(path.read_bytes())
            middle = len(content) // 2
            content[middle] ^= 1
            path.write_bytes(content[:middle] if fault.kind == "torn" else content)
        self._end_process(fault)

    def _end_process(self, fault: Fault) -> None:
        self._mark(fault.text)
        os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
