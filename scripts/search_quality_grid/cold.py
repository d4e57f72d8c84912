"""Shares rehearsals between cards, but counts them as in a first run without a cache.

If a search requested a rehearsal of few layers and got a cached one of the whole model, it would need no confirmation
later, and would count fewer rehearsals than a user's first run. So the two kinds are cached separately.

The cache stays valid when the planner changes, since its keys depend only on the packages in ``RELEVANT``.
"""

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Subject
from autotrain_mem.support.store import Store
from autotrain_mem.support.versions import OURS, content_digest
from autotrain_mem.types import Estimate, Footprint, Knobs
from autotrain_mem.types.hardware import kernel_class

RELEVANT = ("allocator", "estimator", "rehearsal", "types", "trainers")
"""The packages that determine a rehearsal and its replay."""
DIGESTS = [content_digest(OURS / name) for name in RELEVANT]


class RehearsalStore(Store):
    """A store of rehearsals whose keys do not change with the planner."""

    def get(self, kind: str, key: Mapping[str, Any]) -> Any | None:
        return super().get(kind, _relevant(key))

    def put(self, kind: str, key: Mapping[str, Any], value: Any) -> None:
        super().put(kind, _relevant(key), value)


@dataclass(slots=True)
class Kept:
    """The footprints of one job for all cards, on disk and in memory."""

    few_layers: RehearsalStore
    whole: RehearsalStore
    footprints_of_few: dict[Any, Footprint] = field(default_factory=dict)
    footprints_of_whole: dict[Any, Footprint] = field(default_factory=dict)

    @classmethod
    def under(cls, folder: pathlib.Path | None) -> Self:
        """Keeps each kind in its own subfolder, or only in memory if there is no folder."""
        few_layers, whole = (
            RehearsalStore(folder and folder / kind, on_damage=print) for kind in ("few_layers", "whole")
        )
        return cls(few_layers=few_layers, whole=whole)


class Cold:
    def __init__(self, subject: Subject, kept: Kept) -> None:
        few, whole = (replace(subject, store=store) for store in (kept.few_layers, kept.whole))
        self._few = Predictions(few, kept.footprints_of_few, kernel_class(few.hardware.capability))
        self._whole = Predictions(whole, kept.footprints_of_whole)
        self._confirmed: set[Knobs] = set()

    def rehearse(self, points: Sequence[Knobs], *, whole: bool) -> list[Estimate]:
        """Returns the estimates of these points. Raises RehearsalError."""
        if whole:
            self._confirmed |= {_native(knobs) for knobs in points}
        return (self._whole if whole else self._few).rehearse(points, whole=whole)

    def tokens_per_second(self, known: Estimate, knobs: Knobs) -> float:
        """Returns the speed, from the rehearsal on which the estimate is based."""
        is_whole = known.memory.rehearsed_layers is None and _native(known.knobs) in self._confirmed
        return (self._whole if is_whole else self._few).tokens_per_second(known, knobs)

    def over_steps(self, estimate: Estimate) -> Estimate:
        return estimate

    def exceeds(self, knobs: Knobs) -> bool:
        """Returns whether the number of parameters alone exceeds the budget."""
        return self._few.exceeds(knobs)

    def foresee(self, points: Sequence[Knobs], *, whole: bool) -> None:
        """Does nothing: rehearsals are counted, not timed, so none needs to start early."""

    def would_fit(self, estimate: Estimate, *, rehearsed: bool) -> tuple[str, ...]:
        """Returns nothing: cards that would fit are only displayed."""
        return ()


def _relevant(key: Mapping[str, Any]) -> dict[str, Any]:
    return {**key, "versions": {**key["versions"], "autotrain_mem": DIGESTS}}


def _native(knobs: Knobs) -> Knobs:
    """Returns the knobs without expandable segments: one rehearsal serves both kinds of segments."""
    return replace(knobs, expandable_segments=False)
