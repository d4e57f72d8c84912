"""The loop of ``scripts/zero`` around DeepSpeed's engine, which no trainer drives."""

import pathlib

import pytest
from zero_runs import engine_loop
from zero_runs.engine_loop import BareRun, rehearse_loop
from zero_runs.rows import zero_section

from autotrain_mem.types import Owner, Trace
from autotrain_mem.types.trace import CACHE_EMPTIED
from tests.tiny import tiny_folder

PROCESSES = 4
BUCKET = {"reduce_bucket_size": 4096}


@pytest.mark.parametrize("offloads", [True, False])
def test_a_model_that_was_made_whole_lies_on_the_device_until_it_is_cut(
    offloads: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "STEPS", 1)
    run = BareRun(
        model=tiny_folder(tmp_path, "llama"),
        zero=zero_section(3, offloads=offloads) | BUCKET,
        length=32,
        recomputes=True,
        liger=None,
        processes=PROCESSES,
        attention="flash_attention_3",
        compute_capability=(9, 0),
    )
    trace = rehearse_loop(run)
    weights = {block.module: block for block in trace.blocks if block.owner is Owner.WEIGHTS}
    flat = weights["flat_weights"].size_bytes
    at_once = live_bytes(trace)
    emptied = max(index for index, event in enumerate(trace.events) if event == CACHE_EMPTIED)
    assert max(at_once[:emptied]) > PROCESSES * flat, "the whole model, and the first of the shards"
    assert at_once[emptied] < 0.1 * flat, "shards wait on the host while the cache is emptied"
    moments = [block for block in trace.blocks if block.owner is Owner.OPTIMIZER_STATE and block.size_bytes >= 2 * flat]
    assert len(moments) == (0 if offloads else 3), "the weights that are stepped on, and AdamW's two moments"


def live_bytes(trace: Trace) -> list[int]:
    """What is allocated after each event."""
    live, sums = 0, []
    for event in trace.events:
        if event != CACHE_EMPTIED:
            live += trace.blocks[abs(event) - 1].size_bytes * (1 if event > 0 else -1)
        sums.append(live)
    return sums
