"""A report that is made up: a rehearsal of a large model, event by event, and what a run of it would have measured."""

import heapq
import math
import random
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from typing import Any

from autotrain_mem.report.page.content import page_of
from autotrain_mem.support import codec
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import DataProfile, Holder, Material, Owner, Page, Phase, Timeline
from autotrain_mem.types.experience import PhasePeak, RunHistory, RunMarker, StepReading
from tests.report.report_examples import MEASURED, PLAN, REPORT

OWNERS = tuple(owner for owner in Owner)
LAYERS = 80
HOSTILE = (
    "</script><img src=x onerror=document.title='injected'><!--\u2028\u2029\x01 \"var(--x)\" 'single' `tick` ${1}&amp;"
)

PHASES = (Phase.LOAD, *(Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP) * 2)
STARTS = (0.0, 0.1, 0.25, 0.5, 0.55, 0.7, 0.95)
"""Of each phase, as a share of the events."""


def timeline(events: int = 4000, *, places: int = 3000) -> Timeline:
    """LoRA on a large model, at about ``places`` moments; nearly every one has other sizes than the one before."""
    source, points = random.Random(0), range(0, events, max(1, events // places))
    moments, holders = [], []
    for point in points:
        number = bisect_right(STARTS, point / events)
        begin, end = (*STARTS, 1.0)[number - 1 : number + 1]
        phase, progress = PHASES[number - 1], (point / events - begin) / (end - begin)
        alive = {Phase.FORWARD: progress, Phase.BACKWARD: 1 - progress}.get(phase, 0.0)
        trains = phase is not Phase.LOAD
        sizes = dict.fromkeys(OWNERS, 0) | {
            Owner.WEIGHTS: int(36 * GIB * (1 if trains else progress)),
            Owner.ACTIVATIONS: int(12 * GIB * alive) + source.randrange(MIB) * trains,
            Owner.GATHERED_WEIGHTS: 900 * MIB * (phase is Phase.BACKWARD),
            Owner.GRADIENTS: int(800 * MIB * (1 - alive)) * trains,
            Owner.OPTIMIZER_STATE: GIB * (number > 3),
            Owner.TEMPORARY: source.choice((8, 32, 56, 112, 224, 600)) * MIB * trains,
            Owner.OTHER: 90 * MIB * (alive > 0),
        }
        moments.append(sizes)
        largest = heapq.nlargest(3, ((size, OWNERS.index(owner)) for owner, size in sizes.items() if size))
        layer = int(progress * LAYERS) % LAYERS
        holders.append(tuple(Holder(module=layer, owner=at, size_bytes=size) for size, at in largest))
    totals = [sum(sizes.values()) for sizes in moments]
    return Timeline(
        name="rehearsed step",
        events=events,
        event=tuple(points),
        owners={owner: tuple(sizes[owner] for sizes in moments) for owner in OWNERS},
        reserved_bytes=tuple(int(1.04 * most) for most in accumulate(totals, max)),
        holders=tuple(holders),
        modules=tuple(f"model.layers.{layer}.mlp" for layer in range(LAYERS)),
        phases=tuple((phase, int(begin * events)) for phase, begin in zip(PHASES, STARTS, strict=True)),
        peak=totals.index(max(totals)),
        budget_bytes=int(max(totals) * 1.12),
    )


def history(moments: int = 240) -> RunHistory:
    kinds = {"out of memory": "split 8 rows into 2 x 4", "checkpoint": "written in 3.1 s", "restart": "from step 120"}
    places = (moments // 3, moments // 2, 2 * moments // 3)
    readings = [
        StepReading(
            seconds=round(step * 7.3, 1),
            step=step,
            device=replace(MEASURED, reserved_bytes=MEASURED.reserved_bytes + step * MIB),
            tokens_per_second=1200 + 300 * math.sin(step / 9),
            logs={"loss": 2.4 * math.exp(-step / 90) + 0.9 + 0.08 * math.sin(step * 1.7)},
        )
        for step in range(moments)
    ]
    happened = [
        RunMarker(seconds=readings[step].seconds, step=step, kind=kind, text=words)
        for step, (kind, words) in zip(places, kinds.items(), strict=True)
    ]
    peaks = {
        phase: PhasePeak(allocated_bytes=size + 9 * MIB, reserved_bytes=size)
        for phase, size in PLAN.estimate.memory.phases.items()
    }
    return RunHistory(
        began=0.0,
        last=readings[-1].seconds,
        total_steps=moments,
        total_bytes=None,
        predicted_bytes={},
        phases=peaks,
        ranks=(tuple(readings),),
        happenings=tuple(happened),
        ending="finished",
    )


def page(rehearsed: Timeline | None = None) -> Page:
    """Of a run that has ended, with a figure of every kind."""
    material = Material(
        plan=PLAN,
        command=f"autofit sft --model {PLAN.model} --dataset gsm8k.jsonl --output_dir out",
        made="2026-11-24T10:15:00+00:00",
        timeline=rehearsed or timeline(),
        report=REPORT,
        history=history(),
        profile=DataProfile(rows_by_length={length: 4097 - length for length in range(64, 4097, 64)}),
        not_shown=("The run has no evaluation; --eval_strategy steps adds its losses.",),
    )
    return page_of(material)


OWN = {"schema", "key", "unit", "made", "x_title", "key_figures"}


def hostile_page() -> Page:
    """Every other text would like to be markup."""
    rehearsed = timeline(300)
    rehearsed = replace(rehearsed, modules=(HOSTILE,) * len(rehearsed.modules))
    return codec.from_json(Page, _hostile(codec.to_json(page(rehearsed))))


def _hostile(value: Any, name: str = "") -> Any:
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, dict) and "held" not in value:  # the timeline's other words are our own
        more = HOSTILE if name in ("limits", "verticals") else ""
        return {key + more: each if key in OWN else _hostile(each, key) for key, each in value.items()}
    return [_hostile(each) for each in value] if isinstance(value, list) else value
