"""Replays batches of every length: rehearses shorter rows once, and draws batches from the lengths in the data."""

import statistics
from collections.abc import Callable
from dataclasses import replace

from autotrain_mem.estimator.mixed_steps import DrawnBatches, Rehearsed, drawn_batches, mixed_lengths
from autotrain_mem.estimator.step_parts import UnclearStepsError, step_parts
from autotrain_mem.estimator.vllm_share import sleeps
from autotrain_mem.methods.interface import method_of
from autotrain_mem.planning.rehearsals import Subject
from autotrain_mem.types import Estimate, Job, Knobs, MixedLengths, Trace

LEAST_TOKENS = 32
"""If the longest rows have fewer tokens, shorter ones are not worth a rehearsal."""
SHORTER = (0.125, 0.5)
"""The shorter rows have the median batch's length, but at least and at most these shares of the longest row."""
MOST_BATCHES = 8
"""The largest number of micro-batches of a step that are replayed."""


def batches_of(subject: Subject, knobs: Knobs) -> DrawnBatches | None:
    """Draws a run's batches; None if row lengths make no difference, or if the data were not read."""
    job, profile = subject.job, subject.lengths.profile
    if profile is None or _count_as_alike(job, knobs):
        return None
    limit = job.row_limit(knobs)
    if (longest := subject.row_length(knobs)) < LEAST_TOKENS or len(profile.kept_lengths(limit)) < 2:
        return None
    rows, each_step = knobs.per_device_train_batch_size, min(MOST_BATCHES, knobs.gradient_accumulation_steps)
    if job.is_online and not method_of(job.method).samples_each_micro_step:
        # all completions generated at once are padded together, each prompt once per completion
        rows, each_step = max(1, rows * knobs.gradient_accumulation_steps // (knobs.num_generations or 1)), 1
    return drawn_batches(profile, rows=rows, each_step=each_step, limit=limit, longest=longest)


def _count_as_alike(job: Job, knobs: Knobs) -> bool:
    """Returns whether all batches have equally many tokens, or vLLM's sleep mode empties the cache between them."""
    return not knobs.pads_rows or bool(job.arguments.get("padding_free")) or sleeps(job)


def replayed(subject: Subject, knobs: Knobs, trace_of: Callable[[int], Trace]) -> MixedLengths | None:
    """Returns the reserved bytes of batches of every length; None if they cannot be replayed. Raises RehearsalError
    if a rehearsal fails."""
    if (batches := batches_of(subject, knobs)) is None or not subject.caches or subject.lengths.images:
        return None
    longest = subject.row_length(knobs)
    least, most = (round(share * longest) for share in SHORTER)
    shorter, settings = min(most, max(least, round(statistics.median(batches.tokens)))), subject.endless_room.settings
    long = Rehearsed(tokens=longest, trace=trace_of(longest))
    try:
        step_parts(long.trace, accumulates=batches.each_step > 1)  # raises before the shorter rows are rehearsed
        short = Rehearsed(tokens=shorter, trace=trace_of(shorter))
        # If every step empties the cache, the trace itself has these events.
        empties_cache = int(subject.job.arguments.get("torch_empty_cache_steps") or 0) > 1
        return mixed_lengths(long, short, batches, settings, empties_cache=empties_cache)
    except UnclearStepsError:
        return None


def with_reason(estimate: Estimate, subject: Subject) -> Estimate:
    """Returns the estimate with the reason why rows of every length were not replayed, if lengths make a difference."""
    memory, job, lengths = estimate.memory, subject.job, subject.lengths
    if memory.mixed_lengths is not None or not subject.caches or _count_as_alike(job, estimate.knobs):
        return estimate
    if lengths.profile is None and not job.names_data:
        why = "their lengths are unknown; give --dataset"
    elif lengths.profile is None:
        why = f"the data could not be read: {lengths.why_not.rstrip('.')}"
    elif batches_of(subject, estimate.knobs) is None:
        return estimate
    elif lengths.images:
        why = "the ratio of pixels to text differs from row to row"
    else:
        why = "the steps of this rehearsal cannot be replayed with other rows, as with several processes or offloading"
    not_counted = (f"memory reserved over hours with rows of every length: {why}", *memory.not_counted)
    return replace(estimate, memory=replace(memory, not_counted=not_counted))
