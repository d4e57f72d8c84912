"""Finds out why a training process ended too early, and whether another may resume it.

Causes are recognised by what PyTorch, CUDA and NCCL write into their exceptions and onto stderr:

- ``c10/cuda/CUDAException.cpp: c10_cuda_check_implementation`` begins with ``CUDA error:`` and continues with the words
  of ``cudaGetErrorString`` (CUDA Runtime API, "Error handling"): ``an illegal memory access was encountered``,
  ``device-side assert triggered``, ``unspecified launch failure``, ``uncorrectable ECC error encountered``. After any
  of them the context is lost, and the process with it.
- ``torch/csrc/distributed/c10d/NCCLUtils.hpp: C10D_NCCL_CHECK`` writes ``NCCL error in:``, and its watchdog
  (``ProcessGroupNCCL.cpp``) ``Watchdog caught collective operation timeout``.
- A rank that another has left writes: ``gloo/transport/tcp/pair.cc`` (``Connection closed by peer``, a ``readv``
  that failed, ``Application timeout caused pair closure``, ``Timed out waiting 1800000ms for recv operation``),
  ``torch/csrc/distributed/c10d/socket.cpp`` and ``TCPStore.cpp`` (``Connection was likely closed``, ``wait timeout
  after 1800000ms``), and NCCL's ``remote process exited or there was a network error`` (``nccl/src/init.cc:
  ncclGetErrorString``).
- Out-of-memory errors are in ``training.cuda_oom``; Python's own is ``MemoryError``.
- ``torch/utils/data/_utils/signal_handling.py`` writes ``DataLoader worker (pid 7) is killed by signal: Killed.``
"""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from autotrain_mem.support.errors import AutofitError, GpuOutOfMemoryError, OutputFolderError, TrainingError
from autotrain_mem.training.cuda_oom import HOST, kind_of_text


class Remedy(StrEnum):
    AGAIN = "again"
    """Restart: the cause came from outside."""
    UNLESS_REPEATED = "unless repeated"
    """Restart, unless the process before ended so at the same step."""
    UNLESS_LOST = "unless lost"
    """As before, but only with a checkpoint of this process: the cause most likely comes again."""
    LESS_DEVICE_MEMORY = "less device memory"
    LESS_HOST_MEMORY = "less host memory"
    """Restart with less if the plan allows it; else with the same: other processes may have used the memory."""
    MACHINES = "machines"
    """Restart when the lost machine is back; else with those that are left, if the user allows it."""
    NONE = "none"
    """Must be fixed by the user."""


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
"""Every cause by its name, as a :class:`~autotrain_mem.types.experience.Restart` has it."""

LOW_HOST_SHARE = 0.05
"""A process that was killed with less of the host's memory left was killed for want of it. earlyoom, which Fedora had
on by default, sends SIGTERM at 10 % and SIGKILL at 5 % (earlyoom(1), ``-m PERCENT[,KILL_PERCENT]``)."""

WHY_CHARACTERS = 120
"""The most characters of a library's error in a cause; the error that ends a run has all of it."""

_TEXTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("host out of memory", (r"(?<!OutOf)MemoryError", "is killed by signal: Killed")),
    ("NCCL error", ("NCCL error", "collective operation timeout")),
    ("CUDA error", ("CUDA error", "CUDA driver error", "CUDNN_STATUS_", "CUBLAS_STATUS_", "ECC error")),
)
"""Maps a cause to its patterns, beside those of out-of-memory errors; the first match counts."""

_OF_OTHERS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed"),
    *("Application timeout caused pair closure", "Timed out waiting", "wait timeout after", "Socket Timeout"),
    *("collective operation timeout", "remote process exited or there was a network error", "communicator was aborted"),
)
"""What a rank writes when another one died or hangs."""

_BUGS = ("TypeError", "ValueError", "KeyError", "IndexError", "AttributeError", "AssertionError", "NotImplementedError")
"""Exceptions of wrong code or data, which come again."""

