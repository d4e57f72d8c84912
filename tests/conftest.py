"""Shared by all tests: no network, one thread, no telemetry, and nothing of the user's own cache."""

from __future__ import annotations

import functools
import gc
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    CUDA_VISIBLE_DEVICES="",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    AUTOFIT_CACHE="",
)


from tests.forked import Forge

if TYPE_CHECKING:
    from tests.browser import Browser
    from tests.place import Autofit, SharedWorkers


# A busy machine is no defect of the code. The same values are drawn each time: what others would find is for whoever
# looks for it (--hypothesis-profile default), not for whoever changes something else.
settings.register_profile("same each time", deadline=None, derandomize=True)
settings.load_profile("same each time")


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Forks child processes for whoever asks: ``with forge.children():``. Processes of one run share it."""
    folder = tmp_path_factory.getbasetemp()
    forge = Forge(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
    yield forge
    forge.end()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """``model_folder("llama")``: a tiny model that is only to be read, made once for all tests that want it."""
    from tiny import tiny_folder

    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda family: tiny_folder(root / family, family))


@pytest.fixture(scope="session")
def gpt2(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    """GPT-2's own dropout of 0.1 everywhere, two layers."""
    return model_folder("gpt2")


@pytest.fixture(scope="session")
def qwen(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    """Two layers without dropout, whose random numbers in parts are others than in one go."""
    return model_folder("qwen2")


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """``vision_folder("gemma3")``: the same of a tiny model that reads images."""
    from tiny import tiny_vision_folder

    root = tmp_path_factory.mktemp("vision_models")
    return functools.cache(lambda family: tiny_vision_folder(root / family, family))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    """A folder with a tiny model and data, in which commands and calls are tried (:mod:`tests.place`)."""
    from tests.place import write_rows

    folder = tmp_path_factory.mktemp("place")
    for name in ("tiny", "Qwen/Qwen2.5-0.5B"):  # the hub id is for whoever reads an example that runs
        shutil.copytree(model_folder("qwen2"), folder / name)
    write_rows(folder)
    return folder


@pytest.fixture(scope="session")
def workers(place: pathlib.Path, forge: Forge) -> Iterator[SharedWorkers]:
    from tests.place import started_in

    with started_in(place, forge) as shared:
        yield shared


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium, started once (:mod:`tests.browser`)."""
    from tests.browser import started

    with started() as driver:
        yield driver


@pytest.fixture
def here(workers: SharedWorkers, place: pathlib.Path, forge: Forge) -> Iterator[pathlib.Path]:
    """The working directory is ``place``, on a machine without a GPU."""
    from tests.place import a_user_in

    with a_user_in(place, workers, forge):
        yield place


@pytest.fixture
def autofit(here: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Autofit:
    """Runs one command line in ``place``."""
    from autotrain_mem.cli import main
    from tests.place import Ran

    def run(*argv: str) -> Ran:
        capsys.readouterr()
        code = main.run(argv)
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: of two processes none is left with one of them when the other is done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection() -> None:
    """Modules are imported here, which make little garbage: looking for it took a fifth of their time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True)
def _imported_modules_are_no_garbage() -> None:
    """A trainer collects garbage again and again; looking through all that is imported took a third of its time.

    A worker does the same before it rehearses.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _the_default_dtype_stays() -> Iterator[None]:
    """A test that leaves another behind fails by itself, and not those after it."""
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_default_dtype() is not torch.float32:
        left = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        raise AssertionError(f"the default dtype is {left}")
