"""Reports what held a device's memory when it ran out, without allocating anything on it.

Torch's message has the figures of that moment. Later ones are smaller: tensors are freed while the error propagates."""

import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from autotrain_mem.support.units import parse_bytes
from autotrain_mem.trainers.model_support import statistics
from autotrain_mem.training.process.build import Device
from autotrain_mem.training.process.longest_batch import models_of
from autotrain_mem.types import Owner, Shortage

_SIZE = r"(\d+(?:\.\d+)? (?:GiB|MiB|KiB|bytes))"
"""The format of ``c10/cuda/CUDACachingAllocator.cpp: format_size``; the patterns match
``DeviceCachingAllocator::malloc`` there."""
_REQUESTED = re.compile(rf"(?:Tried to allocate|Requested size:) {_SIZE}")
_CAPACITY = re.compile(rf"total capacity of {_SIZE} of which {_SIZE} is free")
_THIS_PROCESS = re.compile(rf"this process has {_SIZE} memory in use")
_HELD = re.compile(rf"memory {_SIZE} is allocated by PyTorch, and {_SIZE} is reserved by PyTorch but unallocated")


def shortage_of(error: BaseException, trainer: Any, device: Device) -> Shortage:
    """Returns the figures of an out-of-memory error in this trainer's step."""
    simulated, named = device.simulated, _named(trainer)
    refusal = None if simulated is None else simulated.refusal(error)
    if simulated is None:
        seen: set[int] = set()
        measured = {owner: _size(tensors, seen) for owner, tensors in named.items()}
    else:
        measured = {} if refusal is None else simulated.owned(named, refusal)
    if refusal is None:
        figures = _of_message(str(error), device)
    else:
        figures = asdict(refusal) | {"outside_bytes": refusal.outside_bytes or 0}
        del figures["allowed_bytes"]
    return Shortage(phase=device.phase, step=trainer.state.global_step, measured=measured, **figures)


def _of_message(message: str, device: Device) -> dict[str, Any]:
    """Reads torch's message; figures that are missing there come from the allocator's current state."""
    hardware, reading = device.hardware, device.read()
    asked, held = _REQUESTED.search(message), _HELD.search(message)
    requested = None if asked is None else _bytes(asked[1])
    if held is not None:
        allocated = _bytes(held[1])
        reserved = allocated + _bytes(held[2])
    else:
        allocated = 0 if reading is None else reading.allocated_bytes
        reserved = 0 if reading is None else reading.reserved_bytes
    process, capacity = _THIS_PROCESS.search(message), _CAPACITY.search(message)
    outside = hardware.non_torch_bytes if process is None else max(0, _bytes(process[1]) - reserved)
    if capacity is not None:
        total, free = _bytes(capacity[1]), _bytes(capacity[2])
    else:  # the free memory before, minus what the process has taken since
        total, free = hardware.total_bytes, max(0, hardware.free_bytes - reserved - outside)
    return {
        "requested_bytes": requested,
        "segment_bytes": requested,
        "total_bytes": total,
        "free_bytes": free,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "outside_bytes": outside,
    }


def _bytes(text: str) -> int:
    return parse_bytes(text.replace("bytes", "B"))


def _named(trainer: Any) -> dict[Owner, list[Any]]:
    """Returns the tensors by owner: weights with their scales and buffers, gradients, and the optimizer's state."""
    models = models_of(trainer)
    parameters = [each for model in models for each in model.parameters()]
    weights = [
        *parameters,
        *(each for model in models for each in model.buffers()),
        *(each for model in models for _, each in statistics(model)),
    ]
    states = getattr(getattr(trainer.optimizer, "optimizer", trainer.optimizer), "state", {}).values()
    state = [each for of_parameter in states for each in of_parameter.values() if isinstance(each, torch.Tensor)]
    gradients = [each.grad for each in parameters if each.grad is not None]
    return {Owner.WEIGHTS: weights, Owner.GRADIENTS: gradients, Owner.OPTIMIZER_STATE: state}


def _size(tensors: Iterable[Any], seen: set[int]) -> int:
    """Returns the bytes of CUDA storages not seen before."""
    size_bytes = 0
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # torch/distributed/tensor/_api.py: DTensor
        if not local.is_cuda:  # such as a paged optimizer's state (``bitsandbytes/functional.py: get_paged``)
            continue
        storage = local.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            size_bytes += storage.nbytes()
    return size_bytes
