"""Processes that are forked off one that has imported everything, where a test is not about how one starts.

To import TRL takes a new process 5 seconds. A forked child has pipes, a log, an environment and an end of its own; what
it lacks is ``python -m``, which ``test_processes``, ``cli/test_training`` and ``worker/test_pool`` have.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TextIO

import psutil
import pytest

from autotrain_mem.support import processes

ROOT = pathlib.Path(__file__).parents[1]
REQUEST_BYTES = 1 << 20
"""More than command, folder and environment take: they come in one piece, with the pipes."""
STAY = b"stay"
MOST_FILES = 8
"""Its three streams, and what it keeps open beside them."""
RANKS_SECONDS = 240.0
"""Far more than two ranks take: one that waits for another for ever is a failure."""
SOON = 60.0
"""Seconds within which children end whose stdin is closed; far more than it takes, for a busy machine."""
IMPORTED = (
    "autotrain_mem.checks.arguments",
    "autotrain_mem.cli.commands",
    "autotrain_mem.run.early",
    "autotrain_mem.rehearsal.rehearse",
    "autotrain_mem.rehearsal.fake_run",
    "autotrain_mem.training.process.probe",
    "autotrain_mem.training.process.train",
    "autotrain_mem.machine.fault_injection",
    "bitsandbytes",
    "datasets",
    "deepspeed",  # accelerate imports it with the first model, and it looks the processor up, in a second
    "peft",
    "trl.experimental.ppo",
)


class Forge:
    """The process that has imported everything; whoever is the first to need a child starts it, for all in the folder.

    It is nobody's child, and ends when nobody needs it any more.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._address, self._lock = str(folder / "forge"), folder / "lock"
        self._stays: socket.socket | None = None
        self._started: list[ForkedProcess] = []

    def connect(self) -> socket.socket:
        """A connection for one child."""
        with self._alone():
            if self._stays is None:
                if not self._is_there():
                    command = [sys.executable, "-c", "from tests.forked import serve; serve()", self._address]
                    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
                self._stays = self._connected()
                self._stays.sendall(STAY)
        return self._connected()

    def end(self) -> None:
        """After all that it forked, where nobody else needs it."""
        if self._stays is not None:
            with self._alone(), self._stays as stays:
                stays.shutdown(socket.SHUT_WR)
                stays.settimeout(SOON)
                assert not stays.recv(1)

    def alive(self) -> set[int]:
        """Those below this process, and those forked for it."""
        forked = {each.pid for each in self._started if each.poll() is None}
        return forked | {child.pid for child in psutil.Process().children(recursive=True)}

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        return connection

    def _is_there(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(self._address) == 0

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def children(self) -> contextlib.AbstractContextManager[None]:
        """Every :class:`processes.Child` that is made meanwhile is forked."""
        return self._forking(processes, alone=True)

    def commands(self, *modules: Any) -> contextlib.AbstractContextManager[None]:
        """Every ``python ...`` that these modules start meanwhile is forked, and so is every child of it and of us."""
        return self._forking(processes, *modules, alone=False)

    def two_ranks(self, words: Sequence[Any], log: pathlib.Path, **environment: str) -> str:
        """Run a script in two processes, each in the environment that torchrun gives it; returns what they printed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        group |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        started = []
        with log.open("w") as output:
            for rank in ("0", "1"):
                given = {**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank, **environment}
                command = [str(word) for word in words]
                started.append(ForkedProcess(self, command, alone=False, stdout=output, stderr=output, env=given))
            codes = [each.wait(RANKS_SECONDS) for each in started]
        printed = log.read_text(encoding="utf-8")
        assert codes == [0, 0], printed[-3000:]
        return printed

    @contextlib.contextmanager
    def _forking(self, *modules: Any, alone: bool) -> Iterator[None]:
        def popen(command: Sequence[Any], **given: Any) -> ForkedProcess:
            assert command[0] == sys.executable
            return ForkedProcess(self, [str(word) for word in command[1:]], alone=alone, **given)

        def run(command: Sequence[Any], *, timeout: float | None = None, **given: Any) -> Any:
            given = {name: value for name, value in given.items() if name in ("cwd", "env")}
            with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
                code = popen(command, stdout=out, stderr=err, **given).wait(timeout)
                texts = [stream.seek(0) or stream.read() for stream in (out, err)]
            return subprocess.CompletedProcess(command, code, *texts)

        names = {name: getattr(subprocess, name) for name in ("PIPE", "STDOUT", "DEVNULL", "TimeoutExpired")}
        with pytest.MonkeyPatch.context() as patch:
            for module in modules:
                patch.setattr(module, "subprocess", SimpleNamespace(Popen=popen, run=run, **names))
            yield


class ForkedProcess:
    """As much of ``subprocess.Popen`` as is asked for."""

    def __init__(
        self,
        forge: Forge,
        words: Sequence[str],
        *,
        alone: bool,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any,
        stderr: Any,
        env: Mapping[str, str] | None = None,
        cwd: Any = None,
        process_group: int | None = None,
        pass_fds: Sequence[int] = (),
        text: bool = False,
        encoding: str = "utf-8",
    ) -> None:
        self._returncode: int | None = None
        self._ended = threading.Event()
        forge._started.append(self)
        request = {
            "words": words,
            "folder": str(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "leads_group": process_group is not None,
            "alone": alone,
        }
        with contextlib.ExitStack() as ours:  # closes what is the child's

            def opened(stream: Any, reading: bool) -> tuple[Any, int]:
                """Our end of a pipe, where one is asked for, and what the child gets."""
                if stream != subprocess.PIPE:
                    file = ours.enter_context(open(os.devnull, "w+b")) if stream == subprocess.DEVNULL else stream
                    return None, file.fileno()
                ends = os.pipe()
                its, our = ends if reading else ends[::-1]
                ours.callback(os.close, its)
                mode = ("w" if reading else "r") + ("" if text else "b")
                return open(our, mode, encoding=encoding if text else None), its

            self.stdin, its_in = opened(stdin, True)
            self.stdout, its_out = opened(stdout, False)
            its_err = its_out if stderr == subprocess.STDOUT else opened(stderr, False)[1]
            connection = forge.connect()
            socket.send_fds(connection, [json.dumps(request).encode()], [its_in, its_out, its_err, *pass_fds])
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

    def communicate(self) -> None:
        self.stdin.close()
        self.wait()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        if not self._ended.is_set():
            self.send_signal(signal.SIGKILL)


def serve() -> None:
    """Fork at every connection, as long as somebody stays."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for whoever runs the tests
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    address = sys.argv[1]
    gc.disable()  # looking for garbage took a fifth of the imports' time
    import torch
    from trl import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer  # noqa: F401

    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.manual_seed(0)  # adapters and value heads draw their first weights before a trainer seeds
    gc.collect()
    gc.freeze()  # what is imported is no garbage, and its pages stay shared
    gc.enable()
    pathlib.Path(address).unlink(missing_ok=True)  # of one that has ended
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    if os.fork():
        os._exit(0)  # whoever waits for it can connect
    users = list[socket.socket]()
    while True:
        ready, _, _ = select.select([*users, listener], [], [])
        if ready[0] is not listener:
            users.remove(ready[0])
            if not users:
                break
            ready[0].close()
            continue
        connection, _ = listener.accept()
        request, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, MOST_FILES)
        if request == STAY:
            users.append(connection)
            continue
        if request and not os.fork():  # without one it was only to make sure that somebody listens
            for each in (listener, *users):
                each.close()
            _keep(address, connection, json.loads(request), files)
            return
        for each in files:
            os.close(each)
        connection.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _keep(address: str, connection: socket.socket, request: Mapping[str, Any], files: list[int]) -> None:
    """Fork the child, and tell its number and how it ended."""
    child = os.fork()
    if child == 0:
        connection.close()
        code: Any = 0
        forge = Forge(pathlib.Path(address).parent)
        with contextlib.nullcontext() if request["alone"] else forge.children():
            try:
                _become(request, files)
            except SystemExit as end:
                code = end.code
        _exit(code)
    null = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, *files):
        os.dup2(null, each)
    connection.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _exit(code: Any) -> None:
    """Ends as the interpreter does, except that it takes nothing down, which takes half a second of the processor."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _become(request: Mapping[str, Any], files: list[int]) -> None:
    """``python ...`` in its folder, with its environment."""
    for number, each in enumerate(files[:3]):
        os.dup2(each, number)
        os.close(each)
    if request["leads_group"]:
        os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # TMPDIR may be another
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    match request["words"]:
        case "-m", module, *arguments:
            sys.argv = [module, *arguments]
            importlib.import_module(module).main()
        case "-c", code, *arguments:
            sys.argv = ["-c", *arguments]
            exec(code, {})
        case script, *arguments:
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
