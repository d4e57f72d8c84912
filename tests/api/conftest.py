"""The verbs of Python, with one worker for all tests, on a machine without a GPU and without network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import tiny_folder

from autotrain_mem import api
from autotrain_mem.machine import choose
from autotrain_mem.quickstart import data
from tests.forked import Forge
from tests.shared_workers import SharedWorkers, started_in

MODEL = "Qwen/Qwen2.5-0.5B"
"""A hub id for whoever reads the documentation, and here a folder with a tiny model of that architecture."""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    tiny_folder(folder / MODEL, "qwen2")
    data.write_dataset(folder / "data.jsonl", rows=60, seed=0)
    return folder


@pytest.fixture(scope="session")
def shared_workers(place: Path, forge: Forge) -> Iterator[SharedWorkers]:
    with started_in(place, forge) as shared:
        yield shared


@pytest.fixture
def here(shared_workers: SharedWorkers, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model and data; what one test has rehearsed is kept for the others."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("AUTOFIT_CACHE", str(place / "cache"))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(api, "Workers", lambda count=None: shared_workers)
    monkeypatch.setattr(choose, "detect", lambda: ())
    return place
