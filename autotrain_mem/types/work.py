"""A workload is what a run computes and moves, whatever the card; a step's time is what that takes on one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from autotrain_mem.support.codec import Form


class Phase(StrEnum):
    """Returns where in the run an event happened."""

    LOAD = "load"
    GENERATE = "generate"
    """Completions are sampled: the KV cache and the logits of each step."""
    SCORE = "score"
    """Completions are judged, without gradients: rewards, values, old and reference log-probabilities."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
    EVALUATE = "evaluate"
    SAVE = "save"


class Kind(StrEnum):
    """Returns which of a device's rates an operator is held to, beside that of its memory."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    """A fused kernel; its FLOPs grow with the square of the rows' length."""
    POINTWISE = "pointwise"
    """Whatever is bound by memory: element by element, reductions, copies, dequantization."""
    OVERLAPPED_COPY = "overlapped_copy"
    """To or from the host, on a stream beside the one that computes."""
    COPY = "copy"
    """To or from the host, while nothing is computed."""
    HOST_STEP = "host_step"
    """The optimizer's update in the host's memory, while the device waits."""
    COLLECTIVE = "collective"
    """Among the processes of one node, beside what is computed. Its bytes are what each device sends, and receives: of
    an all-gather of S bytes among N that is S x (N - 1) / N, of an all-reduce twice as much (nccl-tests,
    ``doc/PERFORMANCE.md``: bus bandwidth)."""
    NETWORK_COLLECTIVE = "network_collective"
    """The same among processes of several nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Counts one operator on operands of certain shapes, in one phase, and how often it runs.

    Example: a linear layer of 4096 x 4096 in bfloat16 on 2048 tokens computes 2 x 2048 x 4096 x 4096 = 69 GFLOP, reads
    and writes 2 x 2048 x 4096 x 2 bytes that grow with the tokens, and reads 32 MiB of weights that do not.
    """

    phase: Phase
    kind: Kind
    dtype: str
    """What it computes in, as torch calls it without ``torch.``: ``bfloat16``, ``float32``."""
    flops: int
    bytes: int
    """Read and written, and growing with the tokens of a micro-batch."""
    fixed_bytes: int
    """Read and written whatever the tokens: weights, gradients, optimizer state."""
    launches: int
    """Kernels."""
    count: float
    """How many of these ran. Real, and below 0 for some, where it is extrapolated from copies of fewer layers."""
    of_chunk: bool = False
    """Whether it is done for each chunk of the loss: with more tokens there are more of these, and none is larger."""
    of_step: bool = False
    """Whether it is done once in an optimizer step, however many micro-steps this has: gradients are reduced in the
    last one (``accelerate/accelerator.py: no_sync``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Holds the work of a few micro-steps and optimizer steps, like operators taken together."""

    work: tuple[Work, ...] = ()
    micro_steps: int = 0
    """How many forward and backward passes are in it."""
    optimizer_steps: int = 0
    """How many optimizer steps, each with one generation and its scoring where completions are sampled."""
    passes: int = 1
    """How often one training step goes over its rows, with an optimizer step each time: PPO's epochs."""
    micro_steps_per_generation: int = 0
    """How many micro-steps train on what is generated at once; 0 where nothing is generated."""

    def extrapolated(self, longer: Workload, ratio: float) -> Workload:
        """Computes ``self + ratio x (longer - self)``: of copies of 2 and 4 layers, the work of 32 by a ratio of 15."""
        counts = {_operator(work): work.count * (1 - ratio) for work in self.work}
        for work in longer.work:
            operator = _operator(work)
            counts[operator] = counts.get(operator, 0.0) + work.count * ratio
        return replace(self, work=tuple(replace(operator, count=count) for operator, count in counts.items() if count))

    def with_chunks(self, rehearsed: int, whole: int) -> Workload:
        """Computes the work with all chunks of a loss, of which some were rehearsed, by what is marked as theirs."""
        grown = (replace(one, count=one.count * whole / rehearsed) if one.of_chunk else one for one in self.work)
        return replace(self, work=tuple(grown))

    @property
    def of_chunks(self) -> frozenset[Work]:
        """Returns what chunks of a loss do, all of them together."""
        return frozenset(one for one in self.work if one.of_chunk)

    def of_rows(self, ratio: float) -> Workload:
        """Scales the work to that many times the rows in a micro-batch: 2.0 for twice as many. Never too slow.

        A loss in chunks writes, for each of them, a gradient for all tokens (its slices' backward): that is left out
        of what grows, and is taken to shrink.
        """
        return replace(self, work=tuple(_grown(work, ratio) for work in self.work))

    def without_mask(self) -> Workload:
        """Returns the work where no row is padded: a causal kernel skips half of what a masked one computes."""
        halved = (replace(each, flops=each.flops // 2) if each.kind is Kind.ATTENTION else each for each in self.work)
        return replace(self, work=tuple(halved))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Describes how long one optimizer step takes, as predicted.

    >>> from autotrain_mem import Phase, StepTime
    >>> StepTime(tokens=4096, phases={Phase.FORWARD: 0.2, Phase.BACKWARD: 0.3}).tokens_per_second
    8192.0
    """

    json_form: ClassVar = Form(
        derived={"step_seconds": "known_step_seconds", "tokens_per_second": "known_tokens_per_second"}
    )

    tokens: float
    """Tokens of one optimizer step that count: of all processes, without padding."""
    phases: Mapping[Phase, float] = field(default_factory=dict)
    """Seconds of one optimizer step by phase."""
    assumed: str = ""
    """Which card's rates were taken for one whose rates are unknown: such seconds rank plans and say no more. Empty
    where the card's own are known."""

    @property
    def step_seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def known_step_seconds(self) -> float | None:
        """Returns the seconds of a step; None on a card whose rates were assumed: those rank plans, and are not
        shown."""
        return None if self.assumed else self.step_seconds

    @property
    def known_tokens_per_second(self) -> float | None:
        return None if self.assumed else self.tokens_per_second


def _grown(work: Work, ratio: float) -> Work:
    """Scales one operator's work to more rows; the update does not grow with them."""
    if work.phase is Phase.OPTIMIZER_STEP:
        return work
    if work.of_chunk:
        moved = work.bytes if work.flops or ratio > 1 else round(work.bytes * ratio)
        return replace(work, count=work.count * ratio, bytes=moved)
    return replace(work, flops=round(work.flops * ratio), bytes=round(work.bytes * ratio))


def _operator(work: Work) -> Work:
    """Returns the operator by itself, however often it ran."""
    return replace(work, count=0.0)
