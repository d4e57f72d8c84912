"""A sweep goes through every combination, and ends with what it has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from autotrain_mem.planning.comparisons import estimate_all
from autotrain_mem.support.errors import (
    BatchSplitError,
    ContextLengthError,
    InterruptedByUser,
    UnknownGpuError,
    WorkerDiedError,
)
from autotrain_mem.types import Estimate
from autotrain_mem.types.gpu_comparison import Axis, AxisValue, Sweep, SweepPoint

EXAMPLE = Estimate.__new__(Estimate)
"""Nothing here looks inside."""


def axis(name: str, *texts: str) -> Axis:
    return Axis(name=name, settings=tuple(AxisValue(name=name, text=text, value=int(text)) for text in texts))


AXES = (axis("max_length", "4", "32"), axis("per_device_train_batch_size", "1", "2", "4"))
TOO_LONG = ContextLengthError("--max_length 32 is too long.", hint="Less.")


@dataclass
class Numbered:
    """As much of Rehearsals as a sweep looks at."""

    number: int
    workers: Any = None


def swept(
    refusals: dict[int, BaseException],
    asked: Sequence[Any] = range(6),
    on_point: Callable[[SweepPoint], None] = lambda point: None,
) -> Sweep:
    def estimate(one: Any) -> Estimate:
        assert one.workers.first == "the worker"
        if one.number in refusals:
            raise refusals[one.number]
        return EXAMPLE

    workers: Any = SimpleNamespace(map=lambda calls: [call("the worker") for call in calls])
    jobs: list[Any] = [Numbered(one) if isinstance(one, int) else one for one in asked]
    return estimate_all(workers, AXES, jobs, estimate, on_point)


def test_a_refused_point_does_not_end_the_sweep_whose_last_axis_varies_fastest() -> None:
    told: list[SweepPoint] = []
    refusals = {2: BatchSplitError("3 rows.", hint="4."), 4: WorkerDiedError("Killed.", hint="Memory.")}
    sweep = swept(refusals, [0, 1, 2, TOO_LONG, 4, 5], on_point=told.append)
    assert [point.refusal is None for point in sweep.points] == [True, True, False, False, False, True]
    assert sweep.points[3].refusal is TOO_LONG
    assert tuple(told) == sweep.points
    assert len(sweep.estimates) == 3
    texts = [tuple(setting.text for setting in point.settings) for point in sweep.points]
    assert texts == [("4", "1"), ("4", "2"), ("4", "4"), ("32", "1"), ("32", "2"), ("32", "4")]


@pytest.mark.parametrize("error", [UnknownGpuError("No such card."), InterruptedByUser("Enough."), KeyboardInterrupt()])
def test_what_is_wrong_with_all_points_ends_it_at_once(error: BaseException) -> None:
    told: list[SweepPoint] = []
    with pytest.raises(type(error)):
        swept({1: error}, on_point=told.append)
    assert len(told) == 1
