"""Predicts how long an optimizer step takes on a card: a roofline over what was rehearsed.

The device is busy with each operator for as long as its FLOPs take at the card's rate, or its bytes at the bandwidth of
its memory, whichever is longer. The host meanwhile launches what comes next: a phase lasts as long as the busier of the
two. Copies on a stream of their own run beside both; an optimizer on the host runs after them.

Each constant is one figure for every card and model, and none is fitted to a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.spec.phase import Phase
from autotrain_mem.spec.work import Kind, StepTime, Work, Workload

MATMUL_EFFICIENCY = 0.75
"""Of the data sheet's FLOP/s. The best of many shapes reaches 0.86 on an A100 SXM, 0.82 on an A100 PCIe, 0.80 on an
H100 SXM and 0.78 on a B200 (stas00/ml-engineering, ``compute/accelerator/README.md``: Maximum Achievable Matmul FLOPS);
a model's shapes are not the best ones."""

ATTENTION_EFFICIENCY = 0.5
"""FlashAttention-2 (arXiv:2307.08691, section 4.1): forward 50 to 73 % and backward 40 to 63 % of an A100's peak."""

BANDWIDTH_EFFICIENCY = 0.8
"""Large copies get about 0.9 of the data sheet's bandwidth; kernels that convert, broadcast or reduce get less."""

LINK_EFFICIENCY = 0.8
"""Of PCI Express, for pinned memory: 25 of 31.5 GB/s at generation 4 (NVIDIA's bandwidthTest)."""

HOST_BYTES_PER_SECOND = 40 * 10**9
"""Read and written by an optimizer's step on the host: two channels of DDR4-3200 have 51 GB/s, of which 80 %."""

LAUNCH_SECONDS = 12e-6
"""Of the host for one kernel of eager PyTorch. An operator alone, issued from Python, takes 4 to 5 microseconds;
between two that launch a kernel stand modules and hooks of transformers and PEFT, autograd, and as many views. An
estimate: hosts differ by a factor of two."""

KERNEL_SECONDS = 2e-6
"""Of the device for each kernel besides: between its launch and its first block, and between the last and the next
kernel. Full waves come on top, so that twice the rows never take twice the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rates:
    bf16: float
    fp16: float
    fp32: float
    bandwidth: float
    link: float

    def flops(self, dtype: str) -> float:
        """Per second, of products in this dtype; int8 runs at least as fast as fp16 on every card that has it."""
        return {"bfloat16": self.bf16, "float16": self.fp16, "int8": self.fp16}.get(dtype, self.fp32)


_REFERENCE = "a100-80gb"
_REFERENCE_RATES = _Rates(bf16=312e12, fp16=312e12, fp32=19.5e12, bandwidth=2039e9, link=31.5e9)
"""Taken for whatever has no rates of its own: NVIDIA's data sheet. Plans are ranked by them alike."""


def step_time(
    workload: Workload, hardware: Hardware, *, gradient_accumulation_steps: int, tokens: float, share: float = 1.0
) -> StepTime:
    """One optimizer step: its micro-steps, the update, and its part of a generation.

    Args:
        tokens: Tokens of one optimizer step that count.
        share: Of the rehearsed, longest rows, what rows have on average with their padding. FLOPs and bytes that grow
            with the tokens shrink with it, attention's FLOPs with its square; weights, launches and the update do not.
    """
    rates, assumed = _rates(hardware)
    repeats = _repeats(workload, gradient_accumulation_steps)
    phases = {
        phase: max(0.0, _seconds(_scaled(workload, phase, share), rates)) * times
        for phase, times in repeats.items()
        if times and any(work.phase is phase for work in workload.work)
    }
    return StepTime(tokens=tokens, phases=phases, assumed=assumed)


def _rates(hardware: Hardware) -> tuple[_Rates, str]:
    """The card's own, and "", or those of the reference card, and its name."""
    fp16, fp32 = hardware.fp16_flops_per_second, hardware.fp32_flops_per_second
    bandwidth, link = hardware.bandwidth_bytes_per_second, hardware.host_link_bytes_per_second
    if fp16 is None or fp32 is None or bandwidth is None or link is None:
        return _REFERENCE_RATES, _REFERENCE
    # Without tensor cores for it, bf16 is computed in fp32.
    bf16 = hardware.bf16_flops_per_second or fp32
    return _Rates(bf16=bf16, fp16=fp16, fp32=fp32, bandwidth=bandwidth, link=link), ""


def _repeats(workload: Workload, gradient_accumulation_steps: int) -> dict[Phase, float]:
    """Computes how often what was rehearsed comes in one training step.

    GRPO with 8 micro-steps per generation and an accumulation of 4 generates in every second step.
    """
    optimizer_steps = workload.passes
    micro_steps = optimizer_steps * gradient_accumulation_steps
    per_generation = workload.micro_steps_per_generation
    generations = micro_steps / per_generation if per_generation else 0.0
    each_micro_step = micro_steps / max(workload.micro_steps, 1)
    each_optimizer_step = 1 / max(workload.optimizer_steps, 1)
    return {
        Phase.GENERATE: generations * each_optimizer_step,
        Phase.SCORE: generations * each_optimizer_step,
        Phase.FORWARD: each_micro_step,
        Phase.BACKWARD: each_micro_step,
        Phase.OPTIMIZER_STEP: optimizer_steps * each_optimizer_step,
    }


@dataclass(frozen=True, slots=True)
class _Load:
    """Work with its tokens scaled."""

    work: Work
    flops: float
    moved_bytes: float


def _scaled(workload: Workload, phase: Phase, share: float) -> Iterable[_Load]:
    tokens = 1.0 if phase is Phase.OPTIMIZER_STEP else share
    for work in workload.work:
        if work.phase is phase:
            yield _of_chunk(work, tokens) if work.of_chunk else _of_rows(work, tokens)


def _of_rows(work: Work, share: float) -> _Load:
    quadratic = share * share if work.kind is Kind.ATTENTION else share
    return _Load(work, work.flops * quadratic, work.bytes * share + work.fixed_bytes)


def _of_chunk(work: Work, share: float) -> _Load:
    """Fewer tokens are fewer chunks."""
    fewer = replace(work, count=work.count * share)
    return _Load(fewer, work.flops, work.bytes + work.fixed_bytes)


def _seconds(loads: Iterable[_Load], rates: _Rates) -> float:
    """Sums up all that one phase has run."""
    device = host = beside = after = 0.0
    for load in loads:
        count, moved = load.work.count, load.moved_bytes
        host += count * load.work.launches * LAUNCH_SECONDS
        match load.work.kind:
            case Kind.OVERLAPPED_COPY:
                beside += count * moved / (rates.link * LINK_EFFICIENCY)
            case Kind.COPY:
                after += count * moved / (rates.link * LINK_EFFICIENCY)
            case Kind.HOST_STEP:
                after += count * moved / HOST_BYTES_PER_SECOND
            case _:
                device += count * _busy(load, rates)
    return max(device, host, beside) + after


def _busy(load: _Load, rates: _Rates) -> float:
    """Computes how long the device is busy with it."""
    work = load.work
    efficiency = ATTENTION_EFFICIENCY if work.kind is Kind.ATTENTION else MATMUL_EFFICIENCY
    computing = load.flops / (rates.flops(work.dtype) * efficiency)
    moving = load.moved_bytes / (rates.bandwidth * BANDWIDTH_EFFICIENCY)
    return max(computing, moving) + work.launches * KERNEL_SECONDS
