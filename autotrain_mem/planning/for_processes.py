"""TRL's defaults, and the user's words about several GPUs, as one process of a job has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from autotrain_mem.settings.knobs import ZEROS
from autotrain_mem.settings.own import OF_DEEPSPEED, SHARE_TOKENS, Sharding
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Knobs
from autotrain_mem.types.hardware import Topology


def for_processes(defaults: Knobs, topology: Topology, given: Mapping[str, Any]) -> Knobs:
    """TRL's defaults as one of the processes of a topology has them: DDP, unless the user shards the model.

    Raises:
        UsageError: as :func:`check_processes`.
    """
    check_processes(topology, given)
    if topology.processes == 1:
        return defaults
    sizes = _token_shares(given)
    dp_replicate_size = _replicas(topology, given) if given.get("sharding") == "hsdp" else None
    shared: Sharding = "fsdp2" if sizes["cp_size"] > 1 else "zero3" if sizes["sp_size"] > 1 else "ddp"
    return replace(
        defaults, processes=topology.processes, sharding=shared, dp_replicate_size=dp_replicate_size, **sizes
    )


def check_processes(topology: Topology, given: Mapping[str, Any]) -> None:
    """Refuses a division of the work that so many GPUs cannot have, and DeepSpeed's where that is not installed.

    Raises:
        UsageError: a sharding that there are too few GPUs or machines for, or flags that go with another one.
    """
    processes, sharding = topology.processes, given.get("sharding")
    if sharding in ZEROS and find_spec("deepspeed") is None:
        raise UsageError(
            f"--sharding {sharding} is DeepSpeed's, which is not installed.",
            hint='pip install "autotrain_mem[deepspeed]" installs it; or give --sharding fsdp2.',
        )
    if sharding not in (None, *ZEROS) and processes == 1:
        raise UsageError(
            f"--sharding {sharding} divides the work of several GPUs, and this is for one.",
            hint="Give --gpus 2 or more, or remove --sharding; on one GPU DeepSpeed's --sharding zero3 with "
            "--offload_optimizer_device cpu keeps the optimizer's state in host memory.",
        )
    if sharding == "hsdp" and _replicas(topology, given) == 1:
        raise UsageError(
            "--sharding hsdp holds a whole set of shards on each of several machines, and this is for one.",
            hint="Give --nodes 2 or more, or --sharding fsdp2.",
        )
    _check_offload(sharding, given)
    for name, size in _token_shares(given).items():
        _check_shared_tokens(name, size, processes)


def _check_offload(sharding: str | None, given: Mapping[str, Any]) -> None:
    if given.get("fsdp_offload_params") and sharding in (None, "ddp", *ZEROS):
        raise UsageError(
            "--fsdp_offload_params keeps the shards of FSDP in host memory, and nothing says that there are any.",
            hint="Give --sharding fsdp2 with it (and --gpus 2 or more), or remove it.",
        )
    zero = {name: given[name] for name in OF_DEEPSPEED if given.get(name)}
    if zero and (sharding not in ZEROS or ("offload_param_device" in zero and sharding != "zero3")):
        flag = "offload_param_device" if "offload_param_device" in zero else "offload_optimizer_device"
        takes = "--sharding zero3" if flag == "offload_param_device" else "--sharding zero1, zero2 or zero3"
        raise UsageError(f"--{flag} is DeepSpeed's: it takes {takes}.", hint=f"Give {takes}, or remove --{flag}.")


def _replicas(topology: Topology, given: Mapping[str, Any]) -> int:
    return given.get("dp_replicate_size") or topology.nodes


def _token_shares(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given.get(name) or 1 for name in SHARE_TOKENS}


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
