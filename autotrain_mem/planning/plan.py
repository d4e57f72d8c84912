"""Searches for a job's settings and makes a plan of them, with what stands beside them.

Before all else it tries by how many GPUs rows must be shared for a plan that costs nothing but time. Images are made
smaller where nothing else that the user allows fits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotrain_mem.allocator.settings import environment_setting
from autotrain_mem.planning.lengths import Lengths, row_length
from autotrain_mem.planning.limits import limits_of, optimizer_steps
from autotrain_mem.planning.most import question_of
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.planning.suggestions import with_other_methods
from autotrain_mem.planning.vllm_server import check_colocated, vllm_server
from autotrain_mem.search.advice import FLASH_ATTENTION, advice, context_cut, proposals, questions
from autotrain_mem.search.changes import against
from autotrain_mem.search.largest import search_most
from autotrain_mem.search.levels import LEVELS, SHORTER_ROWS, SMALLER_IMAGES_LEVEL, allowed
from autotrain_mem.search.memo import Memo
from autotrain_mem.search.search import NO_LIMITS, Found, Limits, find, search
from autotrain_mem.search.shardings import SharedTokens, degrees, way_of
from autotrain_mem.search.space import Space, why_fp16
from autotrain_mem.settings.knobs import ROWS, STEPS
from autotrain_mem.settings.levers import LEVERS, SMALLER_IMAGES
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support.errors import DoesNotFitError, RehearsalError
from autotrain_mem.support.versions import versions_key
from autotrain_mem.types import Candidate, Estimate, Footprint, Harm, Job, Knobs, Lever, Plan, Topology
from autotrain_mem.types.data import summary
from autotrain_mem.types.model import ModelFacts


def searched(
    rehearsals: Rehearsals,
    facts: ModelFacts,
    lengths: Lengths,
    on_attempt: Callable[[Candidate], None],
    footprints: dict[Any, Footprint] | None = None,
) -> Found:
    """The best settings that fit; the error of a search that finds none also says what other methods would need.

    Args:
        on_attempt: Hears of every configuration as it has been rehearsed.
        footprints: What was rehearsed for a search before, and is added to.

    Raises:
        DoesNotFitError: nothing that the user allows fits; the message holds the nearest that would.
        LimitError: what fits takes longer, or costs more, than the user allows.
        RehearsalError, BatchSplitError, ContextLengthError.
    """
    name = rehearsals.job.maximized
    question = None if name is None else question_of(rehearsals, facts, lengths, name)
    space = rehearsals.space(facts, lengths) if question is None else question.space(question.values[0])
    check_colocated(rehearsals.job, space.base, rehearsals.hardware, facts, longest_prompt=lengths.longest)
    limits = limits_of(rehearsals, space.base, lengths)
    footprints = {} if footprints is None else footprints
    predictions = Predictions(rehearsals, facts, lengths, footprints)

    def least_needed(other: Job, knobs: Knobs) -> Estimate:
        return Predictions(replace(rehearsals, job=other), facts, lengths).rehearse([knobs], whole=True)[0]

    if question is None and (
        shared := with_shared_tokens(rehearsals, facts, lengths, space, limits or NO_LIMITS, on_attempt, footprints)
    ):
        return shared
    try:
        if question is None:
            return search(space, predictions, on_attempt, limits or NO_LIMITS)
        return search_most(question, predictions, on_attempt, limits or NO_LIMITS)
    except DoesNotFitError as error:
        raise with_other_methods(error, rehearsals.job, space, least_needed) from error


def searched_with_images(
    rehearsals: Rehearsals,
    facts: ModelFacts,
    lengths: Lengths,
    on_attempt: Callable[[Candidate], None],
    footprints: dict[Any, Footprint] | None = None,
) -> Searched:
    """Finds what :func:`searched` does, with smaller images where that finds nothing; raises the same."""

    def search_for(job: Rehearsals, counted: Lengths, hear: Callable[[Candidate], None]) -> Found:
        return searched(job, facts, counted, hear, footprints)

    return with_smaller_images(rehearsals, facts, lengths, search_for, on_attempt)


def make_plan(
    rehearsals: Rehearsals,
    best: Found,
    facts: ModelFacts,
    lengths: Lengths,
    *,
    seconds: float,
) -> Plan:
    """The plan of what was found best, with alternatives, what the data say, and how long it will take."""
    job, knobs, profile = rehearsals.job, best.estimate.knobs, lengths.profile
    limit = job.row_limit(knobs)
    rows, levers, cut = knobs.per_device_train_batch_size, best.levers, None
    flash_attention = None if facts.flash_attention else FLASH_ATTENTION[0]
    if knobs.fp16 and "fp16" not in job.arguments:  # the card's own precision, which is not TRL's
        why = why_fp16(rehearsals.hardware.capability)
        levers = (Lever(name="fp16", before=False, after=True, harm=Harm.NONE, why=why), *levers)
    if profile is not None and not job.pins_length and not job.is_online:  # the length was left to us
        cut = context_cut(profile, facts.context_length, job.method)
    return Plan(
        job=job,
        level=best.level,
        estimate=best.estimate,
        defaults=rehearsals.defaults,
        levers=levers,
        attempts=best.attempts,
        alternatives=best.alternatives,
        data=None if profile is None else summary(profile, limit=limit, rows=rows, pads=knobs.pads_rows),
        proposals=() if profile is None else proposals(profile, knobs, job, flash_attention=flash_attention),
        warnings=(
            *filter(None, (cut, lengths.why_not, best.estimate.unquantized)),
            *machine_warnings(job, knobs, rehearsals.hardware.topology),
        ),
        questions=questions(best.level, best.estimate.knobs, best.alternatives),
        advice=advice(job, knobs, rehearsals.defaults, facts),
        optimizer_steps=optimizer_steps(job, knobs, lengths),
        seconds=round(seconds, 3),
        row_tokens=row_length(job, knobs, lengths.longest),
        versions=versions_key(),
        model_digest=facts.digest,
        allocator=environment_setting(job.environment),
        most=best.most,
        objects=None if job.python_call is None else job.python_call.digest,
        price=None if job.budget is None else rehearsals.price,
        vllm_server=vllm_server(job, knobs, rehearsals.hardware, facts, longest_prompt=lengths.longest),
    )


def plan_as_given(rehearsals: Rehearsals, predicted: Estimate) -> Plan:
    """A job's own settings as a plan, for those who want to see them run out of memory."""
    job, facts = rehearsals.job, rehearsals.describe()
    longest = job.prompt_length if job.is_online else facts.context_length
    given = Found(level="as given", estimate=predicted, attempts=(), levers=(), alternatives=())
    seconds = predicted.memory.rehearsal_seconds
    return make_plan(rehearsals, given, facts, Lengths(longest=longest), seconds=seconds)


