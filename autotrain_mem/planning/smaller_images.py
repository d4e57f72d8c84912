"""Makes images smaller where nothing else that the user allows fits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autotrain_mem.planning.lengths import Lengths
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.search.changes import against
from autotrain_mem.search.levels import SHORTER_ROWS, SMALLER_IMAGES_LEVEL, allowed
from autotrain_mem.search.search import Found
from autotrain_mem.settings.levers import LEVERS, SMALLER_IMAGES
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.types import Candidate, Lever
from autotrain_mem.types.model import ModelFacts

OnAttempt = Callable[[Candidate], None]

MOST_STEPS = 4
"""Steps that are tried: a sixteenth of the area of images whose processor halves it. An image of which each side has a
quarter of its pixels is another image; who wants that says so with ``--max_pixels``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """Holds what a search found, with the job and the lengths that it found it for."""

    rehearsals: Rehearsals
    lengths: Lengths
    found: Found


Search = Callable[[Rehearsals, Lengths, OnAttempt], Found]


def with_smaller_images(
    rehearsals: Rehearsals, facts: ModelFacts, lengths: Lengths, search: Search, on_attempt: OnAttempt
) -> Searched:
    """Searches, and where nothing is found, or rows are cut, searches with the largest images that fit.

    Rows are cut at their ends, where answers stand: a smaller image comes before that.

    Raises:
        DoesNotFitError: nothing fits, with smaller images neither.
    """
    tried: list[Candidate] = []

    def hear(attempt: Candidate) -> None:
        tried.append(attempt)
        on_attempt(attempt)

    try:
        found = search(rehearsals, lengths, hear)
    except DoesNotFitError:
        searched = _smaller(rehearsals, facts, lengths, search, hear)
        if searched is None:
            raise
    else:
        cuts = found.level == SHORTER_ROWS
        searched = _smaller(rehearsals, facts, lengths, search, hear) if cuts else None
        if searched is None:
            return Searched(rehearsals=rehearsals, lengths=lengths, found=found)
    lever = _lever(rehearsals, lengths, searched, tried)
    found = replace(
        searched.found, level=SMALLER_IMAGES_LEVEL, levers=(*searched.found.levers, lever), attempts=tuple(tried)
    )
    return replace(searched, found=found)


def _smaller(
    rehearsals: Rehearsals, facts: ModelFacts, lengths: Lengths, search: Search, on_attempt: OnAttempt
) -> Searched | None:
    """Try smaller images step by step, without cutting rows; None where that may not be or does not help."""
    if not lengths.images or not allowed(LEVERS[SMALLER_IMAGES], rehearsals.space(facts, lengths)):
        return None
    for pixels in _steps(facts, lengths.images):
        smaller = rehearsals.with_max_pixels(pixels)
        uncut = replace(smaller, job=replace(smaller.job, forbid=smaller.job.forbid | {MAX_LENGTH}))
        counted = smaller.lengths() if lengths.profile is not None else lengths
        with contextlib.suppress(DoesNotFitError):
            found = search(uncut, counted, on_attempt)
            return Searched(rehearsals=smaller, lengths=counted, found=found)
    return None


def _steps(facts: ModelFacts, images: Iterable[str]) -> Iterator[int]:
    """Yield the areas that change the largest of these images, largest first."""
    largest = max(width * height for width, height in (map(int, size.split("x")) for size in images))
    steps = [step for step in facts.pixel_steps if facts.enlarges_images or step < largest]
    yield from steps[:MOST_STEPS]


def _lever(rehearsals: Rehearsals, before: Lengths, searched: Searched, tried: Sequence[Candidate]) -> Lever:
    """Say what full size would need at least, and what becomes of the row with most tokens of images."""
    row, pixels = LEVERS[SMALLER_IMAGES], searched.found.estimate.knobs.max_pixels
    whole = [each.required_bytes for each in tried if each.knobs.max_pixels is None]
    needed = f"at full size it needs at least {against(min(whole), rehearsals.card.budget_bytes)}: " if whole else ""
    counts = [each.profile for each in (before, searched.lengths)]
    most = [each.images.summary().most for each in counts if each is not None and each.images is not None]
    tokens = f" (a row has {most[1]} tokens of images at most, in place of {most[0]})" if len(most) == 2 else ""
    return Lever(name=row.name, before=None, after=pixels, harm=row.harm, why=f"{needed}{row.reason}{tokens}")
