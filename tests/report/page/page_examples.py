"""A report that is made up: a rehearsal of a large model, event by event, and what a run of it would have measured."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from autotrain_mem.report.page.content import with_unique_keys
from autotrain_mem.report.page.figures import bar_figure, line_figure, timeline_figure
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types.experience import Happening
from autotrain_mem.types.page import Holder, Page, Section, Timeline
from autotrain_mem.types.trace import Owner
from autotrain_mem.types.work import Phase

OWNERS = tuple(owner for owner in Owner)
LAYERS = 80
HOSTILE = (
    "</script><img src=x onerror=document.title='injected'><!-- \u2028\u2029 \"quoted\" 'single' `tick` ${1} &amp;"
)


@dataclass
class Device:
    """What lies on it: bytes by owner and module, and how it came there, moment by moment."""

    blocks: dict[tuple[Owner, str], int] = field(default_factory=dict)
    reserved: int = 0
    moments: list[tuple[dict[Owner, int], int, tuple[tuple[str, Owner, int], ...]]] = field(default_factory=list)
    sums: dict[Owner, int] = field(default_factory=lambda: dict.fromkeys(OWNERS, 0))
    phases: list[tuple[Phase, int]] = field(default_factory=list)
    largest: tuple[tuple[str, Owner, int], ...] = ()

    def hold(self, owner: Owner, module: str, size: int) -> None:
        before = self.blocks.get((owner, module), 0)
        self.sums[owner] += size
        self.blocks[owner, module] = before + size
        self.reserved = max(self.reserved, int(sum(self.sums.values()) * 1.04))
        if size < 0 or not self.largest or before + size > self.largest[-1][2]:
            order = sorted(self.blocks.items(), key=lambda item: -item[1])[:3]
            self.largest = tuple((name, whose, held) for (whose, name), held in order if held > 0)
        self.moments.append((dict(self.sums), self.reserved, self.largest))

    def begin(self, phase: Phase) -> None:
        self.phases.append((phase, len(self.moments)))


def rehearsal(events: int, layers: int = LAYERS, seed: int = 0) -> Device:
    """Two optimizer steps of LoRA, each of two micro-batches, in about ``events`` events."""
    device, source = Device(), random.Random(seed)
    device.begin(Phase.LOAD)
    device.hold(Owner.WEIGHTS, "model.embed_tokens", 2 * GIB)
    for layer in range(layers):
        device.hold(Owner.WEIGHTS, f"model.layers.{layer}.mlp", 440 * MIB)
    per_layer = max(4, (events - layers) // (layers * 12))
    for _ in range(2):
        for _ in range(2):
            micro_batch(device, layers, per_layer, source)
        device.begin(Phase.OPTIMIZER_STEP)
        for layer in range(layers):
            device.hold(Owner.OPTIMIZER_STATE, f"model.layers.{layer}.mlp.lora_A", 20 * MIB if layer % 2 else 0)
            device.hold(Owner.TEMPORARY, "optimizer", 30 * MIB)
            device.hold(Owner.TEMPORARY, "optimizer", -30 * MIB)
        freed = device.sums[Owner.GRADIENTS]
        for layer in range(layers):
            device.hold(Owner.GRADIENTS, f"model.layers.{layer}.mlp.lora_A", -freed // layers)
    return device


def micro_batch(device: Device, layers: int, per_layer: int, source: random.Random) -> None:
    device.begin(Phase.FORWARD)
    device.hold(Owner.OTHER, "batch", 90 * MIB)
    for layer in range(layers):
        device.hold(Owner.ACTIVATIONS, f"model.layers.{layer}", 128 * MIB)
        flutter(device, f"model.layers.{layer}.self_attn.q_proj", per_layer, source)
    device.hold(Owner.ACTIVATIONS, "lm_head", 3 * GIB)
    device.begin(Phase.BACKWARD)
    device.hold(Owner.TEMPORARY, "lm_head", 6 * GIB)
    device.hold(Owner.TEMPORARY, "lm_head", -6 * GIB)
    device.hold(Owner.ACTIVATIONS, "lm_head", -3 * GIB)
    for layer in reversed(range(layers)):
        device.hold(Owner.GATHERED_WEIGHTS, f"model.layers.{layer}", 900 * MIB)
        flutter(device, f"model.layers.{layer}.mlp.down_proj", 2 * per_layer, source)
        device.hold(Owner.GRADIENTS, f"model.layers.{layer}.mlp.lora_A", 10 * MIB)
        device.hold(Owner.GATHERED_WEIGHTS, f"model.layers.{layer}", -900 * MIB)
        device.hold(Owner.ACTIVATIONS, f"model.layers.{layer}", -128 * MIB)
    device.hold(Owner.OTHER, "batch", -90 * MIB)


def flutter(device: Device, module: str, events: int, source: random.Random) -> None:
    for _ in range(events // 2):
        size = source.choice((8, 32, 56, 112, 224, 600)) * MIB
        device.hold(Owner.TEMPORARY, module, size)
        device.hold(Owner.TEMPORARY, module, -size)


def thinned(totals: list[int], places: int) -> Iterator[int]:
    """The lowest and the highest moment of each stretch, in their order."""
    step = max(1, math.ceil(len(totals) / places))
    for first in range(0, len(totals), step):
        stretch = range(first, min(first + step, len(totals)))
        yield from sorted({min(stretch, key=totals.__getitem__), max(stretch, key=totals.__getitem__)})


def timeline(
    events: int = 4000, name: str = "rehearsed step", *, places: int = 1500, layers: int = 12, seed: int = 0
) -> Timeline:
    device = rehearsal(events, layers, seed)
    totals = [sum(sums.values()) for sums, _, _ in device.moments]
    points = [*thinned(totals, places)]
    modules: dict[str, int] = {}
    number = {owner: index for index, owner in enumerate(OWNERS)}
    return Timeline(
        name=name,
        events=len(totals),
        event=tuple(points),
        owners={owner: tuple(device.moments[point][0][owner] for point in points) for owner in OWNERS},
        reserved_bytes=tuple(device.moments[point][1] for point in points),
        holders=tuple(
            tuple(
                Holder(module=modules.setdefault(module, len(modules)), owner=number[owner], size_bytes=size)
                for module, owner, size in device.moments[point][2]
            )
            for point in points
        ),
        modules=tuple(modules),
        phases=tuple(device.phases),
        peak=max(range(len(points)), key=lambda index: totals[points[index]]),
        budget_bytes=int(max(totals) * 1.12),
    )


def line_figures(moments: int = 240, text: str = "") -> Iterator[Section]:
    seconds = [round(index * 7.3, 1) for index in range(moments)]
    loss = [2.4 * math.exp(-index / 90) + 0.9 + 0.08 * math.sin(index * 1.7) for index in range(moments)]
    rest = [0.4 * math.sin(index / 9) for index in range(moments)]
    happened = [
        Happening(seconds=seconds[step], step=step, kind=kind + text, text=words + text)
        for step, kind, words in (
            (moments // 3, "out of memory", "split 8 rows into 2 x 4, in backward"),
            (moments // 2, "checkpoint", "written in 3.1 s"),
            (2 * moments // 3, "restart", "resumed from step 120"),
        )
    ]
    over_time = partial(line_figure, axis=f"seconds{text}", x=seconds)
    evaluated = [value + 0.1 if index % 40 == 39 else None for index, value in enumerate(loss)]
    losses = {f"training{text}": loss, "evaluation": evaluated}
    at = {text or "target": 1.0}
    yield over_time(f"loss{text}", f"Loss{text}", lines=losses, y_title=f"loss{text}", happened=happened, limits=at)
    of_run = {
        "reserved": [int((38 + each) * GIB) for each in rest],
        "allocated": [int((35 + each) * GIB) for each in rest],
    }
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


_REST = ("11.2 h", "19.40 USD", "NVLink", "1", "fits")
TABLES = (
    Section(
        key="attempts",
        title="What was tried",
        note="Least harm comes first; the first that fits is taken.",
        columns=("What changes", "Batch", "max_length", "Needs", "Fits"),
        rows=(
            ("nothing", "8", "4,096", "96.4 GiB", "no"),
            ("gradient checkpointing", "8", "4,096", "61.0 GiB", "no"),
            ("gradient checkpointing, smaller batch", "1", "4,096", "38.9 GiB", "yes"),
        ),
        right=(1, 2, 3),
        strong=(2,),
    ),
    Section(
        key="cards",
        title="Cards and prices",
        note="",
        columns=("Card", "Budget", "Needs", "Speed", "Time", "Price", "Interconnect", "Ranks", "Verdict"),
        rows=tuple(
            (f"card-{index} with a rather long name", "43.2 GiB", "38.9 GiB", "5,210 tokens/s", *_REST)
            for index in range(6)
        ),
        right=(1, 2, 3, 4, 5, 7),
    ),
)


def page(*timelines: Timeline, text: str = "") -> Page:
    """A page with a figure and a table of each kind; ``text`` stands in every text that comes from elsewhere."""
    sections = [*map(timeline_figure, timelines or (timeline(),)), *line_figures(), bars(), *TABLES]
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
        sections=tuple(with_unique_keys(sections)),
        not_shown=("The run has no evaluation; --eval_strategy steps adds its losses.",),
    )


def hostile_page() -> Page:
    """Every name that comes from a model, a dataset or a log would like to be markup."""
    one = replace(timeline(300, HOSTILE), modules=tuple(HOSTILE for _ in timeline(300).modules))
    table = replace(TABLES[0], title=HOSTILE, note=HOSTILE, rows=((HOSTILE,) * 5,), strong=())
    sections = [timeline_figure(one), *line_figures(text=HOSTILE), bars(HOSTILE), table]
    return replace(page(text=HOSTILE), sections=tuple(with_unique_keys(sections)), not_shown=(HOSTILE,))
