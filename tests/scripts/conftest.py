"""Scripts are no package: their folder is searched as it is when one of them runs. Here they run in this process."""

import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest

TESTS = pathlib.Path(__file__).parents[1]

sys.path.insert(0, str(TESTS.parent / "scripts"))
sys.path.append(str(TESTS / "search"))  # synthetic_memory: a predictor without rehearsals

import bench  # noqa: E402, F401  # it adds the other folders
from script_runner import Script  # noqa: E402


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Script]]:
    """Loads a script by its name. What it changes of the process is undone."""
    import torch

    environment, folder, path = dict(os.environ), os.getcwd(), list(sys.path)
    yield Script
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    logging.disable(logging.NOTSET)
    torch.backends.cuda.enable_cudnn_sdp(True)
