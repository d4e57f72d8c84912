"""Shared by all tests: no network, one thread, no telemetry, and nothing of the user's own cache."""

import gc
import os
import pathlib
from collections.abc import Callable, Iterator

import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    CUDA_VISIBLE_DEVICES="",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    AUTOFIT_CACHE="",
)


from tests.forked import Forge


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Forks child processes for whoever asks: ``with forge.children():``."""
    forge = Forge(tmp_path_factory.mktemp("forge"))
    yield forge
    forge.end()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """``model_folder("llama")``: a tiny model that is only to be read, made once for all tests that want it."""
    from tiny import tiny_folder

    root = tmp_path_factory.mktemp("models")

    def made(family: str) -> pathlib.Path:
        path = root / family
        return path if path.exists() else tiny_folder(path, family)

    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: of two processes none is left with one of them when the other is done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _imported_modules_are_no_garbage() -> None:
    """A trainer collects garbage again and again; looking through all that is imported took a third of its time.

    A worker does the same before it rehearses.
    """
    gc.collect()
    gc.freeze()
