"""Divides a rehearsal into loading, its first step and a later one, so that steps can be replayed many times."""

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise

from autotrain_mem.estimator.memory import alive_after
from autotrain_mem.types import CACHE_EMPTIED, Block, Owner, Phase, Trace

FOREIGN = 1 << 40
"""Events from this number on free a block of an earlier part; the block's kind is ``foreign[event - FOREIGN]``."""

Kind = Hashable


class UnclearStepsError(Exception):
    """Signals that a rehearsal's steps cannot be separated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSpan:
    """Holds a part of a rehearsal: allocations and frees of its own blocks, and frees of blocks of earlier parts."""

    events: "array[int]"
    foreign: tuple[Kind, ...]
    """Kinds of the blocks of earlier parts that this part frees, in order."""
    kept: dict[int, Kind] = field(default_factory=dict)
    """Its own blocks that are alive at its end, with their kinds."""
    lasting: frozenset[int] = frozenset()
    """Blocks of ``kept`` that are never freed: weights, optimizer state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Holds the parts of a rehearsal of two steps."""

    load: TraceSpan
    trial: TraceSpan
    """The last micro-batch of the first step, without the optimizer's step."""
    beside_trial: tuple[int, ...]
    """Blocks alive beside ``trial``: optimizer state, and gradients and workspaces of an earlier micro-batch."""
    first: tuple[TraceSpan, ...]
    """The micro-batches of the first step; the last one includes the optimizer's step."""
    later: tuple[TraceSpan, ...]
    """The micro-batches of the second step, which stands for all later steps."""


def step_parts(trace: Trace, *, accumulates: bool = False) -> StepParts:
    """Divides a rehearsal where its steps begin, and where an evaluation or a save follows the last one. Raises
    UnclearStepsError if a step lacks a phase, or a block is on a stream other than the default one. ``accumulates``:
    whether each step has two micro-batches. The optimizer's phase begins after each of them, since the recorder cannot
    know whether the optimizer will step (``trainers.phases``)."""
    starts, count = trace.phase_starts, 2 if accumulates else 1
    begins, phase = next(((index, each) for index, each in starts if each is not Phase.LOAD), (0, Phase.LOAD))
    micro_batches, stepped = [begins], list[int]()
    for _ in range(2 * count - 1):
        stepped.append(_first(trace, Phase.OPTIMIZER_STEP, micro_batches[-1]))
        micro_batches.append(_first(trace, phase, stepped[-1] + 1))
    if trace.stream_uses or any(block.stream for block in trace.blocks):
        raise UnclearStepsError
    ends = [index for index, each in starts if each in (Phase.EVALUATE, Phase.SAVE) and index > micro_batches[-1]]
    alive, end = frozenset(alive_after(trace.events)), min(ends, default=len(trace.events))
    borders = list(pairwise([*micro_batches, end]))
    first = tuple(_part(trace, start, stop, alive) for start, stop in borders[:count])
    beside_trial = sorted(n for n in first[-1].lasting if trace.blocks[n - 1].owner is Owner.OPTIMIZER_STATE)
    for before in first[:-1]:
        beside_trial += sorted(n for n in before.kept if trace.blocks[n - 1].owner is Owner.GRADIENTS)
        beside_trial += sorted(before.lasting)
    return StepParts(
        load=_part(trace, 0, begins, alive),
        trial=_part(trace, micro_batches[count - 1], stepped[count - 1], frozenset()),
        beside_trial=tuple(beside_trial),
        first=first,
        later=tuple(_part(trace, start, stop, frozenset()) for start, stop in borders[count:]),
    )


def _first(trace: Trace, phase: Phase, start: int) -> int:
    found = next((index for index, each in trace.phase_starts if each is phase and index >= start), None)
    if found is None:
        raise UnclearStepsError
    return found


def _part(trace: Trace, start: int, stop: int, lasting: frozenset[int]) -> TraceSpan:
    events, foreign, own = array("q"), list[Kind](), set[int]()
    for event in trace.events[start:stop]:
        if event < 0 and -event not in own:
            events.append(FOREIGN + len(foreign))
            foreign.append(_kind(trace.blocks[-event - 1]))
            continue
        events.append(event)
        if event > 0:
            own.add(event)
        elif event != CACHE_EMPTIED:
            own.discard(-event)
    kept = {number: _kind(trace.blocks[number - 1]) for number in own}
    return TraceSpan(events=events, foreign=tuple(foreign), kept=kept, lasting=lasting & own)


def _kind(block: Block) -> Kind:
    return block.owner, block.module
