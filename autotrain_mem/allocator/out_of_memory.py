"""Formats torch's out-of-memory message with the numbers of a failed request.

Follows ``c10/cuda/CUDACachingAllocator.cpp: DeviceCachingAllocator::malloc`` and ``format_size``, torch 2.13.
"""

from dataclasses import dataclass

from autotrain_mem.support.units import GIB, KIB, MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Holds the numbers of a failed request."""

    requested_bytes: int
    """Bytes that the program requested."""
    segment_bytes: int
    """Bytes that the allocator requested from the device."""
    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    allowed_bytes: int | None = None
    """The most that the process may reserve; None without a limit."""
    outside_bytes: int | None = None
    """Bytes that the process holds outside the allocator; None if no driver reports them."""

    def message(self) -> str:
        unallocated = self.reserved_bytes - self.allocated_bytes
        process = allowed = ""
        if self.outside_bytes is not None:
            in_use = format_size(self.reserved_bytes + self.outside_bytes)
            process = f"Including non-PyTorch memory, this process has {in_use} memory in use. "
        if self.allowed_bytes is not None:
            allowed = f"{format_size(self.allowed_bytes)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.segment_bytes)}. GPU 0 has a total capacity of "
            f"{format_size(self.total_bytes)} of which {format_size(self.free_bytes)} is free. {process}{allowed}"
            f"Of the allocated memory {format_size(self.allocated_bytes)} is allocated by PyTorch, and "
            f"{format_size(unallocated)} is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
            "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
            "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-"
            "memory-usage-with-pytorch-cuda-alloc-conf)"
        )


class OutOfMemory(Exception):
    """Raised if a request fails. The text is torch's message."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message())
        self.refusal = refusal


def format_size(size_bytes: int) -> str:
    """Returns a size as torch writes it: ``format_size(21 * 2**20) == "21.00 MiB"``."""
    if size_bytes <= 1024:
        return f"{size_bytes} bytes"
    for unit, name in ((KIB, "KiB"), (MIB, "MiB")):
        if size_bytes <= unit * 1024:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes / GIB:.2f} GiB"
