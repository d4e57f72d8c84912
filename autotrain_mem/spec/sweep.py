"""Many configurations side by side: the settings that vary, and what came of every combination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.errors import AutofitError
from autotrain_mem.spec.estimate import Estimate

SWEEP_SCHEMA = "autofit.sweep/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One value of one flag."""

    text: str
    """As the user wrote it: ``1e-5``."""
    value: Any
    """As the flag's parser reads it: ``0.00001``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A flag that varies, and its values in the user's order."""

    name: str
    settings: tuple[Setting, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """One combination: a setting of each axis, and what it needs or why there is no such run."""

    settings: tuple[Setting, ...]
    outcome: Estimate | AutofitError

    @property
    def estimate(self) -> Estimate | None:
        """None where the combination was refused."""
        return self.outcome if isinstance(self.outcome, Estimate) else None

    @property
    def refusal(self) -> AutofitError | None:
        """None where there is an estimate."""
        return self.outcome if isinstance(self.outcome, AutofitError) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """All combinations of the axes; the last axis varies fastest. Without axes it is a single point."""

    axes: tuple[Axis, ...]
    points: tuple[SweepPoint, ...]

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """Of the points that were not refused, in order."""
        return tuple(point.estimate for point in self.points if point.estimate is not None)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SWEEP_SCHEMA,
            "axes": [{"name": axis.name, "values": [each.value for each in axis.settings]} for axis in self.axes],
            "points": [{"swept": self._swept(point), **_outcome(point)} for point in self.points],
        }

    def _swept(self, point: SweepPoint) -> dict[str, Any]:
        return {axis.name: each.value for axis, each in zip(self.axes, point.settings, strict=True)}


def _outcome(point: SweepPoint) -> Mapping[str, Any]:
    """Both keys always, one of them null, so that a reader need not ask which is there."""
    return {
        "estimate": None if point.estimate is None else point.estimate.to_json(),
        "refused": None if point.refusal is None else point.refusal.to_json(),
    }
