"""What is said of a probe, in lines that stand in a terminal and in a log."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_examples import CHOSEN, PLAN

from autotrain_mem.report.events import event_line, free_line, others_line, probe_line
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
    assert said in probe_line(probe, int(10.75 * GIB), 11 * GIB)


def test_others_on_the_card_are_named() -> None:
    others = (OtherProcess(pid=42, name="python", used_bytes=2 * GIB), OtherProcess(pid=7, name="", used_bytes=GIB))
    nobody = OtherProcess(pid=0, name="", used_bytes=64 * MIB)
    assert others_line((*others, nobody)) == (
        "on the card beside this run: python (42) 2.00 GiB, process (7) 1.00 GiB, others 64.0 MiB"
    )
    assert others_line(()) == ""
    event = {
        "event": "probe",
        "probe": codec.to_json(replace(FITS, others=others)),
        "predicted_bytes": 1,
        "budget_bytes": 1,
    }
    assert event_line(event).splitlines()[1].startswith("on the card beside this run: python (42)")


def test_who_came_or_went_is_told() -> None:
    assert free_line(8 * GIB, 6 * GIB) == ("2.00 GiB of the card were taken since the plan was made: 6.00 GiB are free")
    assert "were given back" in free_line(6 * GIB, 8 * GIB)
    assert event_line({"event": "room", "before_bytes": 8 * GIB, "now_bytes": 6 * GIB}) == free_line(8 * GIB, 6 * GIB)


def test_a_plan_that_moves_is_told_by_what_differs() -> None:
    before = replace(CHOSEN, per_device_train_batch_size=8, gradient_accumulation_steps=8, gradient_checkpointing=False)
    said = event_line({"event": "replanned", "before": codec.to_json(before), "plan": codec.to_json(PLAN)})
    assert said.startswith(
        "the plan moves to 4 x 16 rows, checkpointing on (from 8 x 8 rows, checkpointing off): needs "
    )
    assert said.endswith(", by what was measured")


def test_other_events_are_nothing_to_say() -> None:
    assert event_line({"event": "step", "step": 1}) == ""
    assert event_line({"event": "probing", "knobs": codec.to_json(CHOSEN)}) == (
        "probing 4 x 16: two real steps on the longest rows, in a process of their own"
    )
