"""Under DDP each rank meets a full device by itself, and the gradient of every step is that of the undisturbed one."""

import os
from pathlib import Path

import pytest

from tests.forked import Forge


@pytest.mark.slow
def test_steps_that_one_rank_repeats_are_those_of_the_undisturbed_ranks(
    qwen: Path, tmp_path: Path, forge: Forge
) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join((str(here), str(here.parent), os.environ.get("PYTHONPATH", "")))
    forge.two_ranks([here / "one_of_two_ranks.py", qwen, tmp_path], tmp_path / "log", PYTHONPATH=path)
