"""The loop of ``scripts/zero`` around DeepSpeed's engine, which no trainer drives."""

import csv
import json
import pathlib
import re
from collections.abc import Callable

import pytest
from script_runner import Script
from zero_runs import engine_loop
from zero_runs.engine_loop import BareRun, rehearse_loop
from zero_runs.rows import MODEL, Row, zero_section

from autotrain_mem.types import Owner, Trace
from autotrain_mem.types.trace import CACHE_EMPTIED
from tests.tiny import tiny_config, tiny_folder

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


RUN = {
    **{"id": "mle-0", "model": MODEL, "n_gpus": "2", "gpu": "H200-141", "strategy": "zero2", "seq_len": "64"},
    **{"grad_ckpt": "yes", "metric": "reserved", "gib_per_gpu": "99.0"},
    **{"trl_or_transformers_version": "transformers 5.14.1, liger 0.8.0", "notes": "not TRL"},
}


def test_a_public_run_is_judged_as_it_was_made(
    script: Callable[[str], Script], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, runs = script("zero"), tmp_path / "runs.csv"
    monkeypatch.setattr(engine_loop, "STEPS", 1)
    monkeypatch.setattr(zero.names, "STAGES", ())
    monkeypatch.setattr(zero.names, "estimated", lambda *_, liger, **__: (99.0 if liger else 0.0, 1.0))
    (tmp_path / MODEL).mkdir(parents=True)
    (tmp_path / MODEL / "config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    with runs.open("w", newline="") as file:
        table = csv.DictWriter(file, [*RUN])
        table.writeheader()
        table.writerows([RUN, RUN | {"metric": "allocated"}, RUN | {"model": "another"}, RUN | {"strategy": "fsdp2"}])
    ran = zero.run("--models", tmp_path, "--runs", runs)
    assert ran.code == 1, "a tiny model is far from what was measured, though through TRL it would not be"
    assert re.fullmatch(
        r"run  mle-0 +zero2 .* 64 tokens .* / +99\.0 GiB -9.*%  \(through TRL +99\.0, \+0\.0%\)\n", ran.out
    )


@pytest.mark.parametrize(
    ("changed", "liger"),
    [({}, "0.8.0"), ({"notes": "Liger no; ZeRO-2"}, None), ({"trl_or_transformers_version": ""}, None)],
)
def test_a_run_had_liger_unless_its_notes_say_not(changed: dict[str, str], liger: str | None) -> None:
    assert Row(RUN | changed).liger == liger


def live_bytes(trace: Trace) -> list[int]:
    """What is allocated after each event."""
    live, sums = 0, []
    for event in trace.events:
        if event != CACHE_EMPTIED:
            live += trace.blocks[abs(event) - 1].size_bytes * (1 if event > 0 else -1)
        sums.append(live)
    return sums
