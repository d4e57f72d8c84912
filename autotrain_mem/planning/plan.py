"""Makes a plan of a search's result: what stands beside the settings, for those who have to agree with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from autotrain_mem.allocator.settings import environment_setting
from autotrain_mem.planning.lengths import Lengths, row_length
from autotrain_mem.planning.limits import limits_of, optimizer_steps
from autotrain_mem.planning.most import question_of
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.planning.shared_tokens import with_shared_tokens
from autotrain_mem.planning.smaller_images import Searched, with_smaller_images
from autotrain_mem.planning.suggestions import with_other_methods
from autotrain_mem.planning.vllm_server import check_colocated, vllm_server
from autotrain_mem.search.advice import FLASH_ATTENTION, advice, context_cut, proposals, questions
from autotrain_mem.search.largest import search_most
from autotrain_mem.search.precision import why_fp16
from autotrain_mem.search.search import NO_LIMITS, Found, search
from autotrain_mem.settings.knobs import ROWS, STEPS
from autotrain_mem.support.errors import DoesNotFitError
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
