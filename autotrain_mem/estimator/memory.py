"""Finds the peaks of a trace and the owners of the memory, also over the course of the run."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import fields
from itertools import islice

from autotrain_mem.allocator.blocks import round_size
from autotrain_mem.estimator.decode_steps import NOT_DERIVED, skipped_steps
from autotrain_mem.estimator.replay import DeviceCapacity, allocated_after_each, held_after_each, reserve
from autotrain_mem.types import CACHE_EMPTIED, Block, MemoryEstimate, Owner, Phase, ReservedByMode, Trace
from autotrain_mem.types.page import Holder, Timeline
from autotrain_mem.types.trace import RunFacts

LARGEST_MODULES = 10


def estimate_memory(trace: Trace, room: DeviceCapacity) -> MemoryEstimate:
    """Finds the allocated and reserved peaks of a recorded run, the latter in both modes of the allocator.

    Raises ValueError for a trace without events.
    """
    if not trace.events:
        raise ValueError("the trace is empty: nothing was allocated while the trainer was rehearsed")
    current = peak_bytes = peak_event = 0
    peak_phase = Phase.LOAD
    phases: dict[Phase, int] = {}
    # A phase starts with the bytes that the previous phase left.
    for index, (phase, sign, block) in enumerate(trace.walk()):
        before = current
        current += sign * round_size(block.size_bytes)
        phases[phase] = max(phases.get(phase, before), current)
        if current > peak_bytes:
            peak_bytes, peak_event, peak_phase = current, index, phase
    if trace.phase_starts:
        phases.setdefault(trace.phase_starts[-1][1], current)
    until_peak = islice(filter(None, trace.events), peak_event + 1)
    at_peak = [trace.blocks[number - 1] for number in alive_after(until_peak)]
    facts = {each.name: getattr(trace, each.name) for each in fields(RunFacts)}
    try:
        skipped_steps(trace)
    except ValueError:
        facts["not_counted"] = (*trace.not_counted, NOT_DERIVED)
    return MemoryEstimate(
        peak_allocated_bytes=peak_bytes,
        peak_phase=peak_phase,
        phases=phases,
        owners_at_peak=owners_of(at_peak),
        modules_at_peak=largest_modules(at_peak),
        parts_at_peak=parts_of(at_peak),
        reserved=ReservedByMode.of_both(lambda grows: reserve(trace, room, grows=grows)),
        rehearsal_seconds=round(trace.seconds, 3),
        **facts,
    )


def alive_after(events: Iterable[int]) -> list[int]:
    """Returns the numbers (from 1) of the live blocks after these events, oldest first."""
    alive: dict[int, None] = {}
    for event in events:
        if event > 0:
            alive[event] = None
        elif event != CACHE_EMPTIED:
            del alive[-event]
    return list(alive)


def owners_of(blocks: Iterable[Block]) -> dict[Owner, int]:
    """Sums the bytes of blocks by owner, rounded as the allocator rounds them."""
    owners = dict.fromkeys(Owner, 0)
    for block in blocks:
        owners[block.owner] += round_size(block.size_bytes)
    return owners


def largest_modules(blocks: list[Block]) -> tuple[tuple[str, int], ...]:
    """Lists the modules that hold the most activations and temporaries, with their bytes; those of all layers are one:
    ``model.layers.*.mlp.up_proj``."""
    sizes: dict[str, int] = defaultdict(int)
    for block in blocks:
        if block.owner in (Owner.ACTIVATIONS, Owner.TEMPORARY):
            name = re.sub(r"\.\d+(?=\.|$)", ".*", block.module)
            sizes[name or "outside the modules, as in the loss"] += round_size(block.size_bytes)
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    return tuple(largest[:LARGEST_MODULES])


VISION, PROJECTOR, LANGUAGE, BETWEEN = "vision tower", "projector", "language model", "shared"
PARTS = (VISION, PROJECTOR, LANGUAGE, BETWEEN)
"""Parts in the order of the forward pass; the last one holds the rest, such as most temporaries of a backward pass."""

_PROJECTOR = re.compile(r"\b(multi_modal_projector|connector|merger|deepstack_merger_list)\b")
_VISION = re.compile(r"\b(visual|vision_tower|vision_model)\b")
_LANGUAGE = re.compile(r"\b(language_model|text_model|lm_head)\b")
"""Names of the parts in ``transformers/models/*/modeling_*.py``; Qwen-VL's merger is inside its ``visual``."""


def part_of(name: str) -> str:
    """Names the part that a module or a parameter belongs to.

    >>> part_of("model.visual.merger.mlp.0"), part_of("base_model.model.model.language_model.layers.0.mlp")
    ('projector', 'language model')
    """
    for part, pattern in ((PROJECTOR, _PROJECTOR), (VISION, _VISION), (LANGUAGE, _LANGUAGE)):
        if pattern.search(name):
            return part
    return BETWEEN


def parts_of(blocks: Iterable[Block]) -> tuple[tuple[str, int], ...]:
    """Sums the bytes of blocks by part; empty without a vision tower."""
    sizes: dict[str, int] = defaultdict(int)
    for block in blocks:
        sizes[part_of(block.module)] += round_size(block.size_bytes)
    return tuple((part, sizes[part]) for part in PARTS if sizes[part]) if VISION in sizes else ()


PLACES = 1000
"""Number of intervals that the events are divided into: about as many as a figure has pixels."""
HOLDERS = 5
"""Number of the largest (owner, module) pairs listed at each point."""
STACKED = tuple(Owner)
"""The order of the stack, from the bottom."""


def events_to_draw(allocated: list[int], reserved: list[int], places: int) -> list[int]:
    """Returns the indices of the events at which memory is drawn: of each of ``places`` intervals the lowest and the
    highest point, and the one with most reserved bytes; all if there are few."""
    count = len(allocated)
    if count <= 3 * places:
        return [*range(count)]
    chosen = {0, count - 1}
    for place in range(places):
        stretch = range(place * count // places, (place + 1) * count // places)
        chosen |= {min(stretch, key=allocated.__getitem__), max(stretch, key=allocated.__getitem__)}
        chosen.add(max(stretch, key=reserved.__getitem__))
    return sorted(chosen)


def make_timeline(trace: Trace, room: DeviceCapacity, *, grows: bool, name: str, places: int = PLACES) -> Timeline:
    """Replays a run, which has events, and records the bytes of each owner at :func:`events_to_draw`."""
    reserved = [each for each, _ in held_after_each(trace, room, grows=grows)]
    allocated = allocated_after_each(trace)
    shown = events_to_draw(allocated, reserved, places)
    numbers: dict[tuple[Owner, str], int] = {}
    number_of = [numbers.setdefault((block.owner, block.module), len(numbers)) for block in trace.blocks]
    keys, sizes = [*numbers], [round_size(block.size_bytes) for block in trace.blocks]
    place_of = [STACKED.index(owner) for owner, _ in keys]
    totals, held, of_owners, largest = [0] * len(STACKED), [0] * len(keys), list[list[int]](), []
    large: set[int] = set()
    floor, most = 0, HOLDERS  # ``large`` holds at least the largest holders: those of more than ``floor`` bytes
    points = set(shown)
    for index, event in enumerate(trace.events):
        if event != CACHE_EMPTIED:
            block = abs(event) - 1
            number, change = number_of[block], sizes[block] if event > 0 else -sizes[block]
            totals[place_of[number]] += change
            held[number] += change
            (large.add if held[number] > floor else large.discard)(number)
        if index in points:
            of_owners.append([*totals])
            if not HOLDERS <= len(large) <= most:
                floor = max(0, sorted(held)[-2 * HOLDERS :][0] - 1)
                large = {number for number, size in enumerate(held) if size > floor}
                most = 2 * len(large)
            largest.append(sorted((-held[number], keys[number]) for number in large)[:HOLDERS])
    owners = {owner: column for owner, column in zip(STACKED, zip(*of_owners, strict=True), strict=True) if any(column)}
    owner_numbers = {owner: number for number, owner in enumerate(owners)}
    modules = sorted({module for point in largest for _, (_, module) in point})
    module_numbers = {module: number for number, module in enumerate(modules)}
    return Timeline(
        name=name,
        events=len(trace.events),
        event=tuple(shown),
        owners=owners,
        reserved_bytes=tuple(reserved[index] for index in shown),
        modules=tuple(modules),
        holders=tuple(
            tuple(
                Holder(module=module_numbers[module], owner=owner_numbers[owner], size_bytes=-negative)
                for negative, (owner, module) in point
            )
            for point in largest
        ),
        phases=tuple((phase, start) for start, phase in trace.phase_starts),
        peak=max(range(len(shown)), key=lambda point: allocated[shown[point]]),
        budget_bytes=room.capacity_bytes or 0,
    )
