"""Tiny models, each made once for all tests that want it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
from tiny import tiny_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """``model_folder("llama")``: a folder that is only to be read."""
    root = tmp_path_factory.mktemp("models")

    def made(family: str) -> pathlib.Path:
        path = root / family
        return path if path.exists() else tiny_folder(path, family)

    return made
