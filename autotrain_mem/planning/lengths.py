"""How long a job's rows are: counted once and kept, as a batch holds them, and refused where they lose too much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autotrain_mem.planning.kept_answers import answered
from autotrain_mem.search.space import Space
from autotrain_mem.settings.words import MAX_LENGTH, is_wish
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, ContextLengthError, ModelNotFoundError, UsageError
from autotrain_mem.support.store import Store
from autotrain_mem.support.versions import versions_key
from autotrain_mem.types import Counting, DataProfile, Fingerprint, Job, Knobs
from autotrain_mem.worker.pool import Workers

LONGEST_UNKNOWN = 1024
"""Tokens of a rehearsed row when neither the user, the data nor the model's config limits it: TRL's own max_length."""
PROMPT_UNKNOWN = 512
"""Tokens of a rehearsed prompt when neither the user nor the data say: TRL's own max_prompt_length, as long as it had
one (trl/trainer/grpo_config.py up to 0.24)."""
OnCounting = Callable[[Counting], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """How long rows are, as far as that is known."""

    longest: int | None
    """Tokens of the longest row, or prompt; None where rows fill ``max_length``."""
    profile: DataProfile | None = None
    """None where the data were not read."""
    why_not: str = ""
    """Why they were not, though they are named."""
    images: tuple[str, ...] = ()
    """Sizes of the images of the row that has most of them; empty where rows are text."""


# -- counted -----------------------------------------------------------------------------------------------------------


def counted_lengths(
    job: Job, workers: Workers, store: Store, on_counting: OnCounting = lambda counting: None
) -> Lengths:
    """Token lengths of the data, counted once and then kept.

    Raises:
        DatasetError, ModelNotFoundError: there is nothing to count, or nothing to count with, and it is needed.
    """
    try:
        profile = _profile(job, workers, store, on_counting)
    except ModelNotFoundError as error:
        if not job.pins_length:
            raise
        why = f"The tokens of the data were not counted: {error.message}"
        return Lengths(longest=job.prompt_length, why_not=why, images=job.images)
    images = job.images if profile.images is None else profile.images.worst
    return Lengths(longest=max(profile.longest, profile.longest_evaluated), profile=profile, images=images)


def lengths_to_estimate(job: Job, workers: Workers, store: Store, *, reads_images: bool) -> Lengths:
    """Counts what an estimate needs: tokens where it is asked to, and prompts, whose length nothing else says."""
    counts = is_wish(job.arguments.get(MAX_LENGTH))
    if job.is_online:
        counts = job.prompt_length is None and example_dataset(job) is None
    counts = counts or (job.names_data and not job.images and reads_images)
    if counts:
        return counted_lengths(job, workers, store)
    return Lengths(longest=job.prompt_length, images=job.images)


def named_lengths(lengths: Lengths, job: Job, workers: Workers, store: Store) -> Lengths:
    """Adds the token lengths of data that the job names, where these were not read yet and can be."""
    if lengths.profile is not None or not job.names_data:
        return lengths
    try:
        return replace(lengths, profile=_profile(job, workers, store, lambda counting: None))
    except AutofitError as error:  # an estimate does without
        return replace(lengths, why_not=error.message)


def _profile(job: Job, workers: Workers, store: Store, on_counting: OnCounting) -> DataProfile:
    def ask() -> Fingerprint:
        return workers.first.fingerprint(job)

    def keeps(found: Fingerprint) -> bool:
        return not found.names_files

    found = answered(store, job, "fingerprint", {}, Fingerprint, ask, reads_data=True, keeps=keeps)
    key = {"fingerprint": found.digest, "versions": versions_key()}
    kept = store.get("profile", key)
    if kept is not None:
        return codec.from_json(DataProfile, kept)
    profile = workers.first.profile(job, on_counting)
    store.put("profile", key, codec.to_json(profile))
    return profile


def example_dataset(job: Job) -> str | None:
    """TRL's own example, when the job names no data: a plan takes its rows."""
    return None if job.names_data else job.method_facts.example_dataset


def reads_dataset(job: Job, *, to_train: bool) -> bool:
    """Whether planning counts tokens: not when the length is given, no data are named, and none will be trained on.

    Nor of a script's stream, whose rows nobody knows before they are trained on.
    """
    if job.python_call is not None:
        return job.python_call.holds_rows
    return to_train or not job.pins_length or example_dataset(job) is None


