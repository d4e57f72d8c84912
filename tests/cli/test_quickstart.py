"""The first run that a newcomer sees: its story holds, with fewer rows and steps than theirs."""

import re
from dataclasses import replace
from typing import Any

import pytest

from autotrain_mem import api
from autotrain_mem.cli import quickstart
from autotrain_mem.types import Plan
from tests.place import Autofit

pytestmark = pytest.mark.slow

ROWS = 300
STEPS = 3
"""TRL's defaults draw the first long one of these rows in their second step, of 600 rows in their 17th."""


def with_pins(rehearsals: api.Rehearsals, *reports: Any, plan: Any = api.plan, **options: Any) -> Plan:
    """A search that has nothing to choose; the tutorial's test has a real one on this card."""
    forbid = frozenset({"activation_offloading", "optimizer_offload"})
    pins = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": True}
    job = rehearsals.job
    job = replace(job, fit="lossless", forbid=forbid, arguments={**job.arguments, **pins})
    return plan(replace(rehearsals, job=job), *reports, **options)  # type: ignore[no-any-return]


def test_trls_defaults_run_out_of_memory_and_the_plan_fits_and_learns_as_predicted(
    autofit_once: Autofit, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = " ".join(quickstart.FLAGS).replace(f"--max_steps {quickstart.STEPS}", f"--max_steps {STEPS}")
    # without the levels that round
    shorter = flags.replace("--logging_steps 5", "--logging_steps 1 --dtype float32 --optim adamw_torch_fused")
    for name, value in {"ROWS": ROWS, "STEPS": STEPS, "FLAGS": shorter.split()}.items():
        monkeypatch.setattr(quickstart, name, value)
    monkeypatch.setattr(api, "plan", with_pins)
    ran = autofit_once("quickstart", "--folder", "quickstart-tried")
    assert ran.code == 0, ran.err
    said = " ".join(ran.out.split())  # lines joined where a terminal of 80 columns ended them
    assert f"does not fit {quickstart.CARD}: needs" in said
    refused = re.search(
        r"Out of memory during \w+, after step (\d+): (CUDA out of memory\. Tried to allocate .*)", said
    )
    assert refused is not None
    assert 0 < int(refused[1]) < STEPS
    assert f"GPU 0 has a total capacity of {quickstart.CARD.removesuffix('MiB')}.00 MiB" in refused[2]
    assert "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large" in refused[2]
    plan, _, run = said.partition("4. ")
    assert f" fits {quickstart.CARD}" in plan
    assert f"trained {STEPS} steps" in run
    assert "retries" not in run
    loss = re.search(r"loss ([\d.]+) -> ([\d.]+)", run)
    shown = re.search(r"([\d.]+) MiB reserved predicted, ([\d.]+) MiB measured", said)
    assert loss is not None
    assert shown is not None
    assert float(loss[2]) < float(loss[1])
    assert float(shown[2]) <= float(shown[1])
