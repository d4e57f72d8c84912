"""Cuts a rehearsal into what is loaded, its first step and a later one, so that steps can be played again and again."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field

from autotrain_mem.spec import Block, Owner, Phase, Trace
from autotrain_mem.spec.trace import CACHE_EMPTIED

FOREIGN = 1 << 40
"""From here on an event ends a block of an earlier part: what is added is the number of its kind."""

Kind = Hashable


class UnclearError(Exception):
    """Says that a rehearsal's steps cannot be told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Holds a stretch of a rehearsal: births and deaths of its own blocks as in a trace, and deaths of earlier ones."""

    events: array[int]
    foreign: tuple[Kind, ...]
    """Kinds of the earlier parts' blocks that it ends, in their order."""
    kept: dict[int, Kind] = field(default_factory=dict)
    """Its own blocks that outlive it."""
    lasting: frozenset[int] = frozenset()
    """Of these, those that nothing ends: weights, the optimizer's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Holds a rehearsal's parts."""

    load: Part
    trial: Part
    """The first step without its optimizer's."""
    first: Part
    later: Part
    """The second step, whose like all others are."""
    optimizer_state: tuple[int, ...]
    """Blocks that the first optimizer step makes and keeps."""


def step_parts(trace: Trace) -> StepParts:
    """Cuts a rehearsal where its steps begin, and where an evaluation follows. Raises UnclearError."""
    starts = trace.phase_starts
    begins, phase = next(((index, each) for index, each in starts if each is not Phase.LOAD), (0, Phase.LOAD))
    stepped = _first(trace, Phase.OPTIMIZER_STEP, begins)
    second = _first(trace, phase, stepped + 1)
    if trace.stream_uses or any(block.stream for block in trace.blocks):
        raise UnclearError
    ends = [index for index, each in starts if each in (Phase.EVALUATE, Phase.SAVE) and index > second]
    end = min(ends, default=len(trace.events))
    alive = _alive_at_end(trace)
    first = _part(trace, begins, second, alive)
    state = (number for number in first.lasting if trace.blocks[number - 1].owner is Owner.OPTIMIZER_STATE)
    return StepParts(
        load=_part(trace, 0, begins, alive),
        trial=_part(trace, begins, stepped, frozenset()),
        first=first,
        later=_part(trace, second, end, frozenset()),
        optimizer_state=tuple(sorted(state)),
    )


def _first(trace: Trace, phase: Phase, start: int) -> int:
    found = next((index for index, each in trace.phase_starts if each is phase and index >= start), None)
    if found is None:
        raise UnclearError
    return found


def _alive_at_end(trace: Trace) -> frozenset[int]:
    alive: set[int] = set()
    for event in trace.events:
        if event > 0:
            alive.add(event)
        else:
            alive.discard(-event)
    return frozenset(alive)


def _part(trace: Trace, start: int, stop: int, lasting: frozenset[int]) -> Part:
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
    return Part(events=events, foreign=tuple(foreign), kept=kept, lasting=lasting & own)


def _kind(block: Block) -> Kind:
    return block.owner, block.module
