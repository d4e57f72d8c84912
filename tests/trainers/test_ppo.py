"""The door to PPO, on a TRL that has it and on one that has not."""

import importlib.util
import subprocess
import sys

import pytest

from autotrain_mem.support.errors import MissingExtraError
from autotrain_mem.trainers import ppo


def test_a_trl_without_ppo_is_told_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for get in (ppo.ppo_trainer_class, ppo.ppo_config_class):
        with pytest.raises(MissingExtraError, match=r"trl 1\.12") as caught:
            get()
        assert "autotrain_mem[ppo]" in caught.value.hint


def test_the_door_itself_loads_no_trl() -> None:
    code = "import autotrain_mem.trainers.ppo, sys; assert not {'trl', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
