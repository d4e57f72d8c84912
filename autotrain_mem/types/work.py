"""Defines a run's workload, which is independent of the GPU, and the time of a step on a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Self

from autotrain_mem.support.codec import Form


class Phase(StrEnum):
    """Names a phase of a run."""

    LOAD = "load"
    GENERATE = "generate"
    """Completions are sampled, which takes a KV cache and the logits of each token."""
    SCORE = "score"
    """Completions are scored without gradients, for rewards, values, and old and reference log-probabilities."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
    EVALUATE = "evaluate"
    SAVE = "save"


class Kind(StrEnum):
    """Names the kind of an operator, which determines the device rate that bounds its time besides memory bandwidth."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    """A fused attention kernel; its FLOPs grow with the square of the row length."""
    POINTWISE = "pointwise"
    """An operator bound by memory bandwidth: elementwise, a reduction, a copy, a dequantization."""
    OVERLAPPED_COPY = "overlapped_copy"
    """A copy to or from the host on a separate stream, which overlaps with computation."""
    COPY = "copy"
    """A blocking copy to or from the host."""
    HOST_STEP = "host_step"
    """The optimizer's update in host memory, while the device waits."""
    COLLECTIVE = "collective"
    """Communication among the processes of one node, which overlaps with computation. Its bytes are those that each
    device sends, and also receives: S x (N - 1) / N for an all-gather of S bytes among N devices, twice as many for an
    all-reduce (nccl-tests, ``doc/PERFORMANCE.md``: bus bandwidth)."""
    NETWORK_COLLECTIVE = "network_collective"
    """A collective among the processes of several nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Holds the work of one operator on operands of fixed shapes in one phase, and how often it runs.

    Example: a linear layer of 4096 x 4096 in bfloat16 on 2048 tokens computes 2 x 2048 x 4096 x 4096 = 69 GFLOP. It
    reads and writes 2 x 2048 x 4096 x 2 bytes, which grow with the tokens, and reads 32 MiB of weights, which do not.
    """

    phase: Phase
    kind: Kind
    dtype: str
    """The dtype of the computation, by its name in torch: ``bfloat16``, ``float32``."""
    flops: int = 0
    """The floating-point operations of one run."""
    bytes: int = 0
    """The bytes that one run reads and writes and that grow with the tokens of a micro-batch."""
    fixed_bytes: int = 0
    """The bytes that one run reads and writes regardless of the tokens: weights, gradients, optimizer state."""
    launches: int = 1
    """The kernel launches of one run."""
    count: float
    """The number of runs. It can be fractional or negative if it was extrapolated from truncated copies."""
    of_chunk: bool = False
    """Whether it runs for each chunk of the loss. More tokens then mean more chunks, not larger ones."""
    of_step: bool = False
    """Whether it runs once per optimizer step, such as the reduction of gradients (``accelerator.py: no_sync``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Holds the work of a few micro-steps and optimizer steps. Equal operators are merged."""

    work: tuple[Work, ...] = ()
    micro_steps: int = 0
    """The number of forward and backward passes."""
    optimizer_steps: int = 0
    """The number of optimizer steps. Each includes one generation and its scoring if completions are sampled."""
    passes: int = 1
    """The passes of one training step over its rows, each with an optimizer step (PPO's epochs)."""
    micro_steps_per_generation: int = 0
    """The micro-steps that train on the completions of one generation; 0 without generation."""

    def extrapolated(self, longer: Self, ratio: float) -> Self:
        """Computes ``self + ratio x (longer - self)``: for copies of 2 and 4 layers, a ratio of 15 gives 32 layers."""
        counts = {_operator(work): work.count * (1 - ratio) for work in self.work}
        for work in longer.work:
            operator = _operator(work)
            counts[operator] = counts.get(operator, 0.0) + work.count * ratio
        return replace(self, work=tuple(replace(operator, count=count) for operator, count in counts.items() if count))

    def with_chunks(self, rehearsed: int, whole: int) -> Self:
        """Scales the work of a loss's chunks from the ``rehearsed`` number of chunks to the ``whole`` number."""
        grown = (replace(one, count=one.count * whole / rehearsed) if one.of_chunk else one for one in self.work)
        return replace(self, work=tuple(grown))

    @property
    def of_chunks(self) -> frozenset[Work]:
        """Returns the operators that run for each chunk of a loss."""
        return frozenset(one for one in self.work if one.of_chunk)

    def without_mask(self) -> Self:
        """Returns the work for rows without padding: a causal kernel skips half of what a masked kernel computes."""
        halved = (replace(each, flops=each.flops // 2) if each.kind is Kind.ATTENTION else each for each in self.work)
        return replace(self, work=tuple(halved))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Holds the predicted time of one optimizer step.

    >>> from autotrain_mem import Phase, StepTime
    >>> StepTime(tokens=4096, phases={Phase.FORWARD: 0.2, Phase.BACKWARD: 0.3}).tokens_per_second
    8192.0
    """

    json_form: ClassVar = Form(
        derived={"step_seconds": "known_step_seconds", "tokens_per_second": "known_tokens_per_second"},
        optional=("scoring_seconds",),
    )

    tokens: float
    """The tokens of one optimizer step over all processes, without padding."""
    phases: Mapping[Phase, float] = field(default_factory=dict)
    """The seconds of one optimizer step by phase."""
    assumed: str = ""
    """The GPU whose rates replace unknown ones, so that the seconds only rank plans. Empty if the rates are known."""
    scoring_seconds: float = 0.0
    """The seconds before the first step in which the reference scores all rows (``precompute_ref_log_probs``)."""

    def of_run(self, optimizer_steps: int) -> float:
        """Returns the seconds of a whole training."""
        return self.scoring_seconds + optimizer_steps * self.step_seconds

    @property
    def step_seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def known_step_seconds(self) -> float | None:
        """Returns the seconds of an optimizer step; None if another GPU's rates were assumed."""
        return None if self.assumed else self.step_seconds

    @property
    def known_tokens_per_second(self) -> float | None:
        return None if self.assumed else self.tokens_per_second


def _operator(work: Work) -> Work:
    return replace(work, count=0.0)
