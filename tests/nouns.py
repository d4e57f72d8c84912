"""Example nouns that many tests start from; each changes what it is about with ``dataclasses.replace``."""

from dataclasses import replace
from typing import Any

from autotrain_mem.types import Knobs, MemoryEstimate, Phase, ReservedByMode, ReservedEstimate

TRL_DEFAULTS = Knobs(
    per_device_train_batch_size=8,
    gradient_accumulation_steps=1,
    max_length=1024,
    gradient_checkpointing=True,
    packing=False,
    use_peft=False,
    dtype="float32",
    optim="adamw_torch_fused",
    learning_rate=2e-5,
)
"""The defaults of TRL 1.12's SFTConfig and ModelConfig."""


def divided(knobs: Knobs, rows: int, times: int, **changes: Any) -> Knobs:
    """These settings with steps of ``times`` micro-batches of ``rows`` rows each, and with other changes."""
    return replace(knobs, per_device_train_batch_size=rows, gradient_accumulation_steps=times, **changes)


def reserved(
    peak_bytes: int, *, slack_bytes: int = 0, retries: int = 0, refused_bytes: int | None = None
) -> ReservedEstimate:
    return ReservedEstimate(
        peak_allocated_bytes=peak_bytes - slack_bytes,
        peak_reserved_bytes=peak_bytes,
        peak_limited_bytes=peak_bytes,
        slack_bytes=slack_bytes,
        num_alloc_retries=retries,
        largest_refused_bytes=refused_bytes,
    )


def memory_of(peak_bytes: int = 1, **facts: Any) -> MemoryEstimate:
    """A rehearsal in which nothing is cached, and of which nothing is told but these facts."""
    mode = reserved(peak_bytes)
    nothing: dict[str, Any] = {"phases": {}, "owners_at_peak": {}, "modules_at_peak": (), "not_counted": ()}
    nothing |= {"reserved": ReservedByMode(native=mode, expandable_segments=mode), "rehearsal_seconds": 1.0}
    return MemoryEstimate(**{"peak_allocated_bytes": peak_bytes, "peak_phase": Phase.BACKWARD, **nothing, **facts})
