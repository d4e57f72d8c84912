"""Predictions and probes of a card of 128 MiB, in MiB."""

from collections.abc import Mapping
from typing import NamedTuple

from nouns import TRL_DEFAULTS, memory_of

from autotrain_mem.support.units import MIB
from autotrain_mem.types import Estimate, Hardware, Knobs, Owner, Phase, Probe, StepTime
from autotrain_mem.types.experience import PhasePeak
from autotrain_mem.types.report import MemoryReading

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


class Measured(NamedTuple):
    phases: Mapping[Phase, PhasePeak]
    reading: MemoryReading


def measured(
    peak_mib: int, *, load_mib: int = 1, cached_mib: int = 0, retries: int = 0, upto: Phase = Phase.BACKWARD
) -> Measured:
    """Peaks of loading and of what comes up to a phase."""
    reached = [Phase.LOAD, Phase.FORWARD, Phase.BACKWARD]
    allocated = {phase: load_mib * MIB if phase is Phase.LOAD else peak_mib * MIB for phase in reached}
    peaks = {
        phase: PhasePeak(allocated_bytes=allocated[phase], reserved_bytes=allocated[phase] + cached_mib * MIB)
        for phase in reached[: reached.index(upto) + 1]
    }
    reading = MemoryReading(
        allocated_bytes=load_mib * MIB,
        peak_allocated_bytes=max(peak.allocated_bytes for peak in peaks.values()),
        reserved_bytes=peak_mib * MIB,
        peak_reserved_bytes=max(peak.reserved_bytes for peak in peaks.values()),
        num_alloc_retries=retries,
    )
    return Measured(phases=peaks, reading=reading)


def probe(
    found: Measured,
    *,
    knobs: Knobs = TRL_DEFAULTS,
    fits: bool = True,
    refused_in: Phase | None = None,
    refused: str = "CUDA out of memory.",
    non_torch_bytes: int | None = 0,
) -> Probe:
    """That ended well, or was refused."""
    return Probe(
        knobs=knobs,
        fits=fits,
        measured=found.reading,
        phases=found.phases,
        row_tokens=ROW_TOKENS,
        non_torch_bytes=non_torch_bytes,
        step_seconds=0.5,
        seconds=3.1,
        refused=refused if refused_in else "",
        refused_in=refused_in,
    )
