"""What is said of a probe, in lines that stand in a terminal and in a log."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_examples import CHOSEN, PLAN

from autotrain_mem.report.events import event_line, outcome
from autotrain_mem.spec import OtherProcess, Phase, Probe, codec
from autotrain_mem.spec.report import MemoryReading
from autotrain_mem.units import GIB, MIB

READING = MemoryReading(
    allocated_bytes=GIB,
    peak_allocated_bytes=9 * GIB,
    reserved_bytes=9 * GIB,
    peak_reserved_bytes=10 * GIB,
    num_alloc_retries=0,
)
FITS = Probe(
    knobs=CHOSEN,
    fits=True,
    measured=READING,
    phases={},
    row_tokens=768,
    non_torch_bytes=GIB // 2,
    seconds=41.25,
)
REFUSED = replace(FITS, fits=False, refused="CUDA out of memory.", refused_in=Phase.OPTIMIZER_STEP)


DIED = replace(REFUSED, measured=None, refused_in=None, row_tokens=None)
PRESSED = replace(FITS, fits=False, measured=replace(READING, num_alloc_retries=2))
SAMPLED = replace(FITS, knobs=replace(CHOSEN, max_length=None, max_completion_length=256, num_generations=8))


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        (FITS, "4 x 16 rows of 768 tokens: needs 10.5 GiB of 11.0 GiB, predicted 10.8 GiB"),
        (FITS, "in 41.2 s: fits"),
        (REFUSED, "held 10.5 GiB of 11.0 GiB, predicted 10.8 GiB; out of memory in the optimizer step phase"),
        (DIED, "4 x 16 rows: out of memory: does not fit"),
        (PRESSED, "the cache was given back 2 times to go on: does not fit"),
        (SAMPLED, "4 x 16 completions of 256 tokens on prompts of 768 tokens:"),
    ],
)
def test_a_probe_is_told_in_one_line(probe: Probe, said: str) -> None:
    assert said in outcome(probe, int(10.75 * GIB), 11 * GIB)


OTHERS = (
    OtherProcess(pid=42, name="python", used_bytes=2 * GIB),
    OtherProcess(pid=7, name="", used_bytes=GIB),
    OtherProcess(pid=0, name="", used_bytes=64 * MIB),
)
BEFORE = replace(CHOSEN, per_device_train_batch_size=8, gradient_accumulation_steps=8, gradient_checkpointing=False)
BESIDE = {"event": "probe", "probe": codec.to_json(replace(FITS, others=OTHERS)), "predicted_bytes": 1}


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"event": "step", "step": 1}, ""),
        ({"event": "probing", "knobs": codec.to_json(CHOSEN)}, "probing 4 x 16: "),
        ({**BESIDE, "budget_bytes": 1}, "beside this run: python (42) 2.00 GiB, process (7) 1.00 GiB, others 64.0 MiB"),
        ({"event": "room", "before_bytes": 8 * GIB, "now_bytes": 6 * GIB}, "2.00 GiB of the card were taken"),
        ({"event": "room", "before_bytes": 6 * GIB, "now_bytes": 8 * GIB}, "2.00 GiB of the card were given back"),
        (
            {"event": "replanned", "before": codec.to_json(BEFORE), "plan": codec.to_json(PLAN)},
            "the plan moves to 4 x 16 rows, checkpointing on (from 8 x 8 rows, checkpointing off): needs 8.51 GiB",
        ),
    ],
)
def test_an_event_is_told_in_a_line(event: dict[str, object], said: str) -> None:
    line = event_line(event)
    assert said in line
    assert bool(line) == bool(said)