NOT_MODELLED = (
    "not modelled: a machine that is slower than the others, for which all wait in every step; a network that others "
    "use too; and how the latency of collectives grows: each weighs more the more machines there are"
)


def machine_warnings(job: Job, knobs: Knobs, topology: Topology) -> Iterator[str]:
    """Says what is not modelled of several machines, and what TRL's default makes of the effective batch."""
    if topology.nodes == 1:
        return
    yield NOT_MODELLED
    if job.effective_batch_size is None and not {ROWS, STEPS} & job.arguments.keys():
        rows, least = job.method_facts.rows(knobs.effective_batch_size), knobs.processes
        yield (
            f"{rows} in each optimizer step: with no --effective_batch_size given, TRL's "
            f"default is taken on each of {knobs.processes:,} GPUs, and the learning rate is not adapted to it; "
            f"--effective_batch_size takes multiples of {least}"
        )


FLASH_CAPABILITY = (8, 0)
"""Of the oldest cards with the kernels that ring attention takes (``rehearsal.cuda.attention_kernels``)."""


def with_shared_tokens(
    rehearsals: Rehearsals,
    facts: ModelFacts,
    lengths: Lengths,
    space: Space,
    limits: Limits,
    on_attempt: Callable[[Candidate], None],
    footprints: dict[Any, Footprint] | None,
) -> Found | None:
    """The plan of the fewest GPUs that share a row and hold it without harm; None where it is not to be tried, where
    GPUs that share none hold it, and where not even all of them do.

    Example: rows of 131,072 tokens on 8 GPUs: 1, 2, 4 and 8 are tried, and the first that fits is taken. What was tried
    before stands among the plan's attempts.
    """
    sizes, way = degrees(space, rehearsals.job), way_of(rehearsals.job)
    if not sizes or (way.in_half_precision and rehearsals.hardware.capability < FLASH_CAPABILITY):
        return None
    tried: tuple[Candidate, ...] = ()

    def hear(attempt: Candidate) -> None:
        nonlocal tried
        tried += (attempt,)
        on_attempt(attempt)

    for size in (1, *sizes):
        alike = _sharing(rehearsals, way, size, space.effective_batch_size)
        others = alike.space(facts, lengths)
        try:
            found = find(others, Memo(others, Predictions(alike, facts, lengths, footprints), hear), limits)
        except RehearsalError:
            if size == 1:
                raise
            return None  # this model's attention cannot be shared; the search without goes on
        if found is not None and found.level == LEVELS[0].name:
            return None if size == 1 else replace(found, attempts=tried, levers=(*found.levers, _lever(way, size)))
    return None


