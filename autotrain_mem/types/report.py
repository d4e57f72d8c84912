"""Defines the report of a training run, which compares predicted and measured memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from autotrain_mem.settings.knobs import Knobs
from autotrain_mem.support.codec import Form
from autotrain_mem.support.lazy_names import ShownInNotebooks
from autotrain_mem.types.trace import Owner, Trained
from autotrain_mem.types.work import Phase

REWARD_NAMES = ("reward", "objective/scores")
"""The names of the mean reward in logs: first that of GRPO and RLOO, then that of PPO (``trl/trainer/grpo_trainer.py:
log`` and ``trl/experimental/ppo/ppo_trainer.py: train``)."""
RUN_NAME = "run.json"
"""The file in the output folder that holds a Report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """Holds the figures of torch's allocator for a device, in bytes, and its number of retries.

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
    def from_stats(cls, stats: Mapping[str, int]) -> Self:
        """Reads ``torch.cuda.memory_stats()``. Missing figures are 0: before a CUDA context exists, all are missing."""
        return cls(
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
            num_alloc_retries=stats.get("num_alloc_retries", 0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(ShownInNotebooks):
    """Holds the predicted and measured figures of one finished run. Sizes are in bytes, times in seconds.

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
    """The completed optimizer steps, including those before a resume."""
    began_at: int = 0
    """The step of the checkpoint that this training resumed from; 0 without one."""
    knobs: Knobs
    """The settings with which the training ended."""
    trained: Trained | None = None
    """The numbers of trained and of all parameters; None if the plan does not record them."""
    schedule: str
    """The learning rate's schedule, by its name in transformers. The knobs hold the peak learning rate."""
    step_tokens: float
    """The planned mean number of tokens in an optimizer step, without padding."""
    first_loss: float | None
    """The first logged loss; None if no loss was logged."""
    last_loss: float | None
    """The last logged loss; None if no loss was logged, or if there is a :attr:`not_finite_step`."""
    not_finite_step: int | None = None
    """The first step with a non-finite gradient, which makes all further training useless; None without one."""
    first_reward: float | None = None
    """The first logged mean reward; None if completions are not rewarded."""
    last_reward: float | None = None
    predicted_peak_bytes: int
    """The predicted peak of allocated memory."""
    predicted_peak_reserved_bytes: int
    """The predicted peak of reserved memory, as in :attr:`Estimate.reserved_bytes`."""
    measured: MemoryReading | None
    """The largest peaks and all retries since the knobs last changed, and the memory held at the end; None on a CPU."""
    budget_bytes: int | None = None
    """What torch may reserve by the plan: the card's budget without the memory outside torch; None if unknown."""
    longest_rows_first: bool = False
    """Whether the longest rows ran before the first step, so that the peaks include theirs."""
    seconds: float
    incidents: int = 0
    """The number of out-of-memory errors that the run survived. ``run.json`` lists them."""
    restarts: int = 0
    """The number of times that another process resumed the run."""
    started_at: str = ""
    """The start of the run's first process, in ISO 8601 and UTC."""
    ended_at: str = ""

    @property
    def has_trained(self) -> bool:
        """Returns whether the training completed any step."""
        return self.steps != self.began_at

    @property
    def prediction_error(self) -> float | None:
        """Computes (predicted - measured) / measured for the peak of allocated memory; None if it was not measured."""
        return None if self.measured is None else _error(self.predicted_peak_bytes, self.measured.peak_allocated_bytes)

    @property
    def reserved_prediction_error(self) -> float | None:
        """Computes (predicted - measured) / measured for the peak of reserved memory; None if it was not measured."""
        if self.measured is None:
            return None
        return _error(self.predicted_peak_reserved_bytes, self.measured.peak_reserved_bytes)


def _error(predicted: int, measured: int) -> float | None:
    return (predicted - measured) / measured if measured else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """Holds the figures of an out-of-memory error at the moment of the failed request. All sizes are in bytes.

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
    """The phase of the failed request; None if unknown."""
    step: int
    """The number of optimizer steps completed before the error."""
    requested_bytes: int | None
    """The bytes requested for the tensor, or ``segment_bytes`` if only that is known; None if both are unknown."""
    segment_bytes: int | None
    """The bytes that the allocator then requested from the device: a whole segment, maybe larger; None if unknown."""
    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    """The bytes of tensors in torch's allocator."""
    reserved_bytes: int
    """The device memory that torch's allocator held."""
    outside_bytes: int
    """The device memory of the process outside the allocator: the CUDA context, cuBLAS, NCCL, a vLLM engine."""
    measured: Mapping[Owner, int]
    """The allocated bytes by owner. On a real GPU, only weights, gradients and optimizer state are listed."""

    @property
    def rest_bytes(self) -> int:
        """Computes the allocated bytes without a known owner: activations, temporaries, KV cache, the batch."""
        return max(0, self.allocated_bytes - sum(self.measured.values()))

    @property
    def cached_bytes(self) -> int:
        """Computes the reserved but unallocated bytes: free blocks, none of which was large enough for the request."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def others_bytes(self) -> int:
        """Computes the bytes that other processes held on the device."""
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes - self.outside_bytes)

    @property
    def needed_bytes(self) -> int:
        """Computes the bytes that the process would have held after the request. An unknown request counts as 0."""
        return self.reserved_bytes + self.outside_bytes + (self.segment_bytes or 0)
