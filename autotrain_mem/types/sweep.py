"""A sweep holds many configurations side by side: the settings that vary, and what came of every combination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from autotrain_mem.support.codec import Form
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.types.estimate import Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Holds one value of one flag."""

    name: str
    """The flag, as TRL calls it."""
    text: str
    """As the user wrote it: ``1e-5``."""
    value: Any
    """As the flag's parser reads it: ``0.00001``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Holds a flag that varies, and its values in the user's order."""

    json_form: ClassVar = Form(derived={"values": "values"}, hidden=("settings",))

    name: str
    settings: tuple[Setting, ...]

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(setting.value for setting in self.settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """Holds one combination: a setting of each axis, and what it needs or why there is no such run."""

    json_form: ClassVar = Form(
        derived={"swept": "swept", "estimate": "estimate", "refused": "refusal"}, hidden=("settings", "outcome")
    )
    """Estimate and refusal are both written, one of them null, so that a reader need not ask which is there."""

    settings: tuple[Setting, ...]
    outcome: Estimate | AutofitError

    @property
    def swept(self) -> dict[str, Any]:
        """Maps each axis to its value."""
        return {setting.name: setting.value for setting in self.settings}

    @property
    def estimate(self) -> Estimate | None:
        """Returns what was estimated; None where the combination was refused."""
        return self.outcome if isinstance(self.outcome, Estimate) else None

    @property
    def refusal(self) -> AutofitError | None:
        """Returns why there is no such run; None where there is an estimate."""
        return self.outcome if isinstance(self.outcome, AutofitError) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Holds all combinations of the axes; the last axis varies fastest. Without axes it is a single point."""

    json_form: ClassVar = Form(schema="autofit.sweep/1")

    axes: tuple[Axis, ...]
    points: tuple[SweepPoint, ...]

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """Lists the estimates of the points that were not refused, in order."""
        return tuple(point.estimate for point in self.points if point.estimate is not None)
