"""What a trace tells, whatever its blocks are numbered: for comparing traces of the same run."""

from typing import Any

from autotrain_mem.estimator.depth.alignment import in_order
from autotrain_mem.types import Trace


def story(trace: Trace) -> list[Any]:
    """What happened, with blocks told by when they were born; deaths in a row stand in order of birth."""
    born: dict[int, int] = {}
    told: list[Any] = []
    for event in in_order(trace):
        if event > 0:
            born[event] = len(told)
            told.append(trace.blocks[event - 1])
        else:
            told.append(-born[-event] if event else None)
    uses = [(use.event, born[use.block], use.stream) for use in trace.stream_uses]
    return [*told, *trace.phase_starts, *uses]
