"""Peaks of each phase out of an allocator that knows those since they were last begun anew."""

import pytest
import torch

from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.support.units import MIB
from autotrain_mem.training.process.build import PhasePeaks
from autotrain_mem.types import Phase
from autotrain_mem.types.experience import PhasePeak
from autotrain_mem.types.report import MemoryReading


@pytest.fixture
def gpu() -> SimulatedGpu:
    return SimulatedGpu(named("100MiB"))


@pytest.fixture
def peaks(gpu: SimulatedGpu) -> PhasePeaks:
    return PhasePeaks(gpu.reading, gpu.reset_peaks)


def test_each_phase_has_its_own_peak_and_one_that_comes_again_the_larger(gpu: SimulatedGpu, peaks: PhasePeaks) -> None:
    gpu.allocate(1, 20 * MIB)
    for number, size_mib in ((2, 30), (3, 50), (4, 40)):
        peaks.enter_phase(Phase.FORWARD)
        gpu.allocate(number, size_mib * MIB)
        gpu.free(number)
        gpu.empty_cache()
        peaks.enter_phase(Phase.BACKWARD)
    assert peaks.peaks() == {
        Phase.LOAD: PhasePeak(allocated_bytes=20 * MIB, reserved_bytes=20 * MIB),
        Phase.FORWARD: PhasePeak(allocated_bytes=70 * MIB, reserved_bytes=70 * MIB),
        Phase.BACKWARD: PhasePeak(allocated_bytes=20 * MIB, reserved_bytes=20 * MIB),
    }


def test_the_reading_has_the_peaks_of_the_whole_run(gpu: SimulatedGpu, peaks: PhasePeaks) -> None:
    gpu.allocate(1, 60 * MIB)
    gpu.free(1)
    peaks.enter_phase(Phase.FORWARD)
    gpu.allocate(2, 90 * MIB)  # what was cached must be given back first
    gpu.free(2)
    peaks.enter_phase(Phase.BACKWARD)
    assert peaks.reading() == MemoryReading(
        allocated_bytes=0,
        peak_allocated_bytes=90 * MIB,
        reserved_bytes=90 * MIB,
        peak_reserved_bytes=90 * MIB,
        num_alloc_retries=1,
    )


@pytest.mark.parametrize(
    ("error", "phase"), [(torch.OutOfMemoryError, Phase.EVALUATE), (KeyError, Phase.FORWARD)], ids=["full", "other"]
)
def test_only_a_full_device_ends_the_phase_that_it_was_full_in(
    error: type[Exception], phase: Phase, peaks: PhasePeaks
) -> None:
    def evaluate() -> None:
        peaks.enter_phase(Phase.EVALUATE)
        try:
            raise error
        finally:
            peaks.enter_phase(Phase.FORWARD)

    with pytest.raises(error):
        evaluate()
    assert peaks.phase is phase
