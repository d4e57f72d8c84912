"""The command as a user runs it, in this process, with one worker for all tests: it takes seconds to start."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import bad_files
import bad_plans
import pytest
from command_line import Autofit, Ran
from tiny import tiny_folder

from autotrain_mem import api
from autotrain_mem.cli import main
from autotrain_mem.machine import choose
from autotrain_mem.quickstart import data
from autotrain_mem.rehearsal.client import Worker


class SharedWorkers(api.Workers):
    """Outlive the ``with`` block of a command."""

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def workers(files: Path) -> Iterator[SharedWorkers]:
    """Start in the folder of ``files``, as they do for a user who is there; one, since the suite runs in two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(files)
        shared = SharedWorkers(1)
    yield shared
    api.Workers.__exit__(shared)


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
    bad_plans.write(folder)
    return folder


@pytest.fixture
def autofit(
    workers: SharedWorkers, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Autofit]:
    """Runs one command line in the folder of ``files``, on a machine without a GPU."""
    monkeypatch.chdir(files)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AUTOFIT_CACHE", "")
    monkeypatch.setattr(api, "Workers", lambda count=None: workers)
    monkeypatch.setattr(choose, "detect", lambda: ())
    monkeypatch.setattr(api, "detect", lambda: ())
    before = signal.getsignal(signal.SIGTERM)

    def run(*argv: str) -> Ran:
        capsys.readouterr()
        code = main.run(argv)
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    yield run
    signal.signal(signal.SIGTERM, before)
