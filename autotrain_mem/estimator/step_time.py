"""Predicts how long an optimizer step takes on a card: a roofline over what was rehearsed.

The device is busy with each operator for as long as its FLOPs take at the card's rate, or its bytes at the bandwidth of
its memory, whichever is longer. The host meanwhile launches what comes next: a phase lasts as long as the busier of the
two. Copies on a stream of their own run beside both; an optimizer on the host runs after them.

Each constant is one figure for every card and model, and none is fitted to a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.spec.work import Kind, Phase, StepTime, Work, Workload

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
    """Predicts one optimizer step: its micro-steps, the update, and its part of a generation.

    Args:
        tokens: Tokens of one optimizer step that count.
        share: Of the rehearsed, longest rows, what rows have on average with their padding. FLOPs and bytes that grow
            with the tokens shrink with it, attention's FLOPs with its square; weights, launches and the update do not.
    """
    rates, assumed = _rates(hardware)
    repeats = _repeats(workload, gradient_accumulation_steps)
    phases = {
        phase: max(0.0, _seconds(works, rates, 1.0 if phase is Phase.OPTIMIZER_STEP else share)) * times
        for phase, times in repeats.items()
        if times and (works := [work for work in workload.work if work.phase is phase])
    }
    return StepTime(tokens=tokens, phases=phases, assumed=assumed)


def _rates(hardware: Hardware) -> tuple[_Rates, str]:
    """Returns the card's own, and "", or those of the reference card, and its name."""
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


def _seconds(works: Iterable[Work], rates: _Rates, share: float) -> float:
    """Sums up all that one phase has run, with a share of the tokens that were rehearsed."""
    device = host = beside = after = 0.0
    for work in works:
        # Fewer tokens are fewer chunks.
        count, tokens = (work.count * share, 1.0) if work.of_chunk else (work.count, share)
        moved = work.bytes * tokens + work.fixed_bytes
        host += count * work.launches * LAUNCH_SECONDS
        match work.kind:
            case Kind.OVERLAPPED_COPY:
                beside += count * moved / (rates.link * LINK_EFFICIENCY)
            case Kind.COPY:
                after += count * moved / (rates.link * LINK_EFFICIENCY)
            case Kind.HOST_STEP:
                after += count * moved / HOST_BYTES_PER_SECOND
            case _:
                is_attention = work.kind is Kind.ATTENTION
                flops = work.flops * (tokens * tokens if is_attention else tokens)
                efficiency = ATTENTION_EFFICIENCY if is_attention else MATMUL_EFFICIENCY
                computing = flops / (rates.flops(work.dtype) * efficiency)
                moving = moved / (rates.bandwidth * BANDWIDTH_EFFICIENCY)
                device += count * (max(computing, moving) + work.launches * KERNEL_SECONDS)
    return max(device, host, beside) + after
