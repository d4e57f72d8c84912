"""Exchanges JSON lines with child processes over stdin and stdout; other output of a child goes to its log.

A child exits when its parent exits, since that closes its stdin.
"""

import contextlib
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from autotrain_mem.support.errors import TrainingError
from autotrain_mem.support.files import open_own

LOG_TAIL_CHARACTERS = 2000
ENDING_SIGNALS = tuple(signal.Signals[name] for name in ("SIGHUP", "SIGUSR1") if name in signal.Signals.__members__)
"""A closing terminal sends SIGHUP, and Slurm can send SIGUSR1 to all processes of a step before its time limit
(sbatch(1), ``--signal``). Windows has neither."""
_HAS_GROUPS = hasattr(os, "killpg")
"""False on Windows, which has no process groups."""
DRIVER_SECONDS = 120.0
"""Seconds in which a killed process must exit. It cannot while a system call blocks (state D, proc_pid_stat(5))."""
GRACE_SECONDS = 10.0
"""Seconds between a request to exit and a kill."""

_OVERWRITTEN = re.compile(r"[^\n]*\r(?=[^\n])")
"""Matches all but the last state of a progress bar."""


class ChildDied(Exception):
    """Raised if the child exited without an answer. ``code`` is its exit status, negative for a signal."""

    def __init__(self, code: int | None, log_tail: str) -> None:
        super().__init__(f"the child process ended with status {code}")
        self.code = code
        self.log_tail = log_tail


class ChildTimeout(Exception):
    """Raised if there is no answer within the time limit."""


class Child:
    """Represents a child process on the parent's side.

    Args:
        module: Run as ``python -m module``.
        environment: Variables in addition to this process's own.
        log: The file for the child's stderr; None for a temporary file.
        has_children: Whether it starts processes. It then leads a process group, which does not receive Ctrl-C.
            :meth:`kill` ends the whole group: an orphan would hold stdout open, and the parent would wait for it.
        keeps_open: File descriptors that it inherits.
        on_line: Called in a thread with each line of output, and with None at the end, instead of :meth:`receive`.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str],
        log: pathlib.Path | None = None,
        *,
        has_children: bool = False,
        keeps_open: Sequence[int] = (),
        on_line: Callable[[str | None], None] | None = None,
    ) -> None:
        self._log = open(log, "a+b", opener=open_own) if log is not None else tempfile.TemporaryFile()  # noqa: SIM115
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._on_line = on_line or self._lines.put
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment},
            text=True,
            encoding="utf-8",
            process_group=0 if has_children and _HAS_GROUPS else None,
            pass_fds=keeps_open if _HAS_GROUPS else (),
        )
        self._leads_group = has_children and _HAS_GROUPS
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one object. Raises ChildDied if the child has exited."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self.death() from error

    def receive(self, timeout_seconds: float | None = None) -> dict[str, Any]:
        """Returns the next object. Raises ChildDied if the child exits, ChildTimeout after the limit, if any."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            # Short waits: Python runs signal handlers only between them.
            wait = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            if wait <= 0:
                raise ChildTimeout
            try:
                line = self._lines.get(timeout=wait)
            except queue.Empty:
                self.end_orphans()
                continue
            if line is None:
                self._lines.put(None)  # for the next call
                raise self.death()
            answer: dict[str, Any] = json.loads(line)
            return answer

    def log_tail(self) -> str:
        """Returns the end of the child's log; empty if another thread stopped the child and closed the log."""
        try:
            self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, self._log.tell() - LOG_TAIL_CHARACTERS))
            text = self._log.read(LOG_TAIL_CHARACTERS).decode("utf-8", errors="replace")
        except ValueError:
            return ""
        return _OVERWRITTEN.sub("", text).strip()

    def interrupt(self) -> None:
        """Interrupts the child as Ctrl-C does."""
        if self.alive:
            self._process.send_signal(signal.SIGINT)

    def wait(self, timeout_seconds: float) -> None:
        """Waits until the child has exited or the time is up."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Stops the child: closes its stdin, waits, then kills. Safe to call twice. Raises
        TrainingError if a killed child does not exit."""
        self.close_input()
        self.wait(grace_seconds)
        if self.alive:
            self.kill()
            self.wait(DRIVER_SECONDS)
        self.end_orphans()
        self._log.close()
        if self.alive:
            raise TrainingError(
                f"Process {self.pid} does not exit after SIGKILL: it hangs in the kernel, in a driver or a lost disk.",
                hint="It may hold GPU memory. Reset the GPU (nvidia-smi --gpu-reset) or reboot, then resume the run.",
            )

    def close_input(self) -> None:
        """Closes the child's stdin, so that it exits."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Kills the child at once. Call :meth:`stop` afterwards, once all other children are killed too."""
        self._process.kill()

    def end_orphans(self) -> None:
        """Kills the processes that a dead child left. The id of a process group is not reused while it has members."""
        if self._leads_group and not self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._on_line(line)
        self._on_line(None)

    def death(self) -> ChildDied:
        """Waits for the child's exit and returns its error."""
        code = self._process.wait()
        self.end_orphans()
        return ChildDied(code, self.log_tail())


class LossyStream:
    """Wraps a text stream that may fail: a full disk, a closed terminal, a reader that exited. ``on_loss``: called
    with the first error, except in forked processes."""

    def __init__(self, stream: TextIO, on_loss: Callable[[OSError], None] = lambda error: None) -> None:
        self._stream = stream
        self._on_loss = on_loss
        self._has_lost = False
        self._process = os.getpid()

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        if not self._has_lost and os.getpid() == self._process:
            self._has_lost = True
            self._on_loss(error)


class Channel:
    """Represents the child's side. Takes over stdin and stdout, so that ``print`` writes to the log.

    Args:
        ignore_interrupt: Whether to leave Ctrl-C to the parent, which stops this process itself.
        on_close: Called when the parent closes its end, before this process exits.
        on_loss: Called once for each stream when the log can no longer be written; later output is dropped.
    """

    def __init__(
        self,
        *,
        ignore_interrupt: bool,
        on_close: Callable[[], None] = lambda: None,
        on_loss: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        if ignore_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for each in ENDING_SIGNALS:  # they reach the parent too, which stops this process
            signal.signal(each, signal.SIG_IGN)
        self._out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._sending = threading.Lock()
        os.dup2(2, 1)
        out = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = LossyStream(out, on_loss), LossyStream(sys.stderr, on_loss)
        # A fork closes its sys.stdin, and would wait forever for the thread that reads from it here.
        self._in: TextIO = os.fdopen(os.dup(0), encoding="utf-8")
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
        self._requests: queue.Queue[dict[str, Any]] = queue.Queue()
        self._on_close = on_close
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_asked(self) -> bool:
        """Returns whether an object waits to be received."""
        return not self._requests.empty()

    def receive(self) -> dict[str, Any]:
        """Returns the parent's next object. When the parent closes its end, the reader thread ends the process."""
        return self._requests.get()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one object, from any thread."""
        try:
            with self._sending:
                self._out.write(json.dumps(message) + "\n")
                self._out.flush()
        except BrokenPipeError:
            self._reader.join(GRACE_SECONDS)  # the parent exited: the reader cleans up and ends the process
            raise

    def _read(self) -> None:
        for line in self._in:
            self._requests.put(json.loads(line))
        with contextlib.suppress(Exception):  # no parent is left to report it to
            self._on_close()
        if _HAS_GROUPS and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # with its own children (see Child: has_children)
        os._exit(0)  # an ordinary exit would wait for the run
