"""Shows how several processes share a model: what each way of it leaves on a GPU, and at what speed.

``state`` is the optimizer's.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, QUIET, Block, add, hanging, section, table
from autotrain_mem.search.shardings import FASTEST_FIRST
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Candidate, Estimate, Knobs, Owner, Plan
from autotrain_mem.types.knobs import Sharding

DIVIDED = (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE)
"""What shards divide among the processes."""

_ZERO = {
    1: "ZeRO-1 divides the optimizer's state, with the weights in float32 that it steps on; each GPU holds all weights "
    "and gradients in half precision.",
    2: "ZeRO-2 divides the optimizer's state, with the weights in float32 that it steps on, and gradients; each GPU "
    "holds all weights in half precision.",
    3: "ZeRO-3 divides weights, gradients and the optimizer's state, with the weights in float32 that it steps on; "
    "weights are gathered ahead of the layer that needs them.",
}
_BUCKETS = (
    "Gradients are reduced in buckets: in stages 2 and 3 of 64 MiB where no --deepspeed FILE says otherwise, for "
    "DeepSpeed's 0.93 GiB."
)


def devices(knobs: Knobs) -> str:
    """``4 GPUs (FSDP2, full shard): each needs what is said here``."""
    count, way = formatting.counted(knobs.processes, "GPU"), formatting.sharing(knobs)
    return f"{count} ({way}), a process on each: bytes are those of one"


def sharing_view(plan: Plan) -> list[RenderableType]:
    """Every way of sharing beside the plan's; nothing for a single process."""
    if plan.knobs.processes == 1:
        return []
    notes = [Block(hanging(sentence), 2) for sentence in _sentences(plan)]
    return section("how the GPUs share the model, for each of them", Block(_table(plan), 2), *notes)


def _table(plan: Plan) -> Table:
    """Bytes that were rehearsed for the plan, and computed from its own for the others: these begin with ~."""
    estimate = plan.estimate
    grid = table("", "weights", "gradients", "state", "needs", "", right=(1, 2, 3, 4))
    for sharding, offloads in _ways(plan.knobs):
        is_plan = (sharding, offloads) == (plan.knobs.sharding, plan.knobs.fsdp_offload_params)
        held = (_held(estimate, owner, sharding, offloads=offloads) for owner in DIVIDED)
        sizes = [f"{'' if is_plan else '~'}{format_bytes(each)}" for each in held]
        name = f"{sharding.upper()}, offloaded" if offloads else formatting.SHARINGS[sharding]
        needs, outcome = _outcome(_best(plan, sharding, offloads=offloads))
        add(grid, f"{'>' if is_plan else ' '} {name}", *sizes, needs, outcome, style="bold" if is_plan else "")
    return grid


def _ways(knobs: Knobs) -> Iterator[tuple[Sharding, bool]]:
    for sharding in FASTEST_FIRST:
        if sharding != "hsdp" or knobs.sharding == "hsdp":
            yield sharding, False
    yield "fsdp2", True
    if knobs.sharding == "fsdp1" or knobs.zero_stage:
        yield knobs.sharding or "fsdp1", knobs.fsdp_offload_params


def _held(estimate: Estimate, owner: Owner, sharding: Sharding, *, offloads: bool) -> int:
    """Computes what a process would hold at the same peak, by its share; 0 of what lies on the host."""
    knobs = estimate.knobs
    size = estimate.memory.owners_at_peak.get(owner, 0)
    if (sharding, offloads) == (knobs.sharding, knobs.fsdp_offload_params):
        return size
    if offloads:
        return 0
    shards = 1 if sharding == "ddp" else knobs.shards if sharding == "hsdp" else knobs.processes
    return size * knobs.shards // shards


def _best(plan: Plan, sharding: Sharding, *, offloads: bool) -> Candidate | None:
    """The fastest that fits of those that were rehearsed at what the plan trains; else what needs least."""
    same = [
        each
        for each in plan.attempts
        if (each.knobs.sharding, each.knobs.fsdp_offload_params) == (sharding, offloads)
        and (each.knobs.use_peft, each.knobs.base_bits, each.knobs.dtype, each.knobs.optim)
        == (plan.knobs.use_peft, plan.knobs.base_bits, plan.knobs.dtype, plan.knobs.optim)
    ]
    chosen = [each for each in same if each.knobs == plan.knobs]
    fitting = chosen[-1:] or sorted((each for each in same if each.fits), key=lambda each: each.tokens_per_second or 0)
    return fitting[-1] if fitting else min(same, key=lambda each: each.required_bytes, default=None)


def _outcome(best: Candidate | None) -> tuple[str, Text]:
    if best is None:
        return "", Text("not rehearsed", style=QUIET)
    if not best.fits:
        return format_bytes(best.required_bytes), Text("too much", style=BAD)
    speed = f"{formatting.rate(best.tokens_per_second)} tokens/s" if best.tokens_per_second else "fits"
    return format_bytes(best.required_bytes), Text(speed)


def _sentences(plan: Plan) -> Iterator[str]:
    """Says what is divided and what is not, what accelerate casts, and what the next way would take."""
    knobs, estimate = plan.knobs, plan.estimate
    if not knobs.is_sharded:
        yield (
            "DDP divides nothing: each GPU holds all weights, gradients and optimizer state, with a second copy of the "
            "gradients in the buckets that are reduced (gradient_as_bucket_view is off)."
        )
        return
    if knobs.zero_stage:
        yield _ZERO[knobs.zero_stage]
        yield _BUCKETS
        return
    yield (
        f"Divided by {knobs.shards}: weights, gradients and optimizer state. Not divided: activations, logits, what a "
        "layer computes with, and the layers whose weights are whole at a time (gathered weights "
        f"{format_bytes(estimate.memory.owners_at_peak.get(Owner.GATHERED_WEIGHTS, 0))} at the peak)."
    )
    if not knobs.use_peft:
        yield (
            "With mixed precision accelerate keeps what is trained in float32, whatever dtype it is loaded in, and "
            "gathers and reduces it in half precision: 16 bytes for each parameter of a shard with AdamW."
        )
    yield "Each micro-step reduces its gradients (sync_each_batch): whole ones are not kept until the last."
    if not _fits(plan, "ddp"):
        static = sum(_held(estimate, owner, "ddp", offloads=False) for owner in DIVIDED)
        whole = static + estimate.outside_bytes
        budget = format_bytes(estimate.budget_bytes)
        if not knobs.fsdp_offload_params and whole > estimate.budget_bytes:
            yield f"DDP would hold {format_bytes(static)} of these on each GPU, the budget is {budget}."


def _fits(plan: Plan, sharding: Sharding) -> bool:
    best = _best(plan, sharding, offloads=False)
    return best is not None and best.fits