_CRASHES = {getattr(signal, name, None) for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")}
"""Signals that a process causes itself; Windows has no SIGBUS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """What was seen of a training process that ended too early."""

    error: AutofitError
    """The error that it sent, or one that says that it ended."""
    code: int | None = None
    """Exit status, negative for a signal; None for a process that sent its error."""
    log_tail: str = ""
    """The last that it and its libraries printed."""
    step: int = 0
    """Optimizer steps that were done, by its last event."""
    began_at: int = 0
    """The steps that were done when it began to train."""
    saving: str = ""
    """The folder of the checkpoint that it was writing; empty for none."""
    host_kills: int = 0
    """Processes that the kernel killed meanwhile for want of memory."""
    host_left_share: float = 1.0
    """The least share of the host's memory that was available."""
    peak_reserved_bytes: int | None = None
    """The peak reserved bytes of the device's allocator at the last step; None if they cannot be measured."""
    rank: int | None = None
    """The one of several processes that ended first, or is waited for; None for a single one."""
    waited_for: str = ""
    """Why the others are thought to wait for it; empty if nothing hangs."""
    machine_lost: str = ""
    """Which machine is lost, and why that is thought; empty for none."""


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
    """Names the cause of an ending: the process's own error counts before its exit status, and both before its log.

    >>> cause_of(Ending(error=TrainingError("It ended."), code=-9, host_kills=1))
    Cause(name='host out of memory', why="the kernel's OOM killer ended it (signal 9)")
    """
    if ending.machine_lost:
        return Cause(name="machine lost", why=ending.machine_lost.rstrip("."))
    if ending.waited_for:
        cause = Cause(name="hang", why=ending.waited_for)
    else:
        cause = _of_status(ending) if ending.code is not None else _of_error(ending)
    return cause if ending.rank is None else Cause(name=cause.name, why=f"rank {ending.rank}: {cause.why}")


def blames_others(text: str) -> bool:
    """Returns whether a rank failed because another died or did not arrive, by its error or its log."""
    return any(each in text for each in _OF_OTHERS)


def _of_error(ending: Ending) -> Cause:
    error, words = ending.error, re.sub(rf"^Rank {ending.rank}\b[^:]*: ", "", ending.error.message)
    why = textwrap.shorten(words, WHY_CHARACTERS, placeholder=" ...")
    if isinstance(error, GpuOutOfMemoryError):
        # "Out of memory during forward, after step 0: CUDA out of memory. Tried to allocate 2 MiB. ..." says it thrice.
        where, _, reason = words.partition(": ")
        asked = re.search(r"Tried to allocate [^.]*(?:\.\d+[^.]*)?", reason)
        why = where.removeprefix("Out of memory ") + (f", {asked[0].lower()}" if asked else "")
        return Cause(name="GPU out of memory", why=why)
    if isinstance(error, OutputFolderError):
        return Cause(name="disk full", why=why)
    if not isinstance(error, TrainingError):
        return Cause(name="refused", why=why)
    named = _named_in(error.message)
    if named is not None:
        return Cause(name=named, why=why)
    if ending.saving:
        return Cause(name="saving failed", why=why)
    return Cause(name="refused" if any(f"raised {bug}" in why for bug in _BUGS) else "raised", why=why)


def _of_status(ending: Ending) -> Cause:
    number = -(ending.code or 0)
    if number == signal.SIGKILL and ending.host_kills:
        return Cause(name="host out of memory", why="the kernel's OOM killer ended it (signal 9)")
    if number in (signal.SIGKILL, signal.SIGTERM):
        is_low = ending.host_left_share < LOW_HOST_SHARE
        left = f" with {ending.host_left_share:.0%} of the host's memory left" if is_low else ""
        return Cause(name="host out of memory" if is_low else "killed", why=f"signal {number}{left}")
    how = f"signal {number}" if number > 0 else f"exit status {ending.code}"
    for line in reversed(ending.log_tail.splitlines()):
        name = _named_in(line)
        if name is not None:
            return Cause(name=name, why=f"{how}, after {line.strip()!r}")
    return Cause(name="crashed" if number in _CRASHES else "ended", why=how)


def _named_in(text: str) -> str | None:
    memory = kind_of_text(text)
    if memory is not None:
        return "host out of memory" if memory == HOST else "GPU out of memory"
    return next((name for name, texts in _TEXTS if any(re.search(each, text) for each in texts)), None)
