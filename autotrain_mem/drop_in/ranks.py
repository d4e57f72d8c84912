"""Several processes, one plan: rank 0 makes it for the smallest of their devices, and all act on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotrain_mem import errors
from autotrain_mem.errors import AutofitError
from autotrain_mem.spec import Hardware, Plan


def processes() -> int:
    """How many train together, as far as torch.distributed knows."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process plans and tells."""
    import torch.distributed as dist

    return processes() == 1 or dist.get_rank() == 0


def smallest(hardware: Hardware) -> Hardware:
    """Of all processes' devices the one with the least budget; every process must ask."""
    if processes() == 1:
        return hardware
    import torch.distributed as dist

    found: list[Any] = [None] * processes()
    dist.all_gather_object(found, hardware.to_json())
    return min(map(Hardware.from_json, found), key=lambda each: each.budget_bytes())


def agreed(make: Callable[[], Plan]) -> Plan:
    """Rank 0's plan in every process, or its error; the others wait as long as the process group's timeout says.

    Raises:
        AutofitError: what rank 0 met.
    """
    if processes() == 1:
        return make()
    if not is_first():
        said = _broadcast(None)
        if "error" in said:
            raise errors.from_json(said)
        return Plan.from_json(said)
    try:
        plan = make()
    except BaseException as error:  # the others wait for whatever ends the planning
        _broadcast(_as_error(error).to_json())
        raise
    _broadcast(plan.to_json())
    return plan


def _broadcast(said: Any) -> Any:
    """What rank 0 says, in every process."""
    import torch.distributed as dist

    box = [said]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _as_error(error: BaseException) -> AutofitError:
    if isinstance(error, AutofitError):
        return error
    return AutofitError(f"Rank 0 ended while it planned: {type(error).__name__}: {error}")
