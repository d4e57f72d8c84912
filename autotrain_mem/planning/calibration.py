"""Corrects a prediction by what probes measured, so that it agrees with them.

Settings that differ from the measured ones only in how much is in a micro-batch are of its kind. Each phase has a line:
corrected = measured + scale x (predicted - predicted there), so that what was measured is predicted for it, byte for
byte. Of another kind (with or without checkpointing, LoRA, quantization) nothing was measured, and other tensors are
held: such a prediction stays as it is after a probe that fitted, and is raised by the missing bytes after one that did
not.

A phase's peak is a static part, which is there as soon as the models are loaded, and a moving part on top.

- One point: what is wrong in the static part (weights counted twice, a buffer not seen) is wrong by bytes, whatever the
  batch is, and loading measures it by itself: that much is offset. Errors of the moving part go with its size (a saved
  tensor too many in each layer, of each token): the scale is measured over predicted, each beyond its loading.
- Two points of one kind: the slope between them, which needs no such assumption.

A scale outside of 0.5 to 2 is an error of that reasoning (a phase whose moving part is next to nothing): it is cut
there, and the rest is offset. A phase that no probe reached takes the line of the last one that was reached.

What the allocator holds beyond what tensors take is corrected by bytes, and only where nothing was refused and no cache
was given back: else the card, not the run, said how much it could hold.

After a refusal what was allocated in each phase, and what was asked for in vain, are lower bounds, which can raise a
prediction and not lower it. All of it is taken to need a byte more than the budget at least, and a twentieth of it more
for every probe that failed before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotrain_mem.settings.levers import BATCHES, LEVERS
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support.units import parse_bytes
from autotrain_mem.types import Estimate, Knobs, MemoryEstimate, Owner, Phase, ReservedByMode, ReservedEstimate
from autotrain_mem.types.experience import Probe

SCALES = (0.5, 2.0)
"""No prediction was off a public run by more than 15 % (docs/understand/accuracy.md); cut far outside."""
LEAST_DISTANCE = 0.05
"""Two points whose predictions are closer than this share determine no slope: what is measured moves in segments of 2
MiB, and in 20 MiB where the allocator takes them (``c10/core/AllocatorConfig.h: kLargeBuffer``)."""
MISTRUST = 0.05
"""Share of the budget that every further failed probe adds to what such settings are taken to need."""

_ASKED = re.compile(r"Tried to allocate (\d+(?:\.\d+)? (?:GiB|MiB|KiB|bytes))")
"""``c10/cuda/CUDACachingAllocator.cpp: malloc``; its sizes are ``format_size``'s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Holds one probe beside its uncorrected prediction."""

    predicted: Estimate
    probe: Probe


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Describes how one phase's prediction is corrected."""

    predicted_bytes: int
    """Where it was measured."""
    measured_bytes: int
    scale: float = 1.0

    def at(self, predicted_bytes: int) -> int:
        """Returns the corrected prediction for other settings."""
        return max(0, self.measured_bytes + round(self.scale * (predicted_bytes - self.predicted_bytes)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Turns a prediction into one that agrees with what was measured.

    Example: forward was predicted at 80 MiB on 20 MiB of weights, and measured at 92 on 24. Then 4 MiB are offset, the
    scale is 68 / 60, and half the batch, predicted at 50 MiB, becomes 92 - 34 = 58.
    """

    lines: Mapping[Phase, Line] = field(default_factory=dict)
    """One for each phase that was reached, in their order."""
    cached_bytes: int = 0
    """More that the allocator holds beyond what tensors take."""
    more_bytes: int = 0
    """Bytes needed beyond all that, since it was seen not to fit."""
    measured: Knobs | None = None
    """The settings that the probe tried; None corrects all alike."""
    missing_bytes: int = 0
    """The least by which the prediction was too low, which settings of other kinds need more, too."""

    def of(self, memory: MemoryEstimate, knobs: Knobs) -> MemoryEstimate:
        """The corrected prediction. Owners keep adding up to the peak: what is more is nobody's that is known."""
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
    """Makes the correction that the probes so far call for, the last one above all."""
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
    """Reads from torch's message how much was asked for in vain; 0 where it does not say.

    >>> asked_bytes("CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0 has a total capacity of 104.00 MiB")
    16777216
    """
    match = _ASKED.search(refused)
    return 0 if match is None else parse_bytes(match[1].replace("bytes", "B"))


def _measured(point: Point) -> dict[Phase, int]:
    """Allocated, by phase. After a refusal no phase has been seen whole: what was measured can only raise it."""
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
    for other in reversed(points[:-1]):  # two points of one kind that lie apart give a slope
        before, seen = other.predicted.memory.phases.get(phase, 0), _measured(other).get(phase)
        is_apart = abs(predicted[phase] - before) > LEAST_DISTANCE * max(before, predicted[phase])
        is_one_kind = _kind(other.probe.knobs) == _kind(last.probe.knobs)
        if seen is not None and is_apart and is_one_kind and not (other.probe.refused or last.probe.refused):
            return _cut((measured[phase] - seen) / (predicted[phase] - before))
    moved_predicted = predicted[phase] - predicted.get(Phase.LOAD, 0)
    moved_measured = measured[phase] - measured.get(Phase.LOAD, predicted.get(Phase.LOAD, 0))
    return _cut(moved_measured / moved_predicted) if moved_predicted > 0 else 1.0


_HOW_MUCH = (*(name for lever in BATCHES for name in LEVERS[lever].knobs), MAX_LENGTH)


def _kind(knobs: Knobs) -> Knobs:
    """Settings that differ only in how much is in a micro-batch are of one kind."""
    without: dict[str, Any] = dict.fromkeys(_HOW_MUCH)
    return replace(knobs, **without)


def _cut(scale: float) -> float:
    return min(max(scale, SCALES[0]), SCALES[1])


_NOT_STATIC = (Owner.OTHER, Owner.GATHERED_WEIGHTS, Owner.TEMPORARY, Owner.ACTIVATIONS, Owner.KV_CACHE)


def _owners(owners: Mapping[Owner, int], moved_bytes: int) -> dict[Owner, int]:
    """Adds what is more to the others, and takes what is less from what is least certain first."""
    owned = dict(owners)
    if moved_bytes >= 0:
        owned[Owner.OTHER] = owned.get(Owner.OTHER, 0) + moved_bytes
        return owned
    for owner in (*_NOT_STATIC, *(each for each in owners if each not in _NOT_STATIC)):
        taken_bytes = min(owned.get(owner, 0), -moved_bytes)
        if taken_bytes:
            owned[owner] -= taken_bytes
            moved_bytes += taken_bytes
    return owned