def as_rehearsed(job: Job, lengths: Lengths) -> Job:
    """Returns the job as it is rehearsed: every row with the images of the one that has most of them, and with the
    longest prompt and answer where these are told apart."""
    shown, profile = replace(job, images=lengths.images), lengths.profile
    if profile is None or not profile.longest_prompt:
        return shown
    return replace(shown, prompt_length=profile.longest_prompt, answer_length=profile.longest_answer)


def row_length(job: Job, knobs: Knobs, longest: int | None) -> int:
    """Tokens of the longest row that a batch can hold: packed blocks are always full, rows only as long as they are.

    For online methods that is the longest prompt, which nothing truncates.
    """
    if job.is_online:
        return longest or PROMPT_UNKNOWN
    limits = [job.row_limit(knobs), longest if knobs.pads_rows else None]
    return min((limit for limit in limits if limit is not None), default=LONGEST_UNKNOWN)


def padded_share(job: Job, knobs: Knobs, lengths: Lengths) -> float:
    """Returns the share of the longest micro-batch that one has on average, padded to the longest row that it drew."""
    profile = lengths.profile
    if profile is None or not knobs.pads_rows:
        return 1.0
    longest = row_length(job, knobs, lengths.longest) + knobs.completion_length
    limit = job.row_limit(knobs)
    drawn = profile.expected_longest(knobs.per_device_train_batch_size, limit) + knobs.completion_length
    return min(1.0, drawn / longest)


def row_tokens(job: Job, knobs: Knobs, lengths: Lengths) -> float:
    """Tokens of a row that count, on average and without padding; both sequences of a pair, prompt and completion."""
    sequences = job.method_facts.sequences_per_row
    profile = lengths.profile
    if profile is None or not knobs.pads_rows:
        return float(sequences * (row_length(job, knobs, lengths.longest) + knobs.completion_length))
    limit = job.row_limit(knobs)
    rows = profile.rows - (profile.truncated_rows(limit) if profile.drops else 0)
    answers = sequences if job.is_online else 1  # of pairs in the data both sides are counted
    return answers * (profile.kept_tokens(limit) / max(rows, 1) + knobs.completion_length)


# -- refused -----------------------------------------------------------------------------------------------------------


def check_lengths(profile: DataProfile, space: Space) -> None:
    """Refuse ``max_length``, or answers that are sampled, where the run would end at some row.

    Raises:
        UsageError: images, or whole prompts, would be cut.
        ContextLengthError: answers find no room behind the longest prompt.
    """
    _check_images(profile, space)
    _check_answers(profile, space)


def _check_answers(profile: DataProfile, space: Space) -> None:
    """Refuses a length at which an answer fills a row, whose prompt is cut away: TRL's collator would end the run when
    it comes to that row; and answers that find no room behind the longest prompt."""
    limit = space.base.max_length
    if not profile.longest_answer or limit is None:
        return
    if limit <= profile.longest_answer:
        raise UsageError(
            f"{limit:,} tokens leave nothing of a prompt: TRL cuts the beginning of a row, and the longest answer has "
            f"{profile.longest_answer:,}.",
            hint=f"--max_length {profile.least_length} or more, or auto, keeps a token of every prompt; or drop the "
            "rows with the longest answers.",
        )
    answer = space.base.max_new_tokens or 0
    prompt = min(profile.longest_prompt, limit - 1)
    if space.context_length is not None and prompt + answer > space.context_length:
        room = space.context_length - prompt
        cure = f"use --max_new_tokens {room} or less" if room > 0 else "drop the longest prompts from the data"
        raise ContextLengthError(
            f"the longest prompt ({prompt} tokens) and --max_new_tokens {answer} are beyond the model's context of "
            f"{space.context_length} tokens",
            hint=cure,
        )


def _check_images(profile: DataProfile, space: Space) -> None:
    """Refuses a length that would take a part of an image away: the model's forward would end
    (``transformers/models/*/modeling_*.py: get_placeholder_mask``), hours into the run perhaps."""
    images, limit = profile.images, space.base.max_length
    if images is None or limit is None or images.end <= limit:
        return
    cures = ["--max_pixels makes images smaller", f"drop the {images.rows_cut(limit):,} rows"]
    if space.context_length is None or images.end <= space.context_length:
        cures.insert(0, f"--max_length {images.end} or more, or auto, cuts no image")
    raise UsageError(
        f"{limit:,} tokens cut images of {images.rows_cut(limit):,} rows: the last image of one ends at token "
        f"{images.end:,}.",
        hint=f"{'; or '.join(cures)}.",
    )