def _sharing(rehearsals: Rehearsals, way: SharedTokens, size: int, effective_batch_size: int) -> Rehearsals:
    """The same job, with nothing but time to lose, and rows that so many share."""
    job, defaults = rehearsals.job, rehearsals.defaults
    arguments = {**job.arguments, **({way.name: size} if size > 1 else {})}
    forbid = job.forbid | {name for name, row in LEVERS.items() if row.offloads}
    harmless = replace(
        job, arguments=arguments, fit="lossless", forbid=forbid, effective_batch_size=effective_batch_size
    )
    sizes: dict[str, Any] = {way.name: size}
    sharding = way.shardings[-1] if size > 1 else defaults.sharding
    return replace(rehearsals, job=harmless, defaults=replace(defaults, sharding=sharding, **sizes))


def _lever(way: SharedTokens, size: int) -> Lever:
    row = LEVERS[way.name]
    return Lever(name=row.name, before=1, after=size, harm=row.harm, why=row.reason)


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
    lever = _lever_of_images(rehearsals, lengths, searched, tried)
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
    for pixels in _smaller_areas(facts, lengths.images):
        smaller = rehearsals.with_max_pixels(pixels)
        uncut = replace(smaller, job=replace(smaller.job, forbid=smaller.job.forbid | {MAX_LENGTH}))
        counted = smaller.lengths() if lengths.profile is not None else lengths
        with contextlib.suppress(DoesNotFitError):
            found = search(uncut, counted, on_attempt)
            return Searched(rehearsals=smaller, lengths=counted, found=found)
    return None


def _smaller_areas(facts: ModelFacts, images: Iterable[str]) -> Iterator[int]:
    """Yield the areas that change the largest of these images, largest first."""
    largest = max(width * height for width, height in (map(int, size.split("x")) for size in images))
    steps = [step for step in facts.pixel_steps if facts.enlarges_images or step < largest]
    yield from steps[:MOST_STEPS]


def _lever_of_images(rehearsals: Rehearsals, before: Lengths, searched: Searched, tried: Sequence[Candidate]) -> Lever:
    """Say what full size would need at least, and what becomes of the row with most tokens of images."""
    row, pixels = LEVERS[SMALLER_IMAGES], searched.found.estimate.knobs.max_pixels
    whole = [each.required_bytes for each in tried if each.knobs.max_pixels is None]
    needed = f"at full size it needs at least {against(min(whole), rehearsals.card.budget_bytes)}: " if whole else ""
    counts = [each.profile for each in (before, searched.lengths)]
    most = [each.images.summary().most for each in counts if each is not None and each.images is not None]
    tokens = f" (a row has {most[1]} tokens of images at most, in place of {most[0]})" if len(most) == 2 else ""
    return Lever(name=row.name, before=None, after=pixels, harm=row.harm, why=f"{needed}{row.reason}{tokens}")
