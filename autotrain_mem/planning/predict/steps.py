"""Counts the optimizer steps of a whole training."""

from __future__ import annotations

import math

from autotrain_mem.planning.rehearsals import Lengths
from autotrain_mem.settings.words import EPOCHS
from autotrain_mem.types import Job, Knobs


def optimizer_steps(job: Job, knobs: Knobs, lengths: Lengths) -> int | None:
    """How many steps the whole training has; None where neither ``max_steps`` nor the data say.

    As transformers counts (``trainer.py: set_initial_training_values``): the last step of an epoch may be a short one.
    Packing leaves the tokens and changes the rows.
    """
    asked = job.arguments.get("max_steps", -1)
    if isinstance(asked, int) and asked > 0:
        return asked
    profile = lengths.profile
    if profile is None:
        return None
    epochs = float(job.arguments.get("num_train_epochs", EPOCHS))
    rows = float(profile.rows - (profile.truncated_rows(knobs.max_length) if profile.drops else 0))
    if knobs.packing and knobs.max_length:
        rows = math.ceil(profile.kept_tokens(None) / knobs.max_length)
    if job.is_online:
        rows *= knobs.num_generations or 1
    return math.ceil(epochs * math.ceil(rows / knobs.effective_batch_size))
