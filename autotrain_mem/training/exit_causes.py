"""Determines why a training process ended too early, and whether another process can continue the run."""

import re
import signal
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, GpuOutOfMemoryError, OutputFolderError, TrainingError
from autotrain_mem.training.cuda_oom import HOST, kind_of_text
from autotrain_mem.types.report import Shortage


class Remedy(StrEnum):
    AGAIN = "again"
    """Restart: the cause is external."""
    UNLESS_REPEATED = "unless repeated"
    """Restart, unless the previous process ended for the same cause at the same step."""
    UNLESS_LOST = "unless lost"
    """Like UNLESS_REPEATED, but only if a checkpoint exists and this process trained a step; else the cause recurs."""
    LESS_DEVICE_MEMORY = "less device memory"
    LESS_HOST_MEMORY = "less host memory"
    """This and LESS_DEVICE_MEMORY: restart with a plan that needs less memory if there is one, else with the same plan,
    since other processes may have used the memory."""
    MACHINES = "machines"
    """Restart when the lost machine is back, else on the remaining ones if the user allows it."""
    NONE = "none"
    """Do not restart: the user must fix the cause."""


CAUSES: Mapping[str, Remedy] = {
    "GPU out of memory": Remedy.LESS_DEVICE_MEMORY,
    "host out of memory": Remedy.LESS_HOST_MEMORY,
    "CUDA error": Remedy.UNLESS_REPEATED,
    "NCCL error": Remedy.UNLESS_REPEATED,
    "hang": Remedy.UNLESS_REPEATED,
    "machine lost": Remedy.MACHINES,
    "killed": Remedy.AGAIN,
    "crashed": Remedy.UNLESS_REPEATED,
    "ended": Remedy.UNLESS_REPEATED,
    "saving failed": Remedy.UNLESS_REPEATED,
    "disk full": Remedy.NONE,
    "raised": Remedy.UNLESS_LOST,
    "refused": Remedy.NONE,
}
"""Maps the name of each cause, as in :class:`~autotrain_mem.types.experience.Restart`, to its remedy."""

WHY_CHARACTERS = 120
"""The most characters of a library's error that a cause quotes; the error that stops a run quotes all of it."""

_TEXTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # torch/utils/data/_utils/signal_handling.py: _set_SIGCHLD_handler
    ("host out of memory", (r"(?<!OutOf)MemoryError", "is killed by signal: Killed")),
    # torch/csrc/distributed/c10d/NCCLUtils.hpp: C10D_NCCL_CHECK; ProcessGroupNCCL.cpp: its watchdog
    ("NCCL error", ("NCCL error", "collective operation timeout")),
    # c10/cuda/CUDAException.cpp: c10_cuda_check_implementation
    ("CUDA error", ("CUDA error", "CUDA driver error", "CUDNN_STATUS_", "CUBLAS_STATUS_", "ECC error")),
)
"""Maps each cause to its patterns, in addition to those of out-of-memory errors; the first match counts."""

_OF_OTHERS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed"),
    *("Application timeout caused pair closure", "Timed out waiting", "wait timeout after", "Socket Timeout"),
    *("collective operation timeout", "remote process exited or there was a network error", "communicator was aborted"),
)
"""Messages of a rank when another rank died or hangs: ``gloo/transport/tcp/pair.cc``; ``torch/csrc/distributed/c10d``:
``socket.cpp, TCPStore.cpp, ProcessGroupNCCL.cpp``; ``nccl/src/init.cc: ncclGetErrorString``."""

_BUGS = ("TypeError", "ValueError", "KeyError", "IndexError", "AttributeError", "AssertionError", "NotImplementedError")
"""Exceptions caused by wrong code or data, which would recur."""

