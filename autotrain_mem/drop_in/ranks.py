"""Several processes, one plan: rank 0 makes it for the smallest of their devices, and all act on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from autotrain_mem import errors
from autotrain_mem.errors import AutofitError, UsageError
from autotrain_mem.spec import Hardware, Plan, codec

Noun = TypeVar("Noun", Hardware, Plan)


def processes() -> int:
    """How many train together, as far as torch.distributed knows."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


SHARDING = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
"""What ``accelerate launch`` says to its processes (``accelerate/utils/launch.py``), and what it means."""


def check_launch() -> None:
    """Refuse what splits a model over devices: plans are for whole models.

    Raises:
        UsageError: accelerate launched this process for such a thing.
    """
    for variable, name in SHARDING.items():
        if os.environ.get(variable, "").lower() == "true":  # as accelerate/state.py asks
            raise UsageError(
                f"accelerate launched this process with {name}, and plans are for one GPU, or DDP, so far.",
                hint="Launch it without, or take trl's own class.",
            )


def is_first() -> bool:
    """Whether this process plans and reports."""
    import torch.distributed as dist

    return processes() == 1 or dist.get_rank() == 0


def smallest(find: Callable[[], Hardware]) -> Hardware:
    """Finds the device with the least budget among those of all processes; every process must ask.

    Raises:
        AutofitError: what one of them met as it looked for its own; the others would wait for it.
    """
    if processes() == 1:
        return find()
    import torch.distributed as dist

    devices: list[Any] = [None] * processes()
    try:
        own = codec.to_json(find())
    except AutofitError as error:
        own = error.to_json()
    dist.all_gather_object(devices, own)
    return min((_received(Hardware, each) for each in devices), key=lambda each: each.budget_bytes())


def _received(kind: type[Noun], answer: Any) -> Noun:
    """Reads what another process sent; raises the AutofitError that it met instead."""
    if "error" in answer:
        raise errors.from_json(answer)
    return codec.from_json(kind, answer)


def agreed(make: Callable[[], Plan]) -> Plan:
    """Rank 0's plan in every process, or its error; the others wait as long as the process group's timeout says.

    Raises:
        AutofitError: what rank 0 met.
    """
    if processes() == 1:
        return make()
    if not is_first():
        return _received(Plan, _broadcast(None))
    try:
        plan = make()
    except BaseException as error:  # the others wait for whatever ends the planning
        reason = f"Rank 0 ended while it planned: {type(error).__name__}: {error}"
        _broadcast((error if isinstance(error, AutofitError) else AutofitError(reason)).to_json())
        raise
    _broadcast(codec.to_json(plan))
    return plan


def _broadcast(answer: Any) -> Any:
    """Returns what rank 0 sends, in every process."""
    import torch.distributed as dist

    box = [answer]
    dist.broadcast_object_list(box, src=0)
    return box[0]
