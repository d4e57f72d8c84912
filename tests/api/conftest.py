"""The verbs of Python, in the folder ``place``."""

import shutil
from pathlib import Path

import pytest

MODEL = "Qwen/Qwen2.5-0.5B"


@pytest.fixture(scope="session", autouse=True)
def _model(place: Path) -> None:
    """A hub id for whoever reads the documentation, and here a folder with a tiny model of that architecture."""
    shutil.copytree(place / "tiny", place / MODEL)
