"""How long a job's rows are: counted once and kept, as a batch holds them, and refused where they lose too much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotrain_mem.search.space import Space
from autotrain_mem.support.errors import ContextLengthError, UsageError
from autotrain_mem.types import Counting, DataProfile, Job

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
