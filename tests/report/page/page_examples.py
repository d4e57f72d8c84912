"""A report that is made up: a rehearsal of a large model, event by event, and what a run of it would have measured."""

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate

from autotrain_mem.report.page.figures import bar_figure, line_figure, timeline_figure
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types.experience import RunMarker
from autotrain_mem.types.page import Holder, Page, Section, Timeline
from autotrain_mem.types.trace import Owner
from autotrain_mem.types.work import Phase

OWNERS = tuple(owner for owner in Owner)
LAYERS = 80
HOSTILE = (
    "</script><img src=x onerror=document.title='injected'><!--\u2028\u2029\x01 \"var(--x)\" 'single' `tick` ${1}&amp;"
)


PHASES = (
    (Phase.LOAD, 0.0),
    (Phase.FORWARD, 0.1),
    (Phase.BACKWARD, 0.25),
    (Phase.OPTIMIZER_STEP, 0.5),
    (Phase.FORWARD, 0.55),
    (Phase.BACKWARD, 0.7),
    (Phase.OPTIMIZER_STEP, 0.95),
)
"""Two optimizer steps, each phase with the share of the events at which it begins."""


def timeline(events: int = 4000, name: str = "rehearsed step", *, places: int = 3000, seed: int = 0) -> Timeline:
    """LoRA on a large model, at about ``places`` moments; nearly every one has other sizes than the one before."""
    source, ends = random.Random(seed), [*(begin for _, begin in PHASES[1:]), 1.0]
    points = range(0, events, max(1, events // places))
    moments, holders = [], []
    for point in points:
        number = next(at for at, end in enumerate(ends) if point / events < end)
        (phase, begin), end = PHASES[number], ends[number]
        progress = (point / events - begin) / (end - begin)
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
        name=name,
        events=events,
        event=tuple(points),
        owners={owner: tuple(sizes[owner] for sizes in moments) for owner in OWNERS},
        reserved_bytes=tuple(int(1.04 * most) for most in accumulate(totals, max)),
        holders=tuple(holders),
        modules=tuple(f"model.layers.{layer}.mlp" for layer in range(LAYERS)),
        phases=tuple((phase, int(begin * events)) for phase, begin in PHASES),
        peak=totals.index(max(totals)),
        budget_bytes=int(max(totals) * 1.12),
    )


def line_figures(moments: int = 240, text: str = "") -> Iterator[Section]:
    seconds = [round(index * 7.3, 1) for index in range(moments)]
    loss = [2.4 * math.exp(-index / 90) + 0.9 + 0.08 * math.sin(index * 1.7) for index in range(moments)]
    rest = [0.4 * math.sin(index / 9) for index in range(moments)]
    kinds = {"out of memory": "split 8 rows into 2 x 4", "checkpoint": "written in 3.1 s", "restart": "from step 120"}
    happened = [
        RunMarker(seconds=seconds[step], step=step, kind=kind + text, text=words + text)
        for step, (kind, words) in zip((moments // 3, moments // 2, 2 * moments // 3), kinds.items(), strict=True)
    ]
    over_time = partial(line_figure, axis=f"seconds{text}", x=seconds)
    evaluated = [value + 0.1 if index % 40 == 39 else None for index, value in enumerate(loss)]
    losses, at = {f"training{text}": loss, "evaluation": evaluated}, {text or "target": 1.0}
    yield over_time(f"loss{text}", f"Loss{text}", lines=losses, y_title=f"loss{text}", happened=happened, limits=at)
    of_run = {name: [int((size + each) * GIB) for each in rest] for name, size in (("reserved", 38), ("allocated", 35))}
    limits = {"budget": 43.2 * GIB, "predicted": 38.9 * GIB}
    yield over_time("memory", "Memory of the run", lines=of_run, y_title="bytes", unit="bytes", limits=limits)
    speeds = {"tokens per second": [5200 + 300 * each for each in rest]}
    yield over_time("speed", "Speed", lines=speeds, y_title="tokens/s", unit="tokens/s")
    lengths = range(0, 4097, 64)
    shares = {"rows": [100 * (1 - math.exp(-length / 700)) for length in lengths]}
    limit = {f"max_length 2048{text}": 2048.0}
    title, share = "Lengths of the rows", "share of the rows, in %"
    yield line_figure("lengths", title, "tokens", lengths, shares, y_title=share, unit="%", verticals=limit, steps=True)


def bars(text: str = "") -> Section:
    measured = {"predicted": (31, 38.9, 29, 24), "probe": (30.8, 38.7, 29.2, None), "run": (31.1, 39.2, 29, 24.4)}
    sizes = {name: [None if value is None else value * GIB for value in values] for name, values in measured.items()}
    phases = [f"{name}{text}" for name in ("forward", "backward", "optimizer step", "evaluate")]
    return bar_figure("phases", f"Predicted and measured{text}", phases, sizes, "bytes", {"budget": 43.2 * GIB})


TABLES = (
    Section(
        key="attempts",
        title="What was tried",
        note="Least harm comes first; the first that fits is taken.",
        columns=("What changes", "Batch", "max_length", "Needs", "Fits"),
        rows=(
            ("nothing", "8", "4,096", "96.4 GiB", "no"),
            ("gradient checkpointing, smaller batch", "1", "4,096", "38.9 GiB", "yes"),
        ),
        right=(1, 2, 3),
        strong=(1,),
    ),
    Section(
        key="cards",
        title="Cards and prices",
        note="",
        columns=("Card", "Budget", "Needs", "Speed", "Time", "Price", "Interconnect", "Ranks", "Verdict"),
        rows=(("a card with a name", "43.2 GiB", "38.9 GiB", "5,210", "11.2 h", "19.40 USD", "NVLink", "1", "fits"),)
        * 3,
        right=(1, 2, 3, 4, 5, 7),
    ),
)


def page(rehearsed: Timeline | None = None, text: str = "") -> Page:
    """A page with a figure and a table of each kind; ``text`` stands in every text that comes from elsewhere."""
    sections = [timeline_figure(rehearsed or timeline()), *line_figures(), bars(), *TABLES]
    return Page(
        title=f"meta-llama/Llama-3.1-70B{text}, sft, on h100",
        verdict=f"fits h100 with 3 changes: needs 38.9 GiB of 43.2 GiB{text}",
        fits=True,
        command="autofit sft --model_name_or_path meta-llama/Llama-3.1-70B --dataset_name trl-lib/Capybara --gpu h100 "
        f"--max_length 4096 --output_dir out{text}",
        made="2026-11-24T10:15:00+00:00",
        versions={"autotrain_mem": "0.1.0", "torch": "2.13.0", "trl": f"1.12.0{text}"}
        | {"transformers": "5.23.0", "peft": "0.21.2"},
        how_to_read=(
            "The first figure shows the memory of two rehearsed optimizer steps, stacked by who holds it.",
            "What torch reserves must stay below the budget; the panel names the largest holders under the cursor.",
            "Below it, what was predicted stands beside what was measured, and every attempt with what it needs.",
        ),
        key_figures=(
            ("peak reserved", "38.9 GiB", "of 43.2 GiB"),
            ("peak allocated", "37.6 GiB", "in backward"),
            ("speed", "5,210 tokens/s", "predicted"),
            ("time", "11.2 h", "for 3 epochs"),
            ("trained", "0.83 B", f"of 70.6 B parameters{text}"),
        ),
        sections=tuple(sections),
        not_shown=("The run has no evaluation; --eval_strategy steps adds its losses.",),
    )


def hostile_page() -> Page:
    """Every name that comes from a model, a dataset or a log would like to be markup."""
    one = replace(timeline(300, HOSTILE), modules=tuple(HOSTILE for _ in timeline(300).modules))
    table = replace(TABLES[0], title=HOSTILE, note=HOSTILE, rows=((HOSTILE,) * 5,), strong=())
    sections = [timeline_figure(one), *line_figures(text=HOSTILE), bars(HOSTILE), table]
    return replace(page(text=HOSTILE), sections=tuple(sections), not_shown=(HOSTILE,))
