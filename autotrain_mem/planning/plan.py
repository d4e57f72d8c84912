"""Searches the settings of a job and makes a plan from them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autotrain_mem.allocator.settings import environment_setting
from autotrain_mem.machine.prices import price_of
from autotrain_mem.planning.limits import limits_of, optimizer_steps
from autotrain_mem.planning.maximum import question_of
from autotrain_mem.planning.predictions import Footprints, Predictions
from autotrain_mem.planning.rehearsals import Lengths, Rehearsals, Subject
from autotrain_mem.planning.vllm_server import check_colocated, vllm_server
from autotrain_mem.search.advice import advice, context_cut, proposals, questions
from autotrain_mem.search.changes import against
from autotrain_mem.search.largest import find_most
from autotrain_mem.search.levels import LEVELS, SHORTER_ROWS, SMALLER_IMAGES_LEVEL, allowed, levels
from autotrain_mem.search.memo import Memo, OnAttempt
from autotrain_mem.search.nearest import nearest, suggestion
from autotrain_mem.search.search import Limits, SearchResult, find, no_plan
from autotrain_mem.search.shardings import degrees, way_of
from autotrain_mem.search.space import Space
from autotrain_mem.settings.knobs import ROWS, STEPS
from autotrain_mem.settings.levers import LEVERS, SMALLER_IMAGES
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support.errors import DoesNotFitError, RehearsalError, UsageError
from autotrain_mem.support.versions import versions_key
from autotrain_mem.types import Candidate, Estimate, Hardware, Harm, Job, Knobs, Lever, Plan, Topology
from autotrain_mem.types.data import summary
from autotrain_mem.types.gpu_comparison import NO_PRICE, NOTHING_FITS, Cards, CardVerdict
from autotrain_mem.types.hardware import Capability, kernel_class, lacks_bf16


def searched(subject: Subject, on_attempt: OnAttempt, footprints: Footprints | None = None) -> SearchResult:
    """Returns the best settings that fit.

    ``footprints``: results of an earlier search's rehearsals; new ones are added.

    Raises:
        DoesNotFitError: nothing that the user allows fits.
        LimitError: everything that fits exceeds a limit of time or cost.
        RehearsalError: a rehearsal failed.
        BatchSplitError, ContextLengthError: the given sizes contradict each other, or exceed the model's context.
    """
    question = question_of(subject)
    space = subject.space() if question is None else question.space(question.values[0])
    check_colocated(subject, space.base)
    limits = limits_of(subject, space.base)
    footprints = {} if footprints is None else footprints
    if question is None and (shared := with_shared_tokens(subject, space, limits, on_attempt, footprints)):
        return shared
    memo = Memo(space, Predictions(subject, footprints), on_attempt)
    found = find(space, memo, limits) if question is None else find_most(question, memo, limits)
    if found is not None:
        return found
    raise no_plan(space, memo, limits)


def make_plan(subject: Subject, best: SearchResult, *, seconds: float) -> Plan:
    """Makes a plan from the result of a search."""
    job, knobs, facts, profile = subject.job, best.estimate.knobs, subject.facts, subject.lengths.profile
    limit = job.row_limit(knobs)
    rows, levers, cut = knobs.per_device_train_batch_size, best.levers, None
    empty = ""
    if knobs.fp16 and "fp16" not in job.arguments:
        capability = ".".join(map(str, subject.hardware.capability))
        why = (
            f"compute capability {capability} has no tensor cores for bfloat16: mixed precision uses float16, with "
            "a scaler that keeps small gradients from vanishing"
        )
        levers = (Lever(name="fp16", before=False, after=True, harm=Harm.NONE, why=why), *levers)
    if profile is not None and not job.pins_length and not job.is_online:
        cut = context_cut(profile, facts.context_length, job.method)
    if profile is not None and profile.empty_rows:
        kind = "an empty prompt" if job.is_online else "an empty text or answer, of which only the end token is learned"
        empty = f"{profile.empty_rows:,} of the data's {profile.rows:,} rows have {kind}"
    return Plan(
        job=job,
        level=best.level,
        estimate=best.estimate,
        defaults=subject.defaults,
        levers=levers,
        attempts=best.attempts,
        alternatives=best.alternatives,
        data=None if profile is None else summary(profile, limit=limit, rows=rows, pads=knobs.pads_rows),
        proposals=() if profile is None else proposals(profile, knobs, job, flash_attention=facts.flash_attention),
        warnings=(
            *filter(None, (cut, empty, subject.lengths.why_not, best.estimate.unquantized)),
            *machine_warnings(job, knobs, subject.hardware.topology),
        ),
        questions=questions(best.level, best.estimate.knobs, best.alternatives),
        advice=advice(job, knobs, facts, profile),
        optimizer_steps=optimizer_steps(subject, knobs),
        seconds=round(seconds, 3),
        row_tokens=subject.row_length(knobs),
        versions=versions_key(),
        model_digest=facts.digest,
        allocator=environment_setting(job.environment),
        most=best.most,
        objects=None if job.python_call is None else job.python_call.digest,
        price=None if job.budget is None else subject.price,
        vllm_server=vllm_server(subject, knobs),
    )


def plan_as_given(rehearsals: Rehearsals, predicted: Estimate) -> Plan:
    """Returns a plan of the given settings, to show that they run out of memory."""
    job, facts = rehearsals.job, rehearsals.describe()
    lengths = Lengths(longest=job.prompt_length if job.is_online else facts.context_length)
    given = SearchResult(level="as given", estimate=predicted, attempts=(), levers=(), alternatives=())
    return make_plan(rehearsals.subject(facts, lengths), given, seconds=predicted.memory.rehearsal_seconds)


NOT_MODELLED = (
    "not modelled: a machine that is slower than the others, a network that is shared with other jobs, and the latency "
    "of collectives; each costs more with more machines"
)


def machine_warnings(job: Job, knobs: Knobs, topology: Topology) -> Iterator[str]:
    """Yields the warnings for a job on several machines."""
    if topology.nodes == 1:
        return
    yield NOT_MODELLED
    if job.effective_batch_size is None and not {ROWS, STEPS} & job.arguments.keys():
        rows, least = job.method_facts.rows(knobs.effective_batch_size), knobs.processes
        yield (
            f"{rows} in each optimizer step: no --effective_batch_size is given, so each of {knobs.processes:,} GPUs "
            "uses TRL's default batch size, and the learning rate is not adapted to the larger batch; "
            f"--effective_batch_size takes multiples of {least}"
        )


FLASH_CAPABILITY = (8, 0)
"""The lowest compute capability with the kernels of ring attention (``rehearsal.cuda.attention_kernels``)."""


def with_shared_tokens(
    subject: Subject, space: Space, limits: Limits, on_attempt: OnAttempt, footprints: Footprints
) -> SearchResult | None:
    """Returns the plan that costs only time and shares each row among the fewest GPUs: 2, 4 or 8 of 8 GPUs.

    Returns None if rows may not be shared, if the job fits without sharing, or if sharing does not make it fit.
    """
    sizes, way = degrees(space, subject.job), way_of(subject.job)
    if not sizes or (way.in_half_precision and subject.hardware.capability < FLASH_CAPABILITY):
        return None
    tried: list[Candidate] = []
    job, defaults = subject.job, subject.defaults
    for size in (1, *sizes):
        # The same job, lossless and without offloading, with rows shared by this many GPUs.
        harmless = replace(
            job,
            arguments={**job.arguments, **({way.name: size} if size > 1 else {})},
            fit="lossless",
            forbid=job.forbid | {name for name, row in LEVERS.items() if row.offloads},
            effective_batch_size=space.effective_batch_size,
        )
        shares: dict[str, Any] = {"sharding": way.shardings[-1] if size > 1 else defaults.sharding, way.name: size}
        alike = replace(subject, job=harmless, defaults=replace(defaults, **shares))
        others = alike.space()
        memo = Memo(others, Predictions(alike, footprints), on_attempt)
        try:
            found = find(others, memo, limits)
        except RehearsalError:
            if size == 1:
                raise
            return None  # this model's attention does not support shared rows
        tried += memo.attempts
        if found is not None and found.level == LEVELS[0].name:
            row = LEVERS[way.name]
            lever = Lever(name=row.name, before=1, after=size, harm=row.harm, why=row.reason)
            return None if size == 1 else replace(found, attempts=tuple(tried), levers=(*found.levers, lever))
    return None


MOST_STEPS = 4
"""The most image areas to try, from the largest down; ``--max_pixels`` accepts smaller areas."""


def searched_with_images(
    subject: Subject, on_attempt: OnAttempt, footprints: Footprints | None = None
) -> tuple[Subject, SearchResult]:
    """Searches; if nothing fits without cutting rows, searches again with the largest images that fit.

    Rows are cut at their end, where the answers are, so images are made smaller first. Raises as :func:`searched` does.
    """
    tried: list[Candidate] = []

    def record(attempt: Candidate) -> None:
        tried.append(attempt)
        on_attempt(attempt)

    try:
        found = searched(subject, record, footprints)
    except DoesNotFitError:
        if (smaller := _with_smaller_images(subject, record, footprints)) is None:
            raise
    else:
        smaller = _with_smaller_images(subject, record, footprints) if found.level == SHORTER_ROWS else None
        if smaller is None:
            return subject, found
    other, found = smaller
    row, whole = LEVERS[SMALLER_IMAGES], [each.required_bytes for each in tried if each.knobs.max_pixels is None]
    needed = f"at full size it needs at least {against(min(whole), subject.budget_bytes)}: " if whole else ""
    counts = [each.lengths.profile for each in (subject, other)]
    most = [each.images.summary().most for each in counts if each is not None and each.images is not None]
    tokens = f" (a row has at most {most[1]} image tokens, in place of {most[0]})" if len(most) == 2 else ""
    why, pixels = f"{needed}{row.reason}{tokens}", found.estimate.knobs.max_pixels
    lever = Lever(name=row.name, before=None, after=pixels, harm=row.harm, why=why)
    levers = (*found.levers, lever)
    return other, replace(found, level=SMALLER_IMAGES_LEVEL, levers=levers, attempts=tuple(tried))


def _with_smaller_images(
    subject: Subject, on_attempt: OnAttempt, footprints: Footprints | None
) -> tuple[Subject, SearchResult] | None:
    """Tries smaller images step by step, without cutting rows; None if that is forbidden or does not help."""
    facts, images = subject.facts, subject.lengths.images
    if not images or not allowed(LEVERS[SMALLER_IMAGES], subject.space()):
        return None
    largest = max(width * height for width, height in (map(int, size.split("x")) for size in images))
    areas = [step for step in facts.pixel_steps if facts.enlarges_images or step < largest]  # that shrink an image
    for pixels in areas[:MOST_STEPS]:
        smaller = subject.with_max_pixels(pixels)
        if subject.lengths.profile is not None:
            smaller = replace(smaller, lengths=smaller.count_lengths())
        uncut = replace(smaller, job=replace(smaller.job, forbid=smaller.job.forbid | {MAX_LENGTH}))
        with contextlib.suppress(DoesNotFitError):
            return smaller, searched(uncut, on_attempt, footprints)
    return None


def compare_cards(
    rehearsals: Rehearsals,
    cards: Sequence[Hardware],
    lengths: Lengths,
    on_attempt: Callable[[Hardware, Candidate], None] = lambda card, attempt: None,
) -> Cards:
    """Finds the best plan for each card; rehearses only few layers if they determine the whole model.

    Raises:
        UsageError: no card supports the job; the error is that of the smallest card.
        ModelError, DatasetError, RehearsalError: the job fails, whatever the card.
    """
    shared: Footprints = {}
    classes = [kernel_class(card.capability) for card in cards if not lacks_bf16(card.capability)]
    usual = max(classes, key=classes.count, default=None)
    ordered = sorted(cards, key=lambda card: (card.topology.processes * card.total_bytes, card.name))
    refused: list[UsageError] = []
    verdicts = []
    for card in ordered:
        try:
            verdicts.append(_judged(rehearsals.on(card), lengths, shared, usual, partial(on_attempt, card)))
        except UsageError as error:  # such as a kernel that the card lacks
            refused.append(error)
            verdicts.append(CardVerdict(hardware=card, refusal=error.message, price=price_of(card, rehearsals.prices)))
    if refused and len(refused) == len(ordered):
        raise refused[0]
    return Cards(verdicts=tuple(verdicts), at_most=rehearsals.job.bounds_time(is_counted=lengths.profile is not None))


NEARLY = 0.9
"""The share of the least demanding settings' bytes from which a card without a plan lacks little."""


