"""Several processes, one plan: rank 0 makes it for the smallest of their devices, and all act on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from autotrain_mem.machine.choose import least
from autotrain_mem.machine.links import topology
from autotrain_mem.support import errors
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.types import Hardware, Plan, codec

Noun = TypeVar("Noun", Hardware, Plan)


def processes() -> int:
    """How many train together, as far as torch.distributed knows."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def nodes() -> int:
    """How many machines they are on (``torch/distributed/elastic/agent/server/local_elastic_agent.py``)."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, processes() // int(local)) if local.isdigit() and int(local) else 1


def is_first() -> bool:
    """Whether this process plans and reports."""
    import torch.distributed as dist

    return processes() == 1 or dist.get_rank() == 0


def smallest(find: Callable[[], Hardware], link: str | None = None) -> Hardware:
    """Finds the device with the least budget among those of all processes, as one of them all; every process must ask.

    Args:
        link: Names of what joins them, as ``--link`` has them; None where it is to be found.

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
    cards, machines = [_received(Hardware, each) for each in devices], nodes()
    of_node = len(cards) // machines
    uuids = [each.uuid for each in cards[:of_node] if each.uuid is not None]
    card = least(cards)
    joined = topology(card, devices=of_node, nodes=machines, asked=link, uuids=uuids if len(uuids) == of_node else ())
    return replace(card, topology=joined)


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
