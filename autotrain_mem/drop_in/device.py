"""Finds the device of a trainer in this process, and how much of the device's memory this process can still use."""

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autotrain_mem.allocator.settings import environment_settings, variable_that_counts
from autotrain_mem.machine.choose import choose
from autotrain_mem.machine.detect import cuda_device, host
from autotrain_mem.machine.usable import check_usable
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Hardware


def device_of(config: Any, gpu: str | None, models: Iterable[Any]) -> Hardware:
    """Returns the named card, or the device of the trainer's config.

    Args:
        config: TRL's.
        gpu: A card by name or size; None for the config's device.
        models: The script's model objects; training can use the memory that they hold on the card.

    Raises:
        UnknownGpuError: no card has this name.
        UsageError: the process has several cards, or the device cannot be rehearsed.
    """
    if gpu is not None:
        return choose(gpu, use_cpu=False)
    if config.device.type == "cpu":
        return host()
    if config.device.type != "cuda":
        raise UsageError(
            f"A trainer on {config.device.type} cannot be rehearsed, only one on CUDA or the CPU.",
            hint="Use trl's own class, or name a card to plan for: autofit=AutoFit(gpu=...).",
        )
    if config.n_gpu > 1:
        raise UsageError(
            f"This process sees {config.n_gpu} GPUs, and the trainer would split every batch over them; a plan is for "
            "one GPU per process.",
            hint="Set CUDA_VISIBLE_DEVICES=0 before Python starts, or start a process for each GPU with torchrun.",
        )
    index = config.device.index or 0
    if (card := cuda_device(index)) is None:
        raise UsageError(
            f"NVML does not list cuda:{index}, so its memory is unknown.",
            hint="Name a card to plan for: autofit=AutoFit(gpu=...).",
        )
    return with_own_use(card, config.device, models)


def with_own_use(card: Hardware, device: Any, models: Iterable[Any]) -> Hardware:
    """Returns the card with the bytes that are free for a run in this process.

    They include the process's CUDA context and torch's reserved memory, except tensors outside the trained models.
    """
    import torch

    if not torch.cuda.is_initialized():
        return card
    held = {id(each): each for model in models for each in (*model.parameters(), *model.buffers())}
    trained = sum(each.nbytes for each in held.values() if each.device == device)
    strangers = max(0, torch.cuda.memory_allocated(device) - trained)
    own_bytes = card.non_torch_bytes + torch.cuda.memory_reserved(device) - strangers
    return replace(card, free_bytes=min(card.total_bytes, card.free_bytes + own_bytes))


def why_fixed() -> str:
    """Returns why this process's segments cannot become expandable, and the remedy; empty if they can, or are."""
    import torch

    if not torch.cuda.is_initialized() or not torch.cuda.memory_reserved() or environment_settings({}).grows:
        return ""
    cure = f"Set {variable_that_counts(os.environ)}=expandable_segments:True before Python starts."
    return f"expandable_segments: this process's allocator holds fixed-size segments already. {cure}"


def grow_segments(device: Any) -> None:
    """Turns on expandable segments for later allocations of this process. Raises UnreadableGpuError if the card
    rejects them."""
    import torch

    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if torch.cuda.is_initialized():  # else the trainer runs on the CPU, with a plan for a card by name
        check_usable(device.index or 0, grows=True)
