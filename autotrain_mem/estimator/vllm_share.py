"""Computes the memory that a colocated vLLM engine uses, awake and asleep, and the trainer's peaks beside it."""

import math
from dataclasses import replace
from itertools import islice

from autotrain_mem.estimator.memory import alive_after, largest_modules, owners_of
from autotrain_mem.estimator.replay import DeviceCapacity, allocated_after_each, held_after_each
from autotrain_mem.types import Estimate, Hardware, Job, MemoryEstimate, Phase, ReservedByMode, ReservedEstimate, Trace
from autotrain_mem.types.vllm import ASLEEP_BYTES, ASLEEP_PARALLEL_BYTES, VllmSleep

VLLM_MODE = "colocate"
VLLM_SHARE = 0.3
"""Defaults of ``vllm_mode`` and ``vllm_gpu_memory_utilization``, TRL 1.12 to 1.16 (grpo_config.py, rloo_config.py)."""


def vllm_share_bytes(job: Job, hardware: Hardware) -> int:
    """Returns the bytes of a colocated engine: a share of the card's total memory; 0 without an engine on this card.

    vLLM sizes its KV cache so that weights, activations and cache make up the share (vllm/v1/worker/utils.py:
    request_memory). A card of 24 GiB gives 7.2 GiB by default.
    """
    if not _is_here(job):
        return 0
    return math.ceil(hardware.total_bytes * float(job.arguments.get("vllm_gpu_memory_utilization", VLLM_SHARE)))


def sleeps(job: Job) -> bool:
    """Returns whether a colocated engine releases its memory while it does not generate."""
    return _is_here(job) and bool(job.arguments.get("vllm_enable_sleep_mode"))


def _is_here(job: Job) -> bool:
    return bool(job.arguments.get("use_vllm")) and job.arguments.get("vllm_mode", VLLM_MODE) == "colocate"


def asleep_bytes(job: Job, hardware: Hardware) -> int:
    """Returns the bytes that the engine always holds: its share, or less if it sleeps between generations.

    TRL uses sleep level 2, which releases weights and KV cache without a copy on the host
    (``trl/generation/vllm_generation.py: generate``, TRL 1.12 to 1.16; vllm/device_allocator/cumem.py: CuMemAllocator).
    """
    share_bytes = vllm_share_bytes(job, hardware)
    if not sleeps(job):
        return share_bytes
    is_parallel = int(job.arguments.get("vllm_tensor_parallel_size", 1)) > 1
    return min(share_bytes, ASLEEP_PARALLEL_BYTES if is_parallel else ASLEEP_BYTES)


def with_sleep(estimate: Estimate, awake: MemoryEstimate | None, *, asleep_bytes: int) -> Estimate:
    """Returns the estimate for the state of the engine that needs more memory: awake or asleep. ``estimate`` has the
    peaks of the whole run and the engine's whole share. ``awake`` has the peaks of the moments in which it is awake."""
    if awake is None:
        return estimate
    sleep = VllmSleep(
        awake_bytes=estimate.vllm_share_bytes,
        asleep_bytes=asleep_bytes,
        reserved_awake_bytes=awake.reserved.modes[estimate.grows].peak_reserved_bytes,
        reserved_asleep_bytes=estimate.reserved_bytes,
    )
    if sleep.is_decided_awake and estimate.reserved.fits:
        return replace(estimate, memory=awake, vllm_sleep=sleep)
    return replace(estimate, vllm_share_bytes=asleep_bytes, vllm_sleep=sleep)


def estimate_while_awake(trace: Trace, room: DeviceCapacity, whole: MemoryEstimate) -> MemoryEstimate | None:
    """Returns the peaks of the moments in which a colocated engine is awake; None if it never sleeps.

    TRL empties torch's cache before the engine allocates its weights, but not before the engine allocates its KV cache
    (``trl/generation/vllm_generation.py: sync_weights, generate``). What torch reserves while the weights are sent, or
    still holds when the KV cache is allocated, is on the card beside the engine's share. ``room``: the allocator's
    settings; its capacity is ignored, since vLLM's own request is the one that fails. ``whole``: the estimate of the
    whole run, whose other fields are copied."""
    moments = [moment for span in trace.awake() for moment in range(span.start, span.stop + 1)]
    if not moments:
        return None
    allocated = [0, *allocated_after_each(trace)]
    peak = max(moments, key=allocated.__getitem__)
    at_peak = [trace.blocks[number - 1] for number in alive_after(islice(trace.events, peak))]
    phases: dict[Phase, int] = {}
    phase_of = [Phase.LOAD, *trace.phases()]
    for moment in moments:  # each is the number of events before it
        phases[phase_of[moment]] = max(phases.get(phase_of[moment], 0), allocated[moment])

    def reserved_at(grows: bool) -> ReservedEstimate:
        held = [(0, 0), *held_after_each(trace, room.endless, grows=grows)]
        reserved_bytes, allocated_bytes = max((held[moment] for moment in moments), key=lambda each: each[0])
        return ReservedEstimate(
            peak_allocated_bytes=max(held[moment][1] for moment in moments),
            peak_reserved_bytes=reserved_bytes,
            peak_limited_bytes=reserved_bytes,
            slack_bytes=reserved_bytes - allocated_bytes,
        )

    return replace(
        whole,
        peak_allocated_bytes=allocated[peak],
        peak_phase=max(phases, key=phases.__getitem__),
        phases=phases,
        owners_at_peak=owners_of(at_peak),
        modules_at_peak=largest_modules(at_peak),
        reserved=ReservedByMode.of_both(reserved_at),
    )
