"""What PPO's tests build their trainers with."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from ppo_runs import Build, config, trainer

LIBRARIES_LACK = ("deepspeed", "fsdp")
"""Arguments that a config refuses without libraries that are not here: they are put into it."""


@pytest.fixture(scope="session")
def model(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return model_folder("qwen2")


@pytest.fixture
def build(model: pathlib.Path, tmp_path: pathlib.Path) -> Build:
    def build(dataset: Any = None, options: dict[str, Any] | None = None, **changes: Any) -> Any:
        args = config(tmp_path, **{name: changes[name] for name in changes if name not in LIBRARIES_LACK})
        vars(args).update(changes if changes.keys() & LIBRARIES_LACK else {})
        return trainer(model, args, **{"dataset": dataset, **(options or {})})

    return build
