"""Adapts TRL's defaults, or a followed plan, to a job's processes; a plan keeps its effective batch and schedule."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from autotrain_mem.search.division import divisors
from autotrain_mem.search.space import Space, micro_batches, with_rows
from autotrain_mem.settings.knobs import ROWS, STEPS, ZEROS, alone_too
from autotrain_mem.settings.levers import LADDER
from autotrain_mem.settings.optimizer_verdicts import OF_TORCH
from autotrain_mem.settings.own import OF_DEEPSPEED, OFFLOADED, SHARE_TOKENS, Sharding
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import AutoFit, Knobs, Plan, Topology


def for_processes(defaults: Knobs, topology: Topology, given: Mapping[str, Any]) -> Knobs:
    """Returns TRL's defaults for each of a job's processes. Raises as :func:`check_processes` does."""
    check_processes(topology, given)
    if topology.processes == 1:
        return defaults
    sizes = _token_shares(given)
    dp_replicate_size = _replicas(topology, given) if given.get("sharding") == "hsdp" else None
    shared: Sharding = "fsdp2" if sizes["cp_size"] > 1 else "zero3" if sizes["sp_size"] > 1 else "ddp"
    own = replace(defaults, processes=topology.processes, sharding=shared)
    return replace(own, dp_replicate_size=dp_replicate_size, **sizes)


def check_processes(topology: Topology, given: Mapping[str, Any]) -> None:
    """Raises UsageError for a sharding that these GPUs or machines do not support, or if DeepSpeed is missing."""
    processes, sharding = topology.processes, given.get("sharding")
    if sharding in ZEROS and find_spec("deepspeed") is None:
        raise UsageError(
            f"--sharding {sharding} needs DeepSpeed, which is not installed.",
            hint='pip install "autotrain_mem[deepspeed]" installs it; or give --sharding fsdp2.',
        )
    if sharding not in (None, *ZEROS) and processes == 1:
        raise UsageError(
            f"--sharding {sharding} divides the work of several GPUs, but this run uses one.",
            hint="Give --gpus 2 or more, or remove --sharding; on one GPU DeepSpeed's --sharding zero3 with "
            "--offload_optimizer_device cpu keeps the optimizer's state in host memory.",
        )
    if sharding == "hsdp" and _replicas(topology, given) == 1:
        raise UsageError(
            "--sharding hsdp holds a whole set of shards on each of several machines, but this run uses one.",
            hint="Give --nodes 2 or more, or --sharding fsdp2.",
        )
    if given.get("fsdp_offload_params") and sharding in (None, "ddp", *ZEROS):
        raise UsageError(
            "--fsdp_offload_params keeps the shards of FSDP in host memory, but FSDP does not shard the model.",
            hint="Give --sharding fsdp2 with it (and --gpus 2 or more), or remove it.",
        )
    zero = {name: given[name] for name in OF_DEEPSPEED if given.get(name)}
    if zero and (sharding not in ZEROS or ("offload_param_device" in zero and sharding != "zero3")):
        flag = "offload_param_device" if "offload_param_device" in zero else "offload_optimizer_device"
        takes = "--sharding zero3" if flag == "offload_param_device" else "--sharding zero1, zero2 or zero3"
        raise UsageError(f"--{flag} works only with DeepSpeed's {takes}.", hint=f"Give {takes}, or remove --{flag}.")
    for name, size in _token_shares(given).items():
        if processes % size:
            takes, more = ", ".join(map(str, divisors(processes))), f"--gpus {size} or a multiple"
            raise UsageError(
                f"--{name} {size} does not divide {processes} GPU{'s' if processes > 1 else ''}: groups of that size "
                "share the tokens of their rows.",
                hint=f"Give --{name} {takes}, or {more}." if processes > 1 else f"Give {more}, or remove --{name}.",
            )


def _replicas(topology: Topology, given: Mapping[str, Any]) -> int:
    return given.get("dp_replicate_size") or topology.nodes


def _token_shares(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given.get(name) or 1 for name in SHARE_TOKENS}


def is_shared_otherwise(asked: AutoFit, plan: Plan) -> bool:
    """Returns whether the request's GPUs, machines or sharding differ from the plan's."""
    topology, knobs = plan.estimate.hardware.topology, plan.knobs
    one = (asked.gpus,) if isinstance(asked.gpus, int) else tuple(asked.gpus or ())
    has_other_gpus = any(count != topology.devices for count in one) or asked.nodes not in (None, topology.nodes)
    shares_rows = any(getattr(asked, name) not in (None, getattr(knobs, name)) for name in SHARE_TOKENS)
    return has_other_gpus or shares_rows or asked.sharding not in (None, knobs.sharding)


def autofit_of(asked: AutoFit, filled: AutoFit, plan: Plan) -> AutoFit:
    """Returns ``filled`` (from ``AutoFit.over``) with the plan's batch, and its sharding unless the request has one."""
    alone = filled.gpus == 1 and (filled.nodes or 1) == 1
    sharding = asked.sharding or alone_too(filled.sharding, 1 if alone else 2)
    shared: dict[str, Any] = {"sharding": sharding}
    if not alone:
        planned = {name: getattr(plan.knobs, name) for name in SHARE_TOKENS}
        shared |= {name: getattr(filled, name) or (size if size > 1 else None) for name, size in planned.items()}
    if sharding != plan.knobs.sharding:
        shared |= {name: getattr(asked, name) for name in OFFLOADED}
    rows = filled.effective_batch_size or plan.knobs.effective_batch_size
    return replace(filled, effective_batch_size=rows, **shared)


