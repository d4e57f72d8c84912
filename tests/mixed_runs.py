"""A toy trainer whose memory is known at any length of its rows."""

from array import array

from autotrain_mem.estimator.mixed_steps import Rehearsed
from autotrain_mem.support.units import KIB, MIB
from autotrain_mem.types import Block, Owner, Phase, Trace

LAYERS, LONGEST, SHORTER = 6, 1000, 300


def rehearsed(tokens: int, micro_batches: int = 1) -> Rehearsed:
    """Two steps of so many micro-batches each: the first one's gradients stay, and those of the others join them."""
    blocks: list[Block] = []
    events: list[int] = []
    starts: list[tuple[int, Phase]] = [(0, Phase.LOAD)]

    def birth(size: int, owner: Owner, module: str) -> int:
        blocks.append(Block(size_bytes=size, owner=owner, module=module))
        events.append(len(blocks))
        return len(blocks)

    def micro_batch(*, is_first: bool) -> list[int]:
        starts.append((len(events), Phase.FORWARD))
        # A mask, what each layer keeps, and logits: with the square of the tokens, with the tokens, and a token less.
        sizes = [8 * tokens * tokens, *(22 * KIB * tokens + 3 * MIB for _ in range(LAYERS)), 90 * KIB * (tokens - 1)]
        kept = [birth(sizes[0], Owner.ACTIVATIONS, "mask")]
        kept += [birth(size, Owner.ACTIVATIONS, f"layers.{layer}") for layer, size in enumerate(sizes[1:-1])]
        kept.append(birth(sizes[-1], Owner.TEMPORARY, "head"))
        starts.append((len(events), Phase.BACKWARD))
        gradients = []
        for layer in reversed(range(LAYERS)):
            gradients.append(birth(40 * MIB, Owner.GRADIENTS if is_first else Owner.TEMPORARY, f"layers.{layer}"))
            events.append(-kept.pop())
            if not is_first:
                events.append(-gradients.pop())
        events.extend(-number for number in kept)
        starts.append((len(events), Phase.OPTIMIZER_STEP))
        return gradients

    for layer in range(LAYERS):
        birth(40 * MIB, Owner.WEIGHTS, f"layers.{layer}")
    for step in range(2):
        gradients = micro_batch(is_first=True)
        for _ in range(micro_batches - 1):
            events.append(-birth(1, Owner.TEMPORARY, ""))  # whether it is time for the optimizer
            micro_batch(is_first=False)
        if step == 0:
            for layer in range(LAYERS):
                birth(80 * MIB, Owner.OPTIMIZER_STATE, f"layers.{layer}")
        events += [-number for number in gradients]
    trace = Trace(blocks=tuple(blocks), events=array("q", events), phase_starts=tuple(starts), operators=1, seconds=0)
    return Rehearsed(tokens=tokens, trace=trace)
