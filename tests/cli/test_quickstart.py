"""The first run that a newcomer sees: its story holds, with fewer rows and steps than theirs."""

from __future__ import annotations

import re

import pytest

from autotrain_mem.cli import quickstart
from tests.place import Autofit

pytestmark = pytest.mark.slow

ROWS = 300
STEPS = 3
"""TRL's defaults draw the first long one of these rows in their second step, of 600 rows in their 17th."""


@pytest.fixture(scope="module")
def said(autofit_once: Autofit) -> str:
    """What the command prints, its lines joined where a terminal of 80 columns ended them."""
    flags = " ".join(quickstart.FLAGS).replace(f"--max_steps {quickstart.STEPS}", f"--max_steps {STEPS}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "ROWS", ROWS)
        patch.setattr(quickstart, "STEPS", STEPS)
        # without the levels that round
        shorter = flags.replace("--logging_steps 5", "--logging_steps 1 --dtype float32 --optim adamw_torch_fused")
        patch.setattr(quickstart, "FLAGS", shorter.split())
        ran = autofit_once("quickstart", "--folder", "quickstart-tried")
    assert ran.code == 0, ran.err
    return " ".join(ran.out.split())


def test_trls_defaults_do_not_fit_and_run_out_of_memory_in_torchs_words(said: str) -> None:
    assert f"does not fit {quickstart.CARD}: needs" in said
    refused = re.search(
        r"Out of memory during \w+, after step (\d+): (CUDA out of memory\. Tried to allocate .*)", said
    )
    assert refused is not None
    assert 0 < int(refused[1]) < STEPS
    assert f"GPU 0 has a total capacity of {quickstart.CARD.removesuffix('MiB')}.00 MiB" in refused[2]
    assert "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large" in refused[2]


def test_the_plan_fits_and_trains_to_its_end(said: str) -> None:
    plan, _, run = said.partition("4. ")
    assert re.search(rf" fits {quickstart.CARD} with \d changes?: needs", plan)
    assert f"trained {STEPS} steps" in run
    assert "retries" not in run
    loss = re.search(r"loss ([\d.]+) -> ([\d.]+)", run)
    assert loss is not None
    assert float(loss[2]) < float(loss[1])


def test_what_is_reserved_stays_within_the_prediction(said: str) -> None:
    shown = re.search(r"([\d.]+) MiB reserved predicted, ([\d.]+) MiB measured", said)
    assert shown is not None
    assert float(shown[2]) <= float(shown[1])