_CRASHES = {getattr(signal, name, None) for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")}
"""Signals that a process raises by its own fault; Windows has no SIGBUS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Holds what was observed of a training process that ended too early."""

    error: AutofitError
    """The error that it sent, or one that reports its end."""
    code: int | None = None
    """Exit status, negative for a signal; None if the process sent its error."""
    log_tail: str = ""
    """The end of what it and its libraries printed."""
    step: int = 0
    """Optimizer steps done, by its last event."""
    began_at: int = 0
    """Optimizer steps done when it began to train."""
    saving: str = ""
    """The folder of the checkpoint that it was writing; empty if it wrote none."""
    host_kills: int = 0
    """The number of processes that the kernel's OOM killer ended while this process ran."""
    peak_reserved_bytes: int | None = None
    """Peak reserved bytes of the device's allocator at the last step; None if they cannot be measured."""
    rank: int | None = None
    """The rank that ended first, or that the others wait for; None for a single process, or if a machine was lost."""
    waited_for: str = ""
    """The evidence that the others wait for this rank; empty if nothing hangs."""
    machine_lost: str = ""
    """The lost machine and the evidence; empty if none is lost."""

    @property
    def shortage(self) -> Shortage | None:
        """The figures of an out-of-memory error, if it has any."""
        return None if (details := self.error.details) is None else codec.from_json(Shortage, details)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    name: str
    """One of ``CAUSES``."""
    why: str
    """One line of evidence."""

    @property
    def remedy(self) -> Remedy:
        return CAUSES[self.name]


def cause_of(ending: Ending) -> Cause:
    """Names the cause of an ending. The process's own error has precedence over its exit status, and both over its log.

    >>> cause_of(Ending(error=TrainingError("It ended."), code=-9, host_kills=1))
    Cause(name='host out of memory', why="the kernel's OOM killer ended it (signal 9)")
    """
    if ending.machine_lost:
        return Cause(name="machine lost", why=ending.machine_lost.rstrip("."))
    ended = _of_status(ending) if ending.code is not None else _of_error(ending)
    cause = Cause(name="hang", why=ending.waited_for) if ending.waited_for else ended
    return cause if ending.rank is None else Cause(name=cause.name, why=f"rank {ending.rank}: {cause.why}")


def blames_others(text: str) -> bool:
    """Returns whether an error or a log shows that another rank died or did not reach a collective."""
    return any(each in text for each in _OF_OTHERS)


def _of_error(ending: Ending) -> Cause:
    error, words = ending.error, re.sub(rf"^Rank {ending.rank}\b[^:]*: ", "", ending.error.message)
    why = textwrap.shorten(words, WHY_CHARACTERS, placeholder=" ...")
    if isinstance(error, GpuOutOfMemoryError):
        # "Out of memory during forward, after step 0: CUDA out of memory. Tried to allocate 2 MiB. ..." repeats itself.
        where, _, reason = words.partition(": ")
        asked = re.search(r"Tried to allocate [^.]*(?:\.\d+[^.]*)?", reason)
        why = where.removeprefix("Out of memory ") + (f", {asked[0].lower()}" if asked else "")
        return Cause(name="GPU out of memory", why=why)
    if isinstance(error, OutputFolderError):
        return Cause(name="disk full", why=why)
    if not isinstance(error, TrainingError):
        return Cause(name="refused", why=why)
    if (named := _named_in(error.message)) is not None:
        return Cause(name=named, why=why)
    raised = "refused" if any(f"raised {bug}" in why for bug in _BUGS) else "raised"
    return Cause(name="saving failed" if ending.saving else raised, why=why)


def _of_status(ending: Ending) -> Cause:
    if (number := -(ending.code or 0)) == signal.SIGKILL and ending.host_kills:
        return Cause(name="host out of memory", why="the kernel's OOM killer ended it (signal 9)")
    how = f"signal {number}" if number > 0 else f"exit status {ending.code}"
    if number == signal.SIGKILL:
        return Cause(name="killed", why=f"{how}, often because host memory ran out: see dmesg, or the scheduler's log")
    if number == signal.SIGTERM:
        return Cause(name="killed", why=how)
    for line in reversed(ending.log_tail.splitlines()):
        if (name := _named_in(line)) is not None:
            return Cause(name=name, why=f"{how}, after {line.strip()!r}")
    return Cause(name="crashed" if number in _CRASHES else "ended", why=how)


def _named_in(text: str) -> str | None:
    if (memory := kind_of_text(text)) is not None:
        return "host out of memory" if memory == HOST else "GPU out of memory"
    return next((name for name, texts in _TEXTS if any(re.search(each, text) for each in texts)), None)
