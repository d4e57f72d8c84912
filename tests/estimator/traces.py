"""Traces for the tests of the estimator: a few blocks by hand, and any run at all."""

from array import array

from hypothesis import strategies as st

from autotrain_mem.support.units import MIB
from autotrain_mem.types import CACHE_EMPTIED, Block, Owner, Phase, Trace


def block(size_bytes: int, owner: Owner = Owner.TEMPORARY, module: str = "") -> Block:
    return Block(size_bytes=size_bytes, owner=owner, module=module)


def trace(blocks: list[Block], events: list[int], phase_starts: list[tuple[int, Phase]] | None = None) -> Trace:
    return Trace(
        blocks=tuple(blocks),
        events=array("q", events),
        phase_starts=tuple(phase_starts or [(0, Phase.LOAD)]),
        operators=len(events),
        seconds=1.5,
        not_counted=("the workspace of cuBLAS",),
    )


def run_of(sizes_mib: list[float], events: list[int]) -> Trace:
    """``run_of([20, 30], [1, -1, 2])``: blocks by their size in MiB."""
    return trace([block(int(size * MIB)) for size in sizes_mib], events)


@st.composite
def traces(draw: st.DrawFn, *, largest: int = 1 << 20, empties: bool = False) -> Trace:
    """Any order of births and deaths, cut into phases anywhere."""
    owners, modules = st.sampled_from(list(Owner)), st.sampled_from(["", "model.layers.0", "model.layers.1", "lm_head"])
    sizes = draw(st.lists(st.integers(1, largest), min_size=1, max_size=30))
    blocks = [block(size, draw(owners), draw(modules)) for size in sizes]
    events: list[int] = []
    alive: list[int] = []
    for number in range(1, len(blocks) + 1):
        events.append(number)
        alive.append(number)
        while alive and draw(st.booleans()):
            events.append(-alive.pop(draw(st.integers(0, len(alive) - 1))))
        if empties and draw(st.booleans()):
            events.append(CACHE_EMPTIED)
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=6)))
    starts = [(0, Phase.LOAD), *((cut, draw(st.sampled_from(list(Phase)))) for cut in cuts)]
    return trace(blocks, events, starts)
