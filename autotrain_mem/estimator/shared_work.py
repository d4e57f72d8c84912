"""Computes what a process would do and send if the model were shared among processes in another way.

Only what was rehearsed is planned with; this says what is worth a rehearsal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autotrain_mem.types import Estimate, Knobs, Owner, Phase, Topology, Work, Workload
from autotrain_mem.types.work import Kind

COLLECTIVES = (Kind.COLLECTIVE, Kind.NETWORK_COLLECTIVE)
HALF = ("bfloat16", "float16")
GATHERED_IN = 32
"""Parts that all weights are gathered in, of which one is waited for: 24 to 32 layers are usual up to 8B, 80 at 70B."""


def shared_work(work: Workload, known: Estimate, knobs: Knobs) -> Workload:
    """Returns the work of a point that was rehearsed, with its model shared as these knobs say.

    The model's whole bytes are those at the known peak, times its shards.
    """
    before, topology = known.knobs, known.hardware.topology
    # What shares the tokens of a row sends keys and values, which grow with them, however the model is shared.
    kept = [each for each in work.work if each.kind not in COLLECTIVES or each.bytes]
    kept = kept if knobs.is_sharded else _under_autocast(kept)
    share = before.shards / knobs.shards
    updated = [
        replace(each, fixed_bytes=round(each.fixed_bytes * share)) if each.phase is Phase.OPTIMIZER_STEP else each
        for each in kept
    ]
    weights = known.memory.owners_at_peak.get(Owner.WEIGHTS, 0) * before.shards
    sent = [each for each in _sent(work, knobs, topology, weights) if each.fixed_bytes]
    return replace(work, work=(*updated, *sent))


def _under_autocast(work: Sequence[Work]) -> list[Work]:
    """Lets all matrix products be computed in the dtype of most, if that is a half one.

    accelerate wraps the forward pass of a model in autocast, but for FSDP2 (``accelerator.py: prepare_model,
    _prepare_fsdp2``), where products of what was cast to float32 stay as they are: those of TRL's loss in chunks
    (``trl/trainer/sft_trainer.py: _chunk``), which take half of a step on an A100.
    """
    flops: defaultdict[str, float] = defaultdict(float)
    for each in work:
        if each.kind is Kind.MATMUL:
            flops[each.dtype] += each.flops * each.count
    most = max(flops, key=flops.__getitem__, default="")
    if most not in HALF:
        return [*work]
    return [replace(each, dtype=most) if each.kind is Kind.MATMUL else each for each in work]


def _sent(work: Workload, knobs: Knobs, topology: Topology, weights: int) -> Iterator[Work]:
    """Lists what processes send to each other.

    Gradients of what is trained are as large as it is: DDP reduces them as they are, FSDP in the dtype that is computed
    in, as which it gathers weights (``accelerate/utils/dataclasses.py: FullyShardedDataParallelPlugin
    .set_mixed_precision``). An adapter's are next to nothing.
    """
    trained = 0 if knobs.use_peft else weights
    if not knobs.is_sharded:
        rounds = 2 * (knobs.processes - 1) / knobs.processes
        yield _collective(topology, Phase.BACKWARD, trained * rounds, work.optimizer_steps, of_step=True)
        return
    half = 2 if knobs.dtype == "float32" else 1
    share, is_within = (knobs.shards - 1) / knobs.shards, knobs.sharding == "hsdp"
    gathered = weights / half * share / GATHERED_IN
    rehearsed = {each.phase for each in work.work}
    passes = {Phase.FORWARD: work.micro_steps, Phase.SCORE: work.optimizer_steps}
    passes |= {Phase.GENERATE: work.optimizer_steps * knobs.sampled_tokens}
    passes |= {Phase.BACKWARD: 0 if knobs.sharding == "fsdp2-no-reshard" else work.micro_steps}
    for phase in rehearsed & passes.keys():
        yield _collective(topology, phase, gathered, passes[phase] * GATHERED_IN, is_within=is_within)
    reduced = trained / half * share / GATHERED_IN
    yield _collective(topology, Phase.BACKWARD, reduced, work.micro_steps * GATHERED_IN, is_within=is_within)
    if is_within:
        groups = knobs.processes / knobs.shards
        rounds = 2 * (groups - 1) / groups / knobs.shards
        yield _collective(topology, Phase.BACKWARD, trained / half * rounds, work.micro_steps)


def _collective(
    topology: Topology, phase: Phase, sent: float, count: int, *, is_within: bool = False, of_step: bool = False
) -> Work:
    kind = Kind.COLLECTIVE if topology.nodes == 1 or is_within else Kind.NETWORK_COLLECTIVE
    return Work(
        phase=phase,
        kind=kind,
        dtype="bfloat16",
        flops=0,
        bytes=0,
        fixed_bytes=round(sent),
        launches=1,
        count=float(count),
        of_step=of_step,
    )
