"""Tiny models that are only read."""

import pathlib
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def gpt2(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    """GPT-2's own dropout of 0.1 everywhere, two layers."""
    return model_folder("gpt2")


@pytest.fixture(scope="session")
def bart(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    """A decoder whose forward takes ``num_items_in_batch``, and a mean over all of its labels, unshifted."""
    return model_folder("bart")


@pytest.fixture(scope="session")
def qwen(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    """Two layers without dropout, whose random numbers in parts are others than in one go."""
    return model_folder("qwen2")


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """``vision_model("gemma3")``: a tiny model that reads images, made once."""
    from tiny import tiny_vision_folder

    root = tmp_path_factory.mktemp("vision")

    def made(family: str) -> pathlib.Path:
        path = root / family
        return path if path.exists() else tiny_vision_folder(path, family)

    return made
