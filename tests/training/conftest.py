"""A tiny model with dropout, and tiny data for every trainer."""

from __future__ import annotations

import pathlib

import pytest


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """GPT-2's own dropout of 0.1 everywhere, two layers."""
    from tiny import tiny_folder

    return tiny_folder(tmp_path_factory.mktemp("gpt2"), "gpt2")


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two layers without dropout, whose random numbers in parts are others than in one go."""
    from tiny import tiny_folder

    return tiny_folder(tmp_path_factory.mktemp("qwen"), "qwen2")
