"""What probes measured beside what was predicted: the corrected prediction agrees with them, and scales the rest."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import TRL_DEFAULTS

from autotrain_mem.planning.calibration import Correction, Line, Point, asked_bytes, corrected
from autotrain_mem.support.units import MIB
from autotrain_mem.types import Estimate, Phase
from tests.probe_examples import BUDGET, predicted, probe

LARGE, HALF = replace(TRL_DEFAULTS, per_device_train_batch_size=8), replace(TRL_DEFAULTS, per_device_train_batch_size=4)


def told(correction: Correction, estimate: Estimate) -> Mapping[Phase, int]:
    return correction.of(estimate.memory, TRL_DEFAULTS).phases


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 60), st.integers(0, 90))
def test_what_was_measured_is_then_predicted_for_it(load: int, moved: int, measured_load: int, more: int) -> None:
    estimate = predicted(load + moved, load_mib=load)
    tried = probe(measured_load + more, load_mib=measured_load)
    made = corrected([Point(predicted=estimate, probe=tried)], BUDGET).of(estimate.memory, TRL_DEFAULTS)
    assert all(made.phases[phase] == peak.allocated_bytes for phase, peak in tried.phases.items())
    assert min(made.owners_at_peak.values()) >= 0
    assert sum(made.owners_at_peak.values()) == made.peak_allocated_bytes == max(made.phases.values())
    assert made.reserved.native.peak_reserved_bytes == tried.measured.peak_reserved_bytes  # type: ignore[union-attr]


def test_one_point_gives_an_offset_and_a_scale_two_of_one_kind_the_slope_between_them_and_of_two_kinds_none() -> None:
    """The offset is of what is loaded and the scale of the rest; one that is no error of a prediction is cut."""
    for before, seen, load, asked, expected in ((80, 92, 24, 50, 58), (21, 60, 20, 31, 80)):
        point = Point(predicted=predicted(before, load_mib=20), probe=probe(seen, load_mib=load))
        made = told(corrected([point], BUDGET), predicted(asked, load_mib=20))
        assert (made[Phase.LOAD], made[Phase.BACKWARD]) == (load * MIB, expected * MIB)
    points = [
        Point(predicted=predicted(80), probe=probe(110, knobs=LARGE, fits=False)),
        Point(predicted=predicted(40), probe=probe(50, knobs=HALF)),
    ]
    line = Line(predicted_bytes=40 * MIB, measured_bytes=50 * MIB, scale=1.5)
    assert corrected(points, BUDGET).lines[Phase.BACKWARD] == line
    other = probe(50, load_mib=20, knobs=replace(HALF, use_peft=True))
    points = [points[0], Point(predicted=predicted(40, load_mib=20), probe=other)]
    assert corrected(points, BUDGET).lines[Phase.BACKWARD].scale == 30 / 20


def test_a_refusal_lowers_no_prediction_and_a_phase_that_was_not_reached_takes_the_last_line() -> None:
    """What is full after 50 MiB, of 120 that were predicted, says nothing of the rest; of 60 after 90, much."""
    for peak, before, asked, at_least in ((50, 120, 90, 90), (90, 60, 60, 90)):
        refused = probe(peak, load_mib=20, fits=False, refused_in=Phase.FORWARD)
        correction = corrected([Point(predicted=predicted(before, load_mib=20), probe=refused)], BUDGET)
        assert Phase.BACKWARD not in correction.lines
        backward = told(correction, predicted(asked, load_mib=20))[Phase.BACKWARD]
        assert backward >= at_least * MIB if peak > before else backward == at_least * MIB


def test_what_was_asked_for_in_vain_counts_in_its_phase() -> None:
    words = "CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0 has a total capacity of 104.00 MiB"
    refused = replace(probe(70, fits=False, refused_in=Phase.BACKWARD), refused=words)
    lines = corrected([Point(predicted=predicted(60), probe=refused)], BUDGET).lines
    assert lines[Phase.BACKWARD].measured_bytes == 86 * MIB
    assert asked_bytes("CUDA out of memory. Tried to allocate 512 bytes. GPU") == 512
    assert asked_bytes("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`") == 0


@pytest.mark.parametrize("misfits", [1, 2, 3])
def test_settings_that_did_not_fit_are_predicted_not_to(misfits: int) -> None:
    """Even where all that was measured lies below the budget: the card was full, and every further time by more."""
    point = Point(predicted=predicted(60), probe=probe(50, fits=False, refused_in=Phase.BACKWARD))
    correction = corrected([point] * misfits, BUDGET)
    made = replace(predicted(60), memory=correction.of(predicted(60).memory, TRL_DEFAULTS))
    assert made.required_bytes == BUDGET + 1 + (misfits - 1) * int(0.05 * BUDGET)
    assert not made.fits


def test_settings_of_another_kind_are_corrected_by_nothing_but_what_was_missing() -> None:
    """Without checkpointing forward holds other tensors than with it: a scale of one says nothing of the other."""
    otherwise, batch = replace(TRL_DEFAULTS, gradient_checkpointing=False), predicted(90).memory
    fitted = corrected([Point(predicted=predicted(40), probe=probe(48))], BUDGET)
    assert fitted.of(batch, otherwise) == batch
    assert fitted.of(batch, HALF).peak_allocated_bytes > 100 * MIB
    refused = probe(50, fits=False, refused_in=Phase.BACKWARD)
    reserved = corrected([Point(predicted=predicted(80), probe=refused)], BUDGET).of(batch, otherwise).reserved.native
    assert reserved.peak_reserved_bytes == 90 * MIB + (BUDGET + 1 - 80 * MIB)


def test_a_probe_that_died_without_a_word_of_its_bytes_still_counts() -> None:
    died = replace(probe(1), measured=None, phases={}, fits=False, refused="Error out of memory at line 90")
    made = corrected([Point(predicted=predicted(60), probe=died)], BUDGET).of(predicted(60).memory, TRL_DEFAULTS)
    assert made.reserved.native.peak_reserved_bytes == BUDGET + 1


def test_a_cache_is_corrected_only_where_the_card_did_not_press_on_it() -> None:
    free = probe(60, cached_mib=20)
    pressed = probe(60, cached_mib=20, retries=1, fits=False)
    assert corrected([Point(predicted=predicted(60), probe=free)], BUDGET).cached_bytes == 20 * MIB
    assert corrected([Point(predicted=predicted(60), probe=pressed)], BUDGET).cached_bytes == 0
