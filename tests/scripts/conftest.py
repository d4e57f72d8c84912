"""Scripts are no package: their folder is searched as it is when one of them runs. Here they run in this process."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import io
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

TESTS = pathlib.Path(__file__).parents[1]
SCRIPTS = TESTS.parent / "scripts"

sys.path.insert(0, str(SCRIPTS))
sys.path.append(str(TESTS / "planner"))  # synthetic_memory: a predictor without rehearsals
sys.path.append(str(TESTS / "allocator"))  # real_allocator: events played through our simulator

from recorded_run import Cuda  # noqa: E402


@dataclass(frozen=True, slots=True)
class Ran:
    """How a script ended."""

    code: int
    out: str


class Script:
    """A script, and its names for those who replace some of them."""

    def __init__(self, name: str) -> None:
        loader = importlib.machinery.SourceFileLoader(f"script_{name}", str(SCRIPTS / name))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        self.names: Any = importlib.util.module_from_spec(spec)
        sys.modules[loader.name] = self.names  # dataclasses look for theirs
        loader.exec_module(self.names)

    def run(self, *arguments: object) -> Ran:
        """``scripts/NAME ARGUMENTS``."""
        code: Any = 0
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            patch.setattr(sys, "argv", [self.names.__file__, *map(str, arguments)])
            try:
                self.names.main()
            except SystemExit as end:
                code = end.code or 0
        assert isinstance(code, int), code
        return Ran(int(code), out.getvalue())


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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """``torch.cuda`` answers as if a card were there."""
    cuda = Cuda()
    cuda.replace(monkeypatch)
    return cuda
