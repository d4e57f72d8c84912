"""Measures the most that each phase of a run takes of a device, real or simulated, at the borders between phases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from autotrain_mem.spec import Phase
from autotrain_mem.spec.experience import PhasePeak
from autotrain_mem.spec.report import MemoryReading
from autotrain_mem.training.out_of_memory import is_out_of_memory


class PhasePeaks:
    """Reads the allocator's peaks as a phase ends, and resets them for the next.

    It is a ``rehearsal.phases: PhaseRecorder`` for a trainer on a real card, and uses no more than the phases.

    Args:
        read: What the device's allocator says of itself.
        reset: ``torch.cuda.reset_peak_memory_stats``, or the simulated card's.
    """

    def __init__(self, read: Callable[[], MemoryReading], reset: Callable[[], None]) -> None:
        self._read, self._reset = read, reset
        self._peaks: dict[Phase, PhasePeak] = {}
        self.phase = Phase.LOAD

    def enter_phase(self, phase: Phase) -> None:
        """Count everything from here on to ``phase``, unless the device was full: then it ends where it was.

        Whoever is within a phase leaves it on the way of an exception, too (``rehearsal.trace.phases: _watched``).
        """
        error = sys.exc_info()[1]
        if phase is not self.phase and not (error is not None and is_out_of_memory(error)):
            self._end_phase()
            self.phase = phase

    def listen(self, recorder: Any) -> None:
        """Hear of the phases that a recorder is told of (``rehearsal.recorder: Recorder``)."""
        enter = recorder.enter_phase

        def entered(phase: Phase) -> None:
            self.enter_phase(phase)
            enter(phase)

        recorder.enter_phase = entered

    def peaks(self) -> Mapping[Phase, PhasePeak]:
        """Peaks of all phases that were reached, in that order."""
        self._end_phase()
        return dict(self._peaks)

    def reading(self) -> MemoryReading:
        """Read what is taken now, with the peaks of the whole run."""
        peaks, now = self.peaks().values(), self._read()
        return MemoryReading(
            allocated_bytes=now.allocated_bytes,
            peak_allocated_bytes=max(peak.allocated_bytes for peak in peaks),
            reserved_bytes=now.reserved_bytes,
            peak_reserved_bytes=max(peak.reserved_bytes for peak in peaks),
            num_alloc_retries=now.num_alloc_retries,
        )

    def _end_phase(self) -> None:
        now, before = self._read(), self._peaks.get(self.phase, PhasePeak(allocated_bytes=0, reserved_bytes=0))
        self._peaks[self.phase] = PhasePeak(
            allocated_bytes=max(before.allocated_bytes, now.peak_allocated_bytes),
            reserved_bytes=max(before.reserved_bytes, now.peak_reserved_bytes),
        )
        self._reset()

    # -- what a recorder hears beside, and this ignores --------------------------------------------------------------

    def adopt_model(self, model: Any) -> None:
        """It does not tell weights from other tensors."""

    def mark(self, tensor: Any, owner: Any, name: str) -> None:
        """It does not tell owners apart."""

    def disown(self, tensor: Any) -> None:
        """It reads the allocator, which does not hold the tensor either."""

    def optimizer_stepped(self, costs: Any) -> None:
        """It does not count work."""
