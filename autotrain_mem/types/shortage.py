"""A shortage says of a device that was full what was asked for, what there was, and who held it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotrain_mem.types.trace import Owner
from autotrain_mem.types.work import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """Holds an out-of-memory error in figures, at the moment of the request that failed. All sizes are bytes.

    ``free + reserved + outside + others == total`` and ``allocated + cached == reserved`` hold.

    >>> from autotrain_mem.types.shortage import Shortage
    >>> from autotrain_mem import Owner, Phase
    >>> shortage = Shortage(
    ...     phase=Phase.BACKWARD, step=12, requested_bytes=450, segment_bytes=500, total_bytes=4000, free_bytes=200,
    ...     allocated_bytes=2500, reserved_bytes=3000, outside_bytes=100, measured={Owner.WEIGHTS: 1000},
    ... )
    >>> shortage.rest_bytes, shortage.others_bytes, shortage.needed_bytes
    (1500, 700, 3600)
    """

    phase: Phase | None
    """None where nobody knows."""
    step: int
    """Optimizer steps that were done before."""
    requested_bytes: int | None
    """For the tensor, as far as that is known; else as ``segment_bytes``. None where the library did not say."""
    segment_bytes: int | None
    """What the allocator asked of the device for it: a whole segment, which may be larger."""
    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    """By tensors, in torch's allocator."""
    reserved_bytes: int
    """What the allocator had of the device."""
    outside_bytes: int
    """What the process had of it outside the allocator: the CUDA context, cuBLAS, NCCL, a vLLM engine."""
    measured: Mapping[Owner, int]
    """Of what was allocated, by those owners that could be told apart: all of them on a simulated card; on a real one
    what has a name (weights, gradients, optimizer state)."""

    @property
    def rest_bytes(self) -> int:
        """Computes what was allocated and is not known apart: activations, temporaries, KV cache, the batch."""
        return max(0, self.allocated_bytes - sum(self.measured.values()))

    @property
    def cached_bytes(self) -> int:
        """Computes what the allocator held free: blocks and ends of blocks too small for the request."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def others_bytes(self) -> int:
        """Computes what other processes had of the device."""
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes - self.outside_bytes)

    @property
    def needed_bytes(self) -> int:
        """Computes what the process would have held with the request met; without the request if it is unknown."""
        return self.reserved_bytes + self.outside_bytes + (self.segment_bytes or 0)
