"""The command as a user runs it, in this process, in the folder ``place``."""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import bad_files
import pytest

from autotrain_mem.cli import main
from autotrain_mem.worker.client import Worker
from tests.forked import Forge
from tests.place import Autofit, Ran, SharedWorkers, a_user_in


@pytest.fixture(scope="session")
def worker(workers: SharedWorkers) -> Worker:
    return workers.first


@pytest.fixture(scope="session", autouse=True)
def files(place: Path) -> Path:
    """``place``, with everything that can be wrong with a model, data, a config or a plan."""
    bad_files.write(place, [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()])
    return place


@pytest.fixture(scope="module")
def autofit_once(workers: SharedWorkers, files: Path, forge: Forge) -> Iterator[Autofit]:
    """Runs a command line whose outcome several tests of a module look at."""

    def run(*argv: str) -> Ran:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = main.run(argv)
        return Ran(code, out.getvalue(), err.getvalue())

    with a_user_in(files, workers, forge):
        yield run
