"""Follows a plan on another number of GPUs, or with the model shared otherwise: all else stays as it was planned.

The effective batch stays, and so do the number of optimizer steps, the schedule and the rows of each step: only how
many rows a process has at once, and how often it accumulates, is another split of the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autotrain_mem.search.space import Space, micro_batches, with_rows
from autotrain_mem.settings.knobs import alone_too
from autotrain_mem.settings.levers import LADDER
from autotrain_mem.settings.optimizer_verdicts import PARAMETER_SHAPED
from autotrain_mem.settings.own import SHARE_TOKENS
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Knobs, Plan
from autotrain_mem.types.autofit import AutoFit

ROWS, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_SHARED = ("processes", "dp_replicate_size")
_OFFLOADED = ("fsdp_offload_params", "offload_optimizer_device", "offload_param_device")


def is_shared_otherwise(asked: AutoFit, plan: Plan) -> bool:
    """Whether other numbers of GPUs or machines, or another sharding, are asked for than the plan has."""
    topology, knobs = plan.estimate.hardware.topology, plan.knobs
    one = (asked.gpus,) if isinstance(asked.gpus, int) else tuple(asked.gpus or ())
    has_other_gpus = any(count != topology.devices for count in one) or asked.nodes not in (None, topology.nodes)
    shares_rows = any(getattr(asked, name) not in (None, getattr(knobs, name)) for name in SHARE_TOKENS)
    return has_other_gpus or shares_rows or asked.sharding not in (None, knobs.sharding)


def autofit_of(asked: AutoFit, filled: AutoFit, plan: Plan) -> AutoFit:
    """Fills what is asked for from the plan, but for how the model was shared where that is asked otherwise.

    Args:
        filled: As ``AutoFit.over`` fills it.
    """
    alone = filled.gpus == 1 and (filled.nodes or 1) == 1
    sharding = asked.sharding or alone_too(filled.sharding, 1 if alone else 2)
    shared: dict[str, Any] = {"sharding": sharding}
    if not alone:
        shared |= {name: getattr(filled, name) or _above_one(getattr(plan.knobs, name)) for name in SHARE_TOKENS}
    if sharding != plan.knobs.sharding:
        shared |= {name: getattr(asked, name) for name in _OFFLOADED}
    return replace(
        filled, effective_batch_size=filled.effective_batch_size or plan.knobs.effective_batch_size, **shared
    )


def _above_one(size: int) -> int | None:
    return size if size > 1 else None


def arguments_of(plan: Plan, autofit: AutoFit) -> dict[str, Any]:
    """The plan's arguments of TRL's without the split of the batch: the rows at once stay where they divide it."""
    shared = max(autofit.cp_size or 1, autofit.sp_size or 1)
    processes = sum(autofit.gpu_counts[:1]) * (autofit.nodes or 1) // shared or 1
    arguments = dict(plan.job.trl_arguments)
    arguments.pop(STEPS, None)
    rows = arguments.get(ROWS)
    if rows and plan.knobs.effective_batch_size % (int(rows) * processes):
        del arguments[ROWS]
    return arguments


def ways_to_share(plan: Plan, space: Space, again: str) -> Iterator[Knobs]:
    """Yields the plan's settings for the processes that there are: with as many rows at once, then with fewer.

    Nothing but the plan's own where they are the same processes.

    Raises:
        UsageError: a lever of the plan does not go with shards.
    """
    before, base = plan.knobs, space.base
    sharding = (
        base.sharding if "sharding" in space.pinned or None in (before.sharding, base.sharding) else before.sharding
    )
    sizes = {name: getattr(base if name in space.pinned else before, name) for name in SHARE_TOKENS}
    shared = replace(before, sharding=sharding, processes=base.processes, **sizes)
    if shared == before:
        yield before
        return
    kept: dict[str, Any] = {name: getattr(base, name) for name in (*_SHARED, *_OFFLOADED)}
    if sharding == before.sharding:
        kept |= {name: getattr(before, name) for name in _OFFLOADED}
    shared = replace(shared, **kept)
    _check_levers(shared, again)
    splits = micro_batches(space)
    fewer = [rows for rows in splits if rows <= before.per_device_train_batch_size] or [min(splits)]
    for rows in fewer:
        yield with_rows(shared, rows, before.effective_batch_size)


def changes(before: Knobs, now: Knobs) -> Iterator[str]:
    """Yields how the processes differ, each as ``before -> after``."""
    if before.processes != now.processes:
        yield f"GPUs {before.processes} -> {now.processes}"
    if before.sharding != now.sharding:
        yield f"sharding {before.sharding or 'none'} -> {now.sharding or 'none'}"
    if before.token_shards != now.token_shards:
        yield f"GPUs that share a row {before.token_shards} -> {now.token_shards}"


def _check_levers(knobs: Knobs, again: str) -> None:
    if not knobs.is_sharded:
        return
    pulled = {row.knobs[0]: row.not_sharded[0] for row in LADDER if row.not_sharded and getattr(knobs, row.knobs[0])}
    if knobs.optim not in PARAMETER_SHAPED:
        pulled["optim"] = f"the state of {knobs.optim} cannot be divided"
    for name, reason in pulled.items():
        raise UsageError(
            f"The plan has {name}, which does not go with --sharding {knobs.sharding}: {reason}.",
            hint=f"Give --sharding ddp, or plan again: {again}",
        )
