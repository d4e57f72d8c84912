"""Child processes that are forked off one that has imported everything, where a test is not about how one starts.

To import TRL takes a new process 5 seconds, and most of a tiny training is that. A forked child is a process like any
other, with pipes, a log, an environment and an end of its own; what it lacks is ``python -m``, which those tests have
that start a command as a user does (``test_processes``, ``cli/test_training``, ``rehearsal/test_pool``).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from autotrain_mem import processes

ROOT = pathlib.Path(__file__).parents[1]
REQUEST_BYTES = 1 << 20
"""More than module, folder and environment take: they come in one piece, with the pipes."""
SOON = 60.0
"""Seconds within which children end whose stdin is closed; far more than it takes, for a busy machine."""
IMPORTED = (
    "autotrain_mem.rehearsal.rehearse",
    "autotrain_mem.rehearsal.fake_run",
    "bitsandbytes",
    "datasets",
    "peft",
    "trl.experimental.ppo",
)


class Forge:
    """The process that has imported everything; started at the first child."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._address = str(folder / "forge")
        self._process: subprocess.Popen[str] | None = None

    def connect(self) -> socket.socket:
        """A connection for one child."""
        if self._process is None:
            start = "from tests.forked import serve; serve()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", start, self._address], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )  # type: ignore[assignment]
            assert self._process.stdout is not None
            assert self._process.stdout.readline(), "it did not start"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        return connection

    def end(self) -> None:
        """After all that it forked."""
        if self._process is not None:
            self._process.communicate(timeout=SOON)

    @contextlib.contextmanager
    def children(self) -> Iterator[None]:
        """Every :class:`processes.Child` that is made meanwhile is forked."""

        def popen(command: list[str], **given: Any) -> ForkedProcess:
            return ForkedProcess(self, command[-1], **given)

        names = {name: getattr(subprocess, name) for name in ("PIPE", "TimeoutExpired")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "subprocess", SimpleNamespace(Popen=popen, **names))
            yield


class ForkedProcess:
    """As much of ``subprocess.Popen`` as ``processes.Child`` asks for."""

    def __init__(
        self, forge: Forge, module: str, *, stderr: Any, env: Mapping[str, str], process_group: int | None, **_: Any
    ) -> None:
        self._returncode: int | None = None
        self._ended = threading.Event()
        its_in, our_in = os.pipe()
        our_out, its_out = os.pipe()
        request = {
            "module": module,
            "folder": os.getcwd(),
            "environment": dict(env),
            "leads_group": process_group is not None,
        }
        connection = forge.connect()
        socket.send_fds(connection, [json.dumps(request).encode()], [its_in, its_out, stderr.fileno()])
        os.close(its_in)
        os.close(its_out)
        self.stdin: TextIO = open(our_in, "w", encoding="utf-8")  # noqa: SIM115
        self.stdout: TextIO = open(our_out, encoding="utf-8")  # noqa: SIM115
        told = connection.makefile()
        self.pid = int(told.readline())
        threading.Thread(target=self._hear, args=(connection, told), daemon=True).start()

    def _hear(self, connection: socket.socket, told: TextIO) -> None:
        with connection, told:
            self._returncode = int(told.readline() or -signal.SIGKILL)
        self._ended.set()

    def poll(self) -> int | None:
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self._returncode is not None
        return self._returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        if not self._ended.is_set():
            self.send_signal(signal.SIGKILL)


# -- the process that is forked --------------------------------------------------------------------------------------


def serve() -> None:
    """Fork at every connection until stdin closes. In a child this returns when the child is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for whoever runs the tests
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    from trl import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer  # noqa: F401

    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported is no garbage, and its pages stay shared
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            break
        connection, _ = listener.accept()
        request, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if not request:  # somebody only made sure that it is there
            connection.close()
            continue
        keeper = os.fork()
        if keeper == 0:
            listener.close()
            _keep(connection, json.loads(request), files)
            return
        for each in files:
            os.close(each)
        connection.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _keep(connection: socket.socket, request: Mapping[str, Any], files: list[int]) -> None:
    """Fork the child, and tell its number and how it ended. Returns in the child."""
    child = os.fork()
    if child == 0:
        connection.close()
        _become(request, files)
        return
    null = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, *files):
        os.dup2(null, each)
    connection.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: Mapping[str, Any], files: list[int]) -> None:
    """``python -m module`` in its folder, with its environment."""
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    if request["leads_group"]:
        os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module(request["module"]).main()
