"""TRL's defaults, and the user's words about several GPUs, as one process of a job has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotrain_mem.errors import UsageError
from autotrain_mem.spec import Knobs
from autotrain_mem.spec.knobs import TOKEN_KNOBS, ZERO_KNOBS, ZEROS, Sharding
from autotrain_mem.spec.topology import Topology


def for_processes(defaults: Knobs, topology: Topology, given: Mapping[str, Any]) -> Knobs:
    """TRL's defaults as one of the processes of a topology has them: DDP, unless the user shards the model.

    Raises:
        UsageError: a sharding that there are too few GPUs or machines for.
    """
    processes, sharding = topology.processes, given.get("sharding")
    if sharding not in (None, *ZEROS) and processes == 1:
        raise UsageError(
            f"--sharding {sharding} divides the work of several GPUs, and this is for one.",
            hint="Give --gpus 2 or more, or remove --sharding; on one GPU DeepSpeed's --sharding zero3 with "
            "--offload_optimizer_device cpu keeps the optimizer's state in host memory.",
        )
    groups = given.get("dp_replicate_size") or topology.nodes
    if sharding == "hsdp" and groups == 1:
        raise UsageError(
            "--sharding hsdp holds a whole set of shards on each of several machines, and this is for one.",
            hint="Give --nodes 2 or more, or --sharding fsdp2.",
        )
    if given.get("fsdp_offload_params") and sharding in (None, "ddp", *ZEROS):
        raise UsageError(
            "--fsdp_offload_params keeps the shards of FSDP in host memory, and nothing says that there are any.",
            hint="Give --sharding fsdp2 with it (and --gpus 2 or more), or remove it.",
        )
    zero = {name: given[name] for name in ZERO_KNOBS if given.get(name)}
    if zero and (sharding not in ZEROS or ("offload_param_device" in zero and sharding != "zero3")):
        flag = "offload_param_device" if "offload_param_device" in zero else "offload_optimizer_device"
        takes = "--sharding zero3" if flag == "offload_param_device" else "--sharding zero1, zero2 or zero3"
        raise UsageError(f"--{flag} is DeepSpeed's: it takes {takes}.", hint=f"Give {takes}, or remove --{flag}.")
    sizes: dict[str, Any] = {name: given.get(name) or 1 for name in TOKEN_KNOBS}
    for name, size in sizes.items():
        _check_shared_tokens(name, size, processes)
    if processes == 1:
        return defaults
    dp_replicate_size = groups if sharding == "hsdp" else None
    shared: Sharding = "fsdp2" if sizes["cp_size"] > 1 else "zero3" if sizes["sp_size"] > 1 else "ddp"
    return replace(defaults, processes=processes, sharding=shared, dp_replicate_size=dp_replicate_size, **sizes)


def _check_shared_tokens(name: str, size: int, processes: int) -> None:
    if processes % size:
        fitting = [size for size in range(1, processes + 1) if processes % size == 0]
        takes = ", ".join(map(str, fitting))
        raise UsageError(
            f"--{name} {size} does not divide {processes} GPU{'s' if processes > 1 else ''}: groups of so many "
            "share the tokens of their rows.",
            hint=f"Give --{name} {takes}, or --gpus {size} or a multiple."
            if processes > 1
            else f"Give --gpus {size} or a multiple, or remove --{name}.",
        )
