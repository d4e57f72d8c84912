"""What a configuration will need, and whether that is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.spec.knobs import Knobs
from autotrain_mem.spec.trace import Owner, Phase

ESTIMATE_SCHEMA = "autofit.estimate/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Peaks of one rehearsed run, in bytes. ``sum(owners_at_peak.values()) == peak_allocated_bytes`` holds."""

    peak_allocated_bytes: int
    """Largest sum of live blocks, each rounded as CUDA's allocator rounds it (512 bytes)."""
    peak_phase: Phase
    phases: Mapping[Phase, int]
    """Peak allocated bytes per phase, in the order in which the phases were first met."""
    owners_at_peak: Mapping[Owner, int]
    modules_at_peak: tuple[tuple[str, int], ...]
    """The largest holders of activations and temporaries at the peak, by module name, largest first."""
    reserve_allowance_bytes: int
    """Stated allowance for what the allocator reserves beyond what is allocated, until reserved bytes are simulated."""
    not_counted: tuple[str, ...]
    rehearsal_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """One configuration against one device."""

    knobs: Knobs
    hardware: Hardware
    memory: MemoryEstimate
    budget_bytes: int
    vllm_share_bytes: int = 0
    """What a vLLM engine on the same card takes for itself: weights and KV cache in a pool of its own, from its start
    to its end."""

    @property
    def outside_bytes(self) -> int:
        """What the run holds outside the trainer's own allocator."""
        return self.hardware.non_torch_bytes + self.vllm_share_bytes

    @property
    def required_bytes(self) -> int:
        """What must fit the budget: allocated bytes, the allowance for reserved ones, and what lies outside."""
        return self.memory.peak_allocated_bytes + self.memory.reserve_allowance_bytes + self.outside_bytes

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "schema": ESTIMATE_SCHEMA,
            "knobs": self.knobs.to_json(),
            "gpu": self.hardware.name,
            "peak_allocated_bytes": memory.peak_allocated_bytes,
            "peak_reserved_bytes": None,
            "reserve_allowance_bytes": memory.reserve_allowance_bytes,
            "non_torch_bytes": self.hardware.non_torch_bytes,
            "vllm_share_bytes": self.vllm_share_bytes,
            "required_bytes": self.required_bytes,
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "peak_phase": memory.peak_phase.value,
            "phases": [{"phase": phase.value, "peak_bytes": peak} for phase, peak in memory.phases.items()],
            "owners_at_peak": {owner.value: size for owner, size in memory.owners_at_peak.items()},
            "modules_at_peak": [{"module": name, "bytes": size} for name, size in memory.modules_at_peak],
            "not_counted": list(memory.not_counted),
            "rehearsal_seconds": round(memory.rehearsal_seconds, 3),
        }
