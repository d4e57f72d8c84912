"""Corrects predictions by what probes measured.

Settings that differ from the probed ones only in the rows and lengths of a micro-batch are of the same kind. For these,
each phase gets a line: corrected = measured + scale x (predicted - predicted at the probe). Settings of another kind
hold other tensors: only a probe that did not fit changes their predictions, by adding the missing bytes.

A phase's peak has a static part, which exists once the models are loaded, and a moving part on top. With one probe, an
error in the static part becomes the offset. The scale is the measured moving part divided by the predicted one, since
errors of this part (one saved tensor too many per layer and token) are proportional to it. With two probes of one kind,
the scale is the slope between them. A scale outside 0.5 to 2 is clipped, and the rest becomes the offset. A phase that
no probe reached is corrected by the line of the last phase that a probe reached.

Cached bytes are corrected by a constant, but not if a request failed or the cache was released: then the card's size
limited them. After an out-of-memory error, measured bytes are lower bounds: they only raise a prediction, to at
least one byte more than the budget, plus a twentieth of the budget for each earlier probe that failed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotrain_mem.settings.levers import BATCHES, LEVERS
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support.units import parse_bytes
from autotrain_mem.types import Estimate, Knobs, MemoryEstimate, Owner, Phase, Probe, ReservedByMode, ReservedEstimate

SCALES = (0.5, 2.0)
"""Limits of the scale. No prediction was more than 15 % off a public run (docs/understand/accuracy.md)."""
LEAST_DISTANCE = 0.05
"""Two probes give no slope if their predictions differ by less than this share: measured bytes change by whole segments
of 2 MiB, or 20 MiB for larger blocks (``c10/core/AllocatorConfig.h: kLargeBuffer``)."""
MISTRUST = 0.05
"""Each further probe that fails adds this share of the budget to the bytes that its settings are assumed to need."""

_ASKED = re.compile(r"Tried to allocate (\d+(?:\.\d+)? (?:GiB|MiB|KiB|bytes))")
"""Matches the message of ``c10/cuda/CUDACachingAllocator.cpp: malloc``, whose sizes come from ``format_size``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Holds one probe and its uncorrected prediction."""

    predicted: Estimate
    probe: Probe


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Describes how one phase's prediction is corrected."""

    predicted_bytes: int
    """The prediction for the probed settings."""
    measured_bytes: int
    scale: float = 1.0

    def at(self, predicted_bytes: int) -> int:
        """Returns the corrected prediction for other settings."""
        return max(0, self.measured_bytes + round(self.scale * (predicted_bytes - self.predicted_bytes)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Corrects predictions so that they agree with the probes.

    Example: forward was predicted at 80 MiB, 20 of them weights, and measured at 92, 24 of them weights. The offset is
    4 MiB and the scale is 68 / 60, so half the batch, predicted at 50 MiB, becomes 92 - 30 x 68 / 60 = 58 MiB.
    """

    lines: Mapping[Phase, Line] = field(default_factory=dict)
    """One line for each phase that a probe reached, in the order of the phases."""
    cached_bytes: int = 0
    """Bytes to add to the prediction of the allocator's cache."""
    more_bytes: int = 0
    """Bytes to add to reserved memory as well, since the settings did not fit."""
    measured: Knobs | None = None
    """The probed settings; None applies the correction to all settings alike."""
    missing_bytes: int = 0
    """Lower bound of the rehearsal's error; predictions of settings of another kind are raised by it."""

    def of(self, memory: MemoryEstimate, knobs: Knobs) -> MemoryEstimate:
        """Returns the corrected prediction, whose owners still add up to the peak."""
        if self.measured is not None and _kind(knobs) != _kind(self.measured):
            return Correction(more_bytes=self.missing_bytes).of(memory, knobs)
        if not (self.lines or self.cached_bytes or self.more_bytes):
            return memory
        phases = dict(memory.phases)
        if self.lines:
            last = list(self.lines.values())[-1]
            phases = {phase: self.lines.get(phase, last).at(peak) for phase, peak in phases.items()}
        peak_phase = max(phases, key=lambda phase: phases[phase])
        peak_bytes = phases[peak_phase]
        moved_bytes = peak_bytes - memory.peak_allocated_bytes
        return replace(
            memory,
            peak_allocated_bytes=peak_bytes,
            peak_phase=peak_phase,
            phases=phases,
            owners_at_peak=_owners(memory.owners_at_peak, moved_bytes),
            reserved=ReservedByMode.of_both(lambda grows: self._reserved(memory.reserved.modes[grows], moved_bytes)),
        )

    def _reserved(self, reserved: ReservedEstimate, moved_bytes: int) -> ReservedEstimate:
        allocated = max(0, reserved.peak_allocated_bytes + moved_bytes)
        more = moved_bytes + self.cached_bytes + self.more_bytes
        return replace(
            reserved,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=max(allocated, reserved.peak_reserved_bytes + more),
            peak_limited_bytes=max(allocated, reserved.peak_limited_bytes + more),
            slack_bytes=max(0, reserved.slack_bytes + self.cached_bytes + self.more_bytes),
        )


def corrected(points: Sequence[Point], budget_bytes: int) -> Correction:
    """Returns the correction that follows from the probes so far, mainly from the last one."""
    last = points[-1]
    predicted = last.predicted.memory.phases
    lines = {
        phase: Line(predicted_bytes=predicted[phase], measured_bytes=peak, scale=_scale(phase, points))
        for phase, peak in _measured(last).items()
        if phase in predicted
    }
    seen, cached_bytes = last.probe.measured, 0
    if seen is not None and not last.probe.refused and not seen.num_alloc_retries:
        cached_bytes = seen.peak_reserved_bytes - seen.peak_allocated_bytes
        cached_bytes -= last.predicted.reserved.peak_reserved_bytes - last.predicted.memory.peak_allocated_bytes
    correction = Correction(lines=lines, cached_bytes=cached_bytes, measured=last.probe.knobs)
    if last.probe.fits:
        return correction
    misfits = sum(not point.probe.fits for point in points)
    needed_bytes = budget_bytes + 1 + int(MISTRUST * (misfits - 1) * budget_bytes)
    outside_bytes = last.predicted.outside_bytes if last.probe.non_torch_bytes is None else last.probe.non_torch_bytes
    rehearsed = last.predicted.memory
    by_line, as_rehearsed = (
        replace(last.predicted, memory=memory).reserved.peak_reserved_bytes + outside_bytes
        for memory in (correction.of(rehearsed, last.probe.knobs), rehearsed)
    )
    return replace(
        correction, more_bytes=max(0, needed_bytes - by_line), missing_bytes=max(0, needed_bytes - as_rehearsed)
    )


def asked_bytes(refused: str) -> int:
    """Parses the size of the failed request from torch's message, in bytes; 0 if it has none.

    >>> asked_bytes("CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0 has a total capacity of 104.00 MiB")
    16777216
    """
    match = _ASKED.search(refused)
    return 0 if match is None else parse_bytes(match[1].replace("bytes", "B"))


def _measured(point: Point) -> dict[Phase, int]:
    """Returns allocated bytes by phase; after an out-of-memory error at least the predicted ones."""
    probe, predicted = point.probe, point.predicted.memory.phases
    peaks = {phase: peak.allocated_bytes for phase, peak in probe.phases.items()}
    if not probe.refused:
        return peaks
    if probe.refused_in in peaks:
        peaks[probe.refused_in] += asked_bytes(probe.refused)
    whole = () if probe.refused_in is Phase.LOAD else (Phase.LOAD,)
    return {phase: peak if phase in whole else max(peak, predicted.get(phase, 0)) for phase, peak in peaks.items()}


def _scale(phase: Phase, points: Sequence[Point]) -> float:
    if phase is Phase.LOAD:
        return 1.0
    last, predicted, measured = points[-1], points[-1].predicted.memory.phases, _measured(points[-1])
    for other in reversed(points[:-1]):
        before, seen = other.predicted.memory.phases.get(phase, 0), _measured(other).get(phase)
        is_apart = abs(predicted[phase] - before) > LEAST_DISTANCE * max(before, predicted[phase])
        is_one_kind = _kind(other.probe.knobs) == _kind(last.probe.knobs)
        if seen is not None and is_apart and is_one_kind and not (other.probe.refused or last.probe.refused):
            return _clip((measured[phase] - seen) / (predicted[phase] - before))
    moved_predicted = predicted[phase] - predicted.get(Phase.LOAD, 0)
    moved_measured = measured[phase] - measured.get(Phase.LOAD, predicted.get(Phase.LOAD, 0))
    return _clip(moved_measured / moved_predicted) if moved_predicted > 0 else 1.0


def _kind(knobs: Knobs) -> Knobs:
    """Returns the settings without the rows and lengths of a micro-batch."""
    without: dict[str, Any] = dict.fromkeys((*(name for lever in BATCHES for name in LEVERS[lever].knobs), MAX_LENGTH))
    return replace(knobs, **without)


def _clip(scale: float) -> float:
    return min(max(scale, SCALES[0]), SCALES[1])


_NOT_STATIC = (Owner.OTHER, Owner.GATHERED_WEIGHTS, Owner.TEMPORARY, Owner.ACTIVATIONS, Owner.KV_CACHE)


def _owners(owners: Mapping[Owner, int], moved_bytes: int) -> dict[Owner, int]:
    """Adds an excess to the owner ``other``, and takes a deficit from the least certain owners first."""
    owned = dict(owners)
    if moved_bytes >= 0:
        owned[Owner.OTHER] = owned.get(Owner.OTHER, 0) + moved_bytes
        return owned
    for owner in (*_NOT_STATIC, *(each for each in owners if each not in _NOT_STATIC)):
        if taken_bytes := min(owned.get(owner, 0), -moved_bytes):
            owned[owner] -= taken_bytes
            moved_bytes += taken_bytes
    return owned
