"""Predictions and probes of a card of 128 MiB, in MiB."""

from nouns import TRL_DEFAULTS, memory_of

from autotrain_mem.support.units import MIB
from autotrain_mem.types import Estimate, Hardware, Knobs, MemoryReading, Owner, Phase, PhasePeak, Probe, StepTime

BUDGET = 100 * MIB
CARD = Hardware(name="toy", origin="imagined", total_bytes=128 * MIB, free_bytes=104 * MIB, non_torch_bytes=0)
ROW_TOKENS = 300


def predicted(peak_mib: int, *, load_mib: int = 1, knobs: Knobs = TRL_DEFAULTS, hardware: Hardware = CARD) -> Estimate:
    """Nothing is cached."""
    peak, load = peak_mib * MIB, load_mib * MIB
    memory = memory_of(
        peak,
        phases={Phase.LOAD: load, Phase.FORWARD: peak, Phase.BACKWARD: peak},
        owners_at_peak={Owner.WEIGHTS: load, Owner.ACTIVATIONS: peak - load},
    )
    time = StepTime(tokens=float(knobs.per_device_train_batch_size), phases={Phase.FORWARD: 1.0})
    return Estimate(knobs=knobs, hardware=hardware, memory=memory, budget_bytes=BUDGET, time=time)


def probe(
    peak_mib: int,
    *,
    load_mib: int = 1,
    cached_mib: int = 0,
    retries: int = 0,
    knobs: Knobs = TRL_DEFAULTS,
    fits: bool = True,
    refused_in: Phase | None = None,
) -> Probe:
    """That ended well, or was refused: with the peaks of loading and of what comes up to that phase."""
    peaks = {}
    for phase in (Phase.LOAD, Phase.FORWARD, Phase.BACKWARD):
        allocated = load_mib * MIB if phase is Phase.LOAD else peak_mib * MIB
        peaks[phase] = PhasePeak(allocated_bytes=allocated, reserved_bytes=allocated + cached_mib * MIB)
        if phase is refused_in:
            break
    reading = MemoryReading(
        allocated_bytes=load_mib * MIB,
        peak_allocated_bytes=max(peak.allocated_bytes for peak in peaks.values()),
        reserved_bytes=peak_mib * MIB,
        peak_reserved_bytes=max(peak.reserved_bytes for peak in peaks.values()),
        num_alloc_retries=retries,
    )
    return Probe(
        knobs=knobs,
        fits=fits,
        measured=reading,
        phases=peaks,
        row_tokens=ROW_TOKENS,
        non_torch_bytes=0,
        step_seconds=0.5,
        seconds=3.1,
        refused="CUDA out of memory." if refused_in else "",
        refused_in=refused_in,
    )
