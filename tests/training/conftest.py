"""Tiny models that are only read."""

import pathlib
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def gpt2(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    """GPT-2's own dropout of 0.1 everywhere, two layers."""
    return model_folder("gpt2")


@pytest.fixture(scope="session")
def qwen(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    """Two layers without dropout, whose random numbers in parts are others than in one go."""
    return model_folder("qwen2")
