"""A trace's events: births, deaths, and the cache emptied between them."""

import dataclasses
import json
from array import array

from autotrain_mem.estimator.memory import estimate_memory
from autotrain_mem.estimator.replay import DeviceCapacity
from autotrain_mem.support import codec
from autotrain_mem.support.units import KIB
from autotrain_mem.types import Block, Owner, Phase, Trace
from autotrain_mem.types.trace import CACHE_EMPTIED, EngineMark, StreamUse


def trace(events: list[int], stream_uses: tuple[StreamUse, ...] = ()) -> Trace:
    """Three blocks of 1, 2 and 4 KiB, the last one on stream 1; the optimizer step begins at the fourth event."""
    owners = (Owner.WEIGHTS, Owner.ACTIVATIONS, Owner.OPTIMIZER_STATE)
    return Trace(
        blocks=tuple(
            Block(size_bytes=KIB << index, owner=owner, module=owner.value, stream=index // 2)
            for index, owner in enumerate(owners)
        ),
        events=array("q", events),
        phase_starts=((0, Phase.FORWARD), (3, Phase.OPTIMIZER_STEP)),
        operators=3,
        seconds=0.0,
        stream_uses=stream_uses,
    )


def test_a_trace_comes_back_as_it_went() -> None:
    sent = trace([1, 3, CACHE_EMPTIED, -3, -1], (StreamUse(event=2, block=3, stream=0),))
    sent = dataclasses.replace(sent, engine_marks=((3, EngineMark.WAKES),))
    received = codec.from_json(Trace, json.loads(json.dumps(codec.to_json(sent))))
    assert received == sent
    assert [block.stream for block in received.blocks] == [0, 0, 1]
    assert [use.block for use in received.stream_uses] == [3]
    assert [*received.awake()] == [range(3, 5)], "to the end, where nothing says that it sleeps"


def test_a_block_may_be_born_again_once_it_is_dead() -> None:
    """Steps of a generation that are not rehearsed repeat one that is."""
    again = trace([1, 2, -2, 2, 3, -2, -3])
    assert [sign * block.size_bytes // KIB for _, sign, block in again.walk()] == [1, 2, -2, 2, 4, -2, -4]
    assert estimate_memory(again, DeviceCapacity(capacity_bytes=None)).peak_allocated_bytes == 7 * KIB
