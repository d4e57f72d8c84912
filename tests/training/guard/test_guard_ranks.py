"""Under DDP each rank meets a full device by itself, and the gradient of every step is that of the undisturbed one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from guarded import NO_MEANS_OVER_ROWS
from one_of_two_ranks import STEPS

from tests.forked import Forge

TOLERANCE = 1e-5
"""Of fp32 sums in another order, of the largest number in a parameter's gradient; the worst was 9e-7."""
FORWARD, BACKWARD = "forward: split into 2 + 2 rows", "backward: split into 2 + 2 rows"
PAIRS = "split into 2 + 2 pairs"
HOST = "forward: repeated with activations offloaded to the host"
INCIDENTS: dict[str, tuple[list[str], list[str]]] = {
    "sft: nothing": ([], []),
    "sft: backward of the first micro-step": ([BACKWARD], []),
    "sft: both ranks in different places": ([BACKWARD], [FORWARD, "forward: split into 1 + 1 rows", HOST]),
    "sft: between two metrics": ([], [FORWARD]),
    "sft: learned before": ([], []),
    "sft: evaluation": (["evaluate: split into 4 + 4 rows"], []),
    "dpo: adapters that are switched off and on": ([f"forward: {PAIRS}"], [f"backward: {PAIRS}"]),
    "grpo: metrics of many kinds": ([], [FORWARD]),
}


@pytest.fixture(scope="module")
def ranks(qwen: Path, tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> list[dict[str, Any]]:
    folder, here = tmp_path_factory.mktemp("ranks"), Path(__file__).parent
    path = os.pathsep.join((str(here), str(here.parent), os.environ.get("PYTHONPATH", "")))
    forge.two_ranks([here / "one_of_two_ranks.py", qwen, folder], folder / "log", PYTHONPATH=path)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("step", [f"{method}: {name}" for method, steps in STEPS.items() for name, *_ in steps])
def test_a_step_that_one_rank_repeats_is_that_of_the_undisturbed_ranks(step: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[step] for rank in ranks)
    assert max(first["error"], second["error"]) < TOLERANCE
    assert (first["incidents"], second["incidents"]) == INCIDENTS[step]
    for logged, expected in (*first["logged"], *second["logged"]):
        assert logged.keys() == expected.keys()
        for name in [name for name in logged if not any(each in name for each in NO_MEANS_OVER_ROWS)]:
            assert logged[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    if step == "sft: nothing":
        assert [logged for logged, _ in first["logged"]] == [expected for _, expected in first["logged"]]
