"""Defines the report of a training run: predicted against measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotrain_mem.settings.knobs import Knobs
from autotrain_mem.support.codec import Form
from autotrain_mem.support.lazy_names import html_of
from autotrain_mem.types.trace import Owner, Trained
from autotrain_mem.types.work import Phase

REWARD_NAMES = ("reward", "objective/scores")
"""Names of the mean reward in the logs of GRPO and RLOO, and of PPO (``trl/trainer/grpo_trainer.py: log`` and
``trl/experimental/ppo/ppo_trainer.py: train``)."""
RUN_NAME = "run.json"
"""The file in the output folder that holds a Report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """Holds the figures of a device's allocator, in bytes.

    >>> from autotrain_mem import MemoryReading
    >>> MemoryReading.from_stats({"reserved_bytes.all.peak": 2097152}).peak_reserved_bytes
    2097152
    """

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int

    @classmethod
    def from_stats(cls, stats: Mapping[str, int]) -> MemoryReading:
        """Reads ``torch.cuda.memory_stats()``; missing figures, as before a CUDA context is opened, are 0."""
        return cls(
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
            num_alloc_retries=stats.get("num_alloc_retries", 0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Holds one finished run: predicted against measured. Sizes in bytes, time in seconds.

    >>> from autotrain_mem import Knobs, MemoryReading, Report
    >>> measured = MemoryReading.from_stats({"allocated_bytes.all.peak": 1000, "reserved_bytes.all.peak": 2000})
    >>> predicted = {"predicted_peak_bytes": 1010, "predicted_peak_reserved_bytes": 2000}
    >>> rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    >>> knobs = Knobs(**rows, use_peft=False, dtype="bfloat16", optim="adamw_torch_fused")
    >>> losses = {"schedule": "linear", "step_tokens": 8192.0, "first_loss": 6.3, "last_loss": 1.0}
    >>> report = Report(output_dir="run", steps=60, knobs=knobs, **losses, **predicted, measured=measured, seconds=44.0)
    >>> report.prediction_error, report.reserved_prediction_error
    (0.01, 0.0)
    """

    json_form: ClassVar = Form(
        schema="autofit.run/1", derived={name: name for name in ("prediction_error", "reserved_prediction_error")}
    )

    output_dir: str
    steps: int
    """Completed optimizer steps, including those before a resume."""
    began_at: int = 0
    """The step of the checkpoint that this training resumed from; 0 without one."""
    knobs: Knobs
    """The settings that the training ended with."""
    trained: Trained | None = None
    """Trained and total parameters; None if the plan does not record them."""
    schedule: str
    """The learning rate's schedule, by transformers' name; its peak is one of the knobs."""
    step_tokens: float
    """Planned tokens of an optimizer step: the mean, without padding."""
    first_loss: float | None
    last_loss: float | None
    """None if no loss was logged, or once there is a :attr:`not_finite_step`."""
    not_finite_step: int | None = None
    """The first step with a non-finite gradient; training from there on is useless."""
    first_reward: float | None = None
    """Mean reward of the first completions; None if completions are not rewarded."""
    last_reward: float | None = None
    predicted_peak_bytes: int
    """Predicted peak of allocated memory."""
    predicted_peak_reserved_bytes: int
    """Predicted peak of reserved memory, as in :attr:`Estimate.reserved_bytes`."""
    measured: MemoryReading | None
    """Peaks over all processes with the plan's settings, the rest at the end; None if it cannot be measured (CPU)."""
    longest_rows_first: bool = False
    """Whether the longest rows ran before the first step, so that the peak includes theirs."""
    seconds: float
    incidents: int = 0
    """Out-of-memory errors that the run survived; ``run.json`` lists them."""
    restarts: int = 0
    """Number of times that another process resumed the run."""
    started_at: str = ""
    """Start of its first process, in ISO 8601 and UTC."""
    ended_at: str = ""

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def has_trained(self) -> bool:
        """Returns whether any step was left to train."""
        return self.steps != self.began_at

    @property
    def prediction_error(self) -> float | None:
        """Computes (predicted - measured) / measured for the peak of allocated bytes; None if nothing was measured."""
        return None if self.measured is None else _error(self.predicted_peak_bytes, self.measured.peak_allocated_bytes)

    @property
    def reserved_prediction_error(self) -> float | None:
        """Computes the same for the peak of reserved bytes."""
        if self.measured is None:
            return None
        return _error(self.predicted_peak_reserved_bytes, self.measured.peak_reserved_bytes)


def _error(predicted: int, measured: int) -> float | None:
    return (predicted - measured) / measured if measured else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """Describes an out-of-memory error in figures, at the moment of the request that failed. All sizes are bytes.

    ``free + reserved + outside + others == total`` and ``allocated + cached == reserved`` hold.

    >>> from autotrain_mem.types.report import Shortage
    >>> from autotrain_mem import Owner, Phase
    >>> shortage = Shortage(
    ...     phase=Phase.BACKWARD, step=12, requested_bytes=450, segment_bytes=500, total_bytes=4000, free_bytes=200,
    ...     allocated_bytes=2500, reserved_bytes=3000, outside_bytes=100, measured={Owner.WEIGHTS: 1000},
    ... )
    >>> shortage.rest_bytes, shortage.others_bytes, shortage.needed_bytes
    (1500, 700, 3600)
    """

    phase: Phase | None
    """None if unknown."""
    step: int
    """Optimizer steps completed before."""
    requested_bytes: int | None
    """Bytes requested for the tensor, or ``segment_bytes``; None if the library did not report them."""
    segment_bytes: int | None
    """Bytes that the allocator requested from the device for it: a whole segment, which may be larger."""
    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    """Bytes of tensors in torch's allocator."""
    reserved_bytes: int
    """Device bytes that the allocator held."""
    outside_bytes: int
    """Device bytes of the process outside the allocator: the CUDA context, cuBLAS, NCCL, a vLLM engine."""
    measured: Mapping[Owner, int]
    """Allocated bytes by known owner: all of them on a simulated GPU, else weights, gradients and optimizer state."""

    @property
    def rest_bytes(self) -> int:
        """Computes the allocated bytes without a known owner: activations, temporaries, KV cache, the batch."""
        return max(0, self.allocated_bytes - sum(self.measured.values()))

    @property
    def cached_bytes(self) -> int:
        """Computes the reserved but unallocated bytes: blocks and ends of blocks too small for the request."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def others_bytes(self) -> int:
        """Computes the bytes that other processes held on the device."""
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes - self.outside_bytes)

    @property
    def needed_bytes(self) -> int:
        """Computes the bytes that the process would have held after the request; an unknown request counts as 0."""
        return self.reserved_bytes + self.outside_bytes + (self.segment_bytes or 0)