def arguments_over(plan: Plan, autofit: AutoFit) -> dict[str, Any]:
    """Returns the plan's TRL arguments less accumulation, and less a micro-batch that no longer divides the batch."""
    processes = sum(autofit.gpu_counts[:1]) * (autofit.nodes or 1) // autofit.token_shards or 1
    arguments = dict(plan.job.trl_arguments)
    arguments.pop(STEPS, None)
    if (rows := arguments.get(ROWS)) and plan.knobs.effective_batch_size % (int(rows) * processes):
        del arguments[ROWS]
    return arguments


def ways_to_share(plan: Plan, space: Space, again: str) -> Iterator[Knobs]:
    """Yields the plan's settings for this job's processes, first with its micro-batch, then with smaller ones.

    Raises UsageError if one of the plan's levers does not support the sharding.
    """
    before, base = plan.knobs, space.base
    is_given = "sharding" in space.pinned or None in (before.sharding, base.sharding)
    sharding = base.sharding if is_given else before.sharding
    sizes = {name: getattr(base if name in space.pinned else before, name) for name in SHARE_TOKENS}
    if (shared := replace(before, sharding=sharding, processes=base.processes, **sizes)) == before:
        yield before
        return
    kept: dict[str, Any] = {name: getattr(base, name) for name in ("processes", "dp_replicate_size", *OFFLOADED)}
    if sharding == before.sharding:
        kept |= {name: getattr(before, name) for name in OFFLOADED}
    shared = replace(shared, **kept)
    if shared.is_sharded:
        levers = {row.knobs[0]: row.not_sharded[0] for row in LADDER if row.not_sharded}
        pulled = {name: reason for name, reason in levers.items() if getattr(shared, name)}
        if shared.optim not in OF_TORCH:
            pulled["optim"] = f"the state of {shared.optim} cannot be divided"
        for name, reason in pulled.items():
            raise UsageError(
                f"The plan has {name}, which does not work with --sharding {shared.sharding}: {reason}.",
                hint=f"Give --sharding ddp, or plan again: {again}",
            )
    splits = micro_batches(space)
    fewer = [rows for rows in splits if rows <= before.per_device_train_batch_size] or [min(splits)]
    yield from (with_rows(shared, rows, before.effective_batch_size) for rows in fewer)


def changes(before: Knobs, now: Knobs) -> Iterator[str]:
    """Yields how the processes differ, each as ``before -> after``."""
    if before.processes != now.processes:
        yield f"GPUs {before.processes} -> {now.processes}"
    if before.sharding != now.sharding:
        yield f"sharding {before.sharding or 'none'} -> {now.sharding or 'none'}"
    if before.token_shards != now.token_shards:
        yield f"GPUs that share a row {before.token_shards} -> {now.token_shards}"
