"""Finds out why a training process ended before its time, and whether another may go on where it was.

What is recognised by its text is what PyTorch, CUDA and NCCL write into their exceptions and onto stderr:

- ``c10/cuda/CUDAException.cpp: c10_cuda_check_implementation`` begins with ``CUDA error:`` and goes on with the words
  of ``cudaGetErrorString`` (CUDA Runtime API, "Error handling"): ``an illegal memory access was encountered``,
  ``device-side assert triggered``, ``unspecified launch failure``, ``uncorrectable ECC error encountered``. After any
  of them the context is lost, and the process with it.
- ``torch/csrc/distributed/c10d/NCCLUtils.hpp: C10D_NCCL_CHECK`` writes ``NCCL error in:``, and its watchdog
  (``ProcessGroupNCCL.cpp``) ``Watchdog caught collective operation timeout``.
- What a rank says that another has left: ``gloo/transport/tcp/pair.cc`` (``Connection closed by peer``, a ``readv``
  that failed, ``Application timeout caused pair closure``, ``Timed out waiting 1800000ms for recv operation``),
  ``torch/csrc/distributed/c10d/socket.cpp`` and ``TCPStore.cpp`` (``Connection was likely closed``, ``wait timeout
  after 1800000ms``), and NCCL's ``remote process exited or there was a network error`` (``nccl/src/init.cc:
  ncclGetErrorString``).
- What says that memory ran out stands in ``training.cuda_oom``; Python's own is ``MemoryError``.
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
    """An answer to a cause: it says what may help."""

    AGAIN = "again"
    """The same once more: it came from outside."""
    UNLESS_REPEATED = "unless repeated"
    """The same once more, but not where the process before ended so at the same step."""
    UNLESS_LOST = "unless lost"
    """As before, and only where a checkpoint spares what was done: most likely it comes again."""
    LESS_DEVICE_MEMORY = "less device memory"
    LESS_HOST_MEMORY = "less host memory"
    """Less of it where the plan can do with less; else the same once more: it may have been somebody else's."""
    MACHINES = "machines"
    """The same once more when the lost machine is back; else with those that are left, where that was asked for."""
    NONE = "none"
    """The user's to mend."""


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
"""Less than this of the host's memory was left: a process that was killed then was killed for it. earlyoom, which
Fedora had on by default, sends SIGTERM at 10 % and SIGKILL at 5 % (earlyoom(1), ``-m PERCENT[,KILL_PERCENT]``)."""

WHY_CHARACTERS = 120
"""The most characters of a library's error, which may be pages: the error that ends a run holds all of it."""

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
"""What a rank says for which another is to blame, that died or hangs."""

_BUGS = ("TypeError", "ValueError", "KeyError", "IndexError", "AttributeError", "AssertionError", "NotImplementedError")
"""What Python raises for code or data that are wrong: they are as wrong the next time."""

_CRASHES = {getattr(signal, name, None) for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")}
"""Signals that a process raises by what it does itself; Windows has no SIGBUS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """A training process that ended before its time, as far as it was seen."""

    error: AutofitError
    """The error that it sent; or, where it sent none, that it ended."""
    code: int | None = None
    """Exit status, negative for a signal; None for a process that told its error."""
    log_tail: str = ""
    """The last that it and its libraries printed."""
    step: int = 0
    """Optimizer steps that were done, as far as it told."""
    began_at: int = 0
    """The steps that were done when it began to train; equal to ``step`` where it did none itself."""
    saving: str = ""
    """The folder of the checkpoint that it was writing; empty where it was not."""
    host_kills: int = 0
    """Processes that the kernel killed meanwhile for want of memory."""
    host_left_share: float = 1.0
    """The least of the host's memory that was seen to be available."""
    peak_reserved_bytes: int | None = None
    """The peak reserved bytes of the device's allocator, as of the last step; None where nothing measures."""
    rank: int | None = None
    """The one of several processes that ended first, or is waited for; None for a single one."""
    waited_for: str = ""
    """How it showed that the others wait for it; empty where nothing hangs."""
    machine_lost: str = ""
    """Which machine is gone, and how that showed; empty where all are there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    name: str
    """One of ``CAUSES``."""
    why: str
    """What was seen of it, in one line."""

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
