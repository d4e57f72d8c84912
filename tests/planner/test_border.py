from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_memory import TRL, LinearMemory, space_of

from autotrain_mem.planner.explore import most_that_fits
from autotrain_mem.planner.memo import Memo
from autotrain_mem.spec import Estimate, Knobs
from autotrain_mem.units import GIB

SPACE = space_of(effective_batch_size=4096, longest=1024)
ROWS = [replace(TRL, per_device_train_batch_size=rows, gradient_accumulation_steps=1) for rows in range(1, 65)]


def found(model: LinearMemory, turns: int | None = None) -> Estimate | None:
    return most_that_fits(SPACE, ROWS, Memo(model), turns=turns)


def test_line_whose_first_point_does_not_fit_costs_one_rehearsal() -> None:
    model = LinearMemory(budget_bytes=1 * GIB)
    assert found(model) is None
    assert model.calls == ROWS[:1]


def test_line_that_fits_whole_costs_two_rehearsals() -> None:
    model = LinearMemory(budget_bytes=90 * GIB)
    assert found(model) == model.estimate(ROWS[-1])
    assert len(model.calls) == 2


def test_border_is_hit_by_the_third_rehearsal_and_its_neighbour_is_the_fourth() -> None:
    model = LinearMemory(budget_bytes=24 * GIB)
    best = found(model)
    assert best is not None
    rows = best.knobs.per_device_train_batch_size
    assert [call.per_device_train_batch_size for call in model.calls] == [1, 64, rows, rows + 1]


def test_flat_optimizer_step_does_not_bend_the_slope() -> None:
    """1 row peaks in the optimizer step, which 24 rows still do not exceed: a line through the peaks would miss."""
    model = LinearMemory(budget_bytes=int(19.6 * GIB), activation_bytes=600_000)
    assert model.estimate(ROWS[0]).memory.peak_allocated_bytes == model.estimate(ROWS[5]).memory.peak_allocated_bytes
    best = found(model)
    assert best is not None
    assert len(model.calls) == 4


@given(st.integers(19 * GIB, 40 * GIB), st.sampled_from((0.0, 0.01, 0.05)))
@settings(max_examples=100, deadline=None)
def test_neighbour_of_what_is_found_was_rehearsed_and_does_not_fit(budget: int, noise: float) -> None:
    model = LinearMemory(budget_bytes=budget, noise=noise)
    best = found(model)
    if best is not None and best.knobs != ROWS[-1]:
        neighbour = ROWS[ROWS.index(best.knobs) + 1]
        assert neighbour in model.calls
        assert not model.estimate(neighbour).fits


@given(st.integers(2, 63), st.floats(1.0, 4.0))
@settings(max_examples=100, deadline=None)
def test_curve_that_misleads_the_slope_costs_at_most_three_times_bisection(border: int, power: float) -> None:
    """Attention without a fused kernel grows with the square of the length; the guard is tested up to the fourth."""
    scale = 20 * GIB / border**power

    class Curved(LinearMemory):
        def estimate(self, knobs: Knobs) -> Estimate:
            need = int(knobs.per_device_train_batch_size**power * scale)
            estimate = super().estimate(knobs)
            phases = dict.fromkeys(estimate.memory.phases, need)
            native = replace(estimate.memory.reserved.native, peak_reserved_bytes=need, num_alloc_retries=0)
            reserved = replace(estimate.memory.reserved, native=native)
            memory = replace(estimate.memory, peak_allocated_bytes=need, phases=phases, reserved=reserved)
            return replace(estimate, memory=memory)

    curve = Curved(budget_bytes=24 * GIB)
    most_that_fits(SPACE, ROWS, Memo(curve))
    assert len(curve.calls) <= 2 + 3 * 6


def test_turns_that_run_out_leave_the_best_so_far() -> None:
    model = LinearMemory(budget_bytes=24 * GIB, noise=0.05)
    best = found(model, turns=1)
    assert len(model.calls) == 3
    assert best is not None
    assert best.fits
