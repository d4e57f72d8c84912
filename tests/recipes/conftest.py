"""The command, with one worker for all tests of the recipes, on a machine without a GPU and without network."""

from __future__ import annotations

import contextlib
import io
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest

from autotrain_mem import api
from autotrain_mem.machine import choose
from tests.forked import Forge
from tests.shared_workers import SharedWorkers, started_in

TESTS = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(TESTS.parent / "scripts"))  # recipe_plans: scripts are no package

from tiny_runs import Place  # noqa: E402


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="session")
def rows(place: pathlib.Path) -> Place:
    made = Place(place)
    made.write_rows()
    return made


@pytest.fixture(scope="session")
def workers(place: pathlib.Path, forge: Forge) -> Iterator[SharedWorkers]:
    with started_in(place, forge) as shared:
        yield shared


@pytest.fixture
def printed(
    workers: SharedWorkers, place: pathlib.Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """``printed(commands.plan, "sft", ["--recipe", ...])``: what the command wrote on stdout."""

    monkeypatch.chdir(place)
    monkeypatch.setattr(choose, "detect", lambda: ())
    monkeypatch.setattr(api, "Workers", lambda count=None: workers)

    def run(command: Callable[..., int], *words: object) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), forge.children():
            assert command(*words) == 0
        return said.getvalue()

    return run
