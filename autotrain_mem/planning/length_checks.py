"""Refuses a length at which rows lose what they cannot do without: a part of an image, or all of a prompt."""

from __future__ import annotations

from autotrain_mem.search.space import Space
from autotrain_mem.support.errors import ContextLengthError, UsageError
from autotrain_mem.types.data import DataProfile


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