def _judged(
    rehearsals: Rehearsals, lengths: Lengths, shared: Footprints, usual: Capability | None, on_attempt: OnAttempt
) -> CardVerdict:
    """Returns one card's plan, or the reason why there is none. Raises UsageError if the card cannot run it.

    A card with bfloat16 is searched with rehearsals for the ``usual`` class of cards, and the plan is then rehearsed
    for its own class; it is searched again if that does not fit."""
    card = rehearsals.hardware
    if rehearsals.job.budget is not None and rehearsals.price is None:
        return CardVerdict(hardware=card, refusal=NO_PRICE, price=None)
    subject = rehearsals.subject(lengths=lengths)
    question = question_of(subject)
    space = subject.space() if question is None else question.space(question.values[0])
    limits = limits_of(subject, space.base)
    kind = kernel_class(card.capability)
    own = Predictions(subject, shared, kind)
    every = {
        knobs.growing(False).as_rehearsed(): knobs for level in levels(space) for line in level.lines for knobs in line
    }
    for predictions in (Predictions(subject, shared, kind if lacks_bf16(kind) else usual), own):
        memo = Memo(space, predictions, on_attempt)
        memo.ask([every[key[0]] for key in shared if key[0] in every and key[-1] == predictions.kernels])
        best = find(space, memo, limits, brief=True) if question is None else find_most(question, memo, limits)
        there = [] if best is None else own.rehearse([best.estimate.knobs], whole=False)
        if all(each.fits for each in there):
            break
    if best is None:
        refusal = next(reversed(limits.refusals), NOTHING_FITS)
        least = min(memo.estimates, key=lambda each: each.required_bytes, default=None)
        if least is None or refusal != NOTHING_FITS:
            return CardVerdict(hardware=card, refusal=refusal, price=subject.price)
        lacks_little = least.budget_bytes >= NEARLY * least.required_bytes
        fitting = nearest(space, memo) if lacks_little else None
        flags = "" if fitting is None else suggestion(space, fitting.knobs)
        return CardVerdict(hardware=card, refusal=refusal, least=least, nearest=flags, price=subject.price)
    (found,), steps = there, optimizer_steps(subject, best.estimate.knobs)
    return CardVerdict(hardware=card, level=best.level, estimate=found, optimizer_steps=steps, price=subject.price)
