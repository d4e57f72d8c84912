"""The command as a user runs it, in this process, with one worker for all tests: it takes seconds to start."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import bad_files
import pytest
from command_line import Autofit, Ran
from tiny import tiny_folder

from autotrain_mem import api
from autotrain_mem.cli import main
from autotrain_mem.machine import choose
from autotrain_mem.quickstart import data
from autotrain_mem.worker.client import Worker
from tests.forked import Forge
from tests.shared_workers import SharedWorkers, started_in


@pytest.fixture(scope="session")
def workers(files: Path, forge: Forge) -> Iterator[SharedWorkers]:
    with started_in(files, forge) as shared:
        yield shared


@pytest.fixture(scope="session")
def worker(workers: SharedWorkers) -> Worker:
    return workers.first


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good model, good data of every kind, and everything that can be wrong with them."""
    folder = tmp_path_factory.mktemp("cli")
    tiny_folder(folder / "tiny", "qwen2")
    data.write_dataset(folder / "data.jsonl", rows=60, seed=0)
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    bad_files.write(folder, rows)
    return folder


@contextlib.contextmanager
def _place(workers: SharedWorkers, files: Path, forge: Forge) -> Iterator[None]:
    """The folder of ``files``, on a machine without a GPU; trainings are forked, and what is rehearsed is kept."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, forge.children():
        patch.chdir(files)
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            patch.delenv(name, raising=False)
        patch.setenv("AUTOFIT_CACHE", str(files.parent / f"{files.name}-cache"))
        patch.setattr(api, "Workers", lambda count=None: workers)
        patch.setattr(choose, "detect", lambda: ())
        yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def autofit(workers: SharedWorkers, files: Path, forge: Forge, capsys: pytest.CaptureFixture[str]) -> Iterator[Autofit]:
    """Runs one command line in the folder of ``files``, on a machine without a GPU."""

    def run(*argv: str) -> Ran:
        capsys.readouterr()
        code = main.run(argv)
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    with _place(workers, files, forge):
        yield run


@pytest.fixture(scope="module")
def autofit_once(workers: SharedWorkers, files: Path, forge: Forge) -> Iterator[Autofit]:
    """The same for a command line whose outcome several tests of a module look at."""

    def run(*argv: str) -> Ran:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = main.run(argv)
        return Ran(code, out.getvalue(), err.getvalue())

    with _place(workers, files, forge):
        yield run
