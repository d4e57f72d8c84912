import pathlib
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def model(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return model_folder("qwen2")
