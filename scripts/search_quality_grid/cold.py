"""Predictions that are kept from one card to the next, and yet answer as if nothing had been rehearsed before.

A search that finds the whole model's rehearsal of another card where it asked for one of few layers needs no
confirmation later: it would count fewer rehearsals than a user's first run. So the two are kept apart.

They are kept, too, while the planner is changed, which is when they are needed again: of our own code only that counts
which a footprint is made by.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Subject
from autotrain_mem.support.store import Store
from autotrain_mem.support.versions import OURS, content_digest
from autotrain_mem.types import Estimate, Footprint, Knobs

RELEVANT = ("allocator", "estimator", "rehearsal", "types", "trainers")
"""Packages that a rehearsal and its replay are made by."""
DIGESTS = [content_digest(OURS / name) for name in RELEVANT]


class RehearsalStore(Store):
    """A store of rehearsals whose keys do not change with the planner."""

    def get(self, kind: str, key: Mapping[str, Any]) -> Any | None:
        return super().get(kind, _relevant(key))

    def put(self, kind: str, key: Mapping[str, Any], value: Any) -> None:
        super().put(kind, _relevant(key), value)


@dataclass(slots=True)
class Kept:
    """Footprints of one job, on disk and here, for every card."""

    few_layers: RehearsalStore
    whole: RehearsalStore
    footprints_of_few: dict[Any, Footprint] = field(default_factory=dict)
    footprints_of_whole: dict[Any, Footprint] = field(default_factory=dict)

    @classmethod
    def under(cls, folder: pathlib.Path | None) -> Kept:
        """In a folder of each kind; on no disk where there is no folder."""
        few_layers, whole = (
            RehearsalStore(folder and folder / kind, on_damage=print) for kind in ("few_layers", "whole")
        )
        return cls(few_layers=few_layers, whole=whole)


class Cold:
    def __init__(self, subject: Subject, kept: Kept) -> None:
        few, whole = (replace(subject, store=store) for store in (kept.few_layers, kept.whole))
        self._few = Predictions(few, kept.footprints_of_few, confirms=False)
        self._whole = Predictions(whole, kept.footprints_of_whole)
        self._confirmed: set[Knobs] = set()

    def rehearse(self, points: Sequence[Knobs], *, whole: bool) -> list[Estimate]:
        """What these points need. Raises RehearsalError."""
        if whole:
            self._confirmed |= {_native(knobs) for knobs in points}
        return (self._whole if whole else self._few).rehearse(points, whole=whole)

    def tokens_per_second(self, known: Estimate, knobs: Knobs) -> float:
        """By the rehearsal that the estimate is of."""
        is_whole = known.memory.rehearsed_layers is None and _native(known.knobs) in self._confirmed
        return (self._whole if is_whole else self._few).tokens_per_second(known, knobs)

    def over_steps(self, estimate: Estimate) -> Estimate:
        return estimate

    def exceeds(self, knobs: Knobs) -> bool:
        """By the number of parameters."""
        return self._few.exceeds(knobs)

    def foresee(self, knobs: Knobs) -> None:
        """Begins nothing: what is asked is counted, not timed."""

    def would_fit(self, estimate: Estimate, *, rehearsed: bool) -> tuple[str, ...]:
        """Not looked for: it is only shown."""
        return ()


def _relevant(key: Mapping[str, Any]) -> dict[str, Any]:
    return {**key, "versions": {**key["versions"], "autotrain_mem": DIGESTS}}


def _native(knobs: Knobs) -> Knobs:
    """Segments of either kind are of one rehearsal."""
    return replace(knobs, expandable_segments=False)
