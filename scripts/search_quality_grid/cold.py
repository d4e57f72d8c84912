"""Predictions that are kept from one card to the next, and yet answer as if nothing had been rehearsed before.

A search that finds the whole model's rehearsal of another card where it asked for one of few layers needs no
confirmation later: it would count fewer rehearsals than a user's first run. So the two are kept apart.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotrain_mem.engine.predictions import Predictions
from autotrain_mem.engine.rehearsals import Lengths, Rehearsals
from autotrain_mem.spec import Estimate, Footprint, Knobs
from autotrain_mem.spec.model import ModelFacts
from autotrain_mem.store import Store


@dataclass(slots=True)
class Kept:
    """Footprints of one job, on disk and here, for every card."""

    few_layers: Store
    whole: Store
    footprints_of_few: dict[Any, Footprint] = field(default_factory=dict)
    footprints_of_whole: dict[Any, Footprint] = field(default_factory=dict)

    @classmethod
    def under(cls, folder: pathlib.Path | None) -> Kept:
        """In a folder of each kind; on no disk where there is no folder."""
        return cls(*(Store(folder and folder / kind, told=print) for kind in ("few_layers", "whole")))


class Cold:
    """The ``Predictor`` of a first run."""

    def __init__(self, rehearsals: Rehearsals, facts: ModelFacts, lengths: Lengths, kept: Kept) -> None:
        few, whole = (replace(rehearsals, store=store) for store in (kept.few_layers, kept.whole))
        self._few = Predictions(few, facts, lengths, kept.footprints_of_few, confirms=False)
        self._whole = Predictions(whole, facts, lengths, kept.footprints_of_whole)
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

    def would_fit(self, estimate: Estimate) -> tuple[str, ...]:
        """Not looked for: it is only shown."""
        return ()


def _native(knobs: Knobs) -> Knobs:
    """Segments of either kind are of one rehearsal."""
    return replace(knobs, expandable_segments=False)
