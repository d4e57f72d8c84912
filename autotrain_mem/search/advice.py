"""Lists what a plan leaves to the user: questions where more harm is much faster, and advice on given settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autotrain_mem.search.adapter import LEARNING_RATE_FACTOR, NEAR, adapter_learning_rate
from autotrain_mem.search.levels import LEVELS, SHORTER_ROWS
from autotrain_mem.search.precision import loses_updates
from autotrain_mem.settings.adapter_config import LORA, kind_of
from autotrain_mem.settings.levers import KEEPS_UPDATES, LADDER, LOST_ABOVE, ROUNDING, USUAL_WEIGHT, is_pulled
from autotrain_mem.types import Candidate, Harm, Job, Knobs, Proposal
from autotrain_mem.types.model import ModelFacts

MUCH_FASTER = 1.25
"""From which gain in speed a coarser level is a question. Predicted speeds are off by up to 15 % either way, mostly the
same way for both; what gains less than a quarter may gain nothing."""


def questions(level: str, knobs: Knobs, alternatives: Sequence[Candidate]) -> tuple[Proposal, ...]:
    """Asks whether a level that does more harm is to be taken, where it is much faster.

    Example: ``--max_slowdown 1.2 --fit rounding``, since "rounding (dtype bfloat16, optim adamw_8bit) would be 1.3 x as
    fast".
    """
    return tuple(
        Proposal(flags=_taking(each), why=f"{each.level} ({_differences(knobs, each.knobs)}) {_gain(each)}")
        for each in alternatives
        if each.fits and (each.ratio or 0.0) >= MUCH_FASTER and each.level not in (level, SHORTER_ROWS)
    )


def _taking(each: Candidate) -> str:
    """The flags by which the search passes over what it chose, and goes no further than this level."""
    below = max(1.0, math.floor(10 * (each.ratio or 1.0) * 0.95) / 10)
    rounds = any(step.name == each.level and step.own == ROUNDING for step in LEVELS)
    return f"--max_slowdown {below:g}{' --fit rounding' if rounds else ''}"


def _gain(each: Candidate) -> str:
    return f"would be {each.ratio:.1f} x as fast"


def _differences(knobs: Knobs, other: Knobs) -> str:
    rows = [row for row in LADDER if row.harm >= Harm.ROUNDING and is_pulled(row, other) and not is_pulled(row, knobs)]
    settings = [(row.knobs[0], getattr(other, row.knobs[0])) for row in rows]
    return ", ".join(name if value is True else f"{name} {value}" for name, value in settings)


def advice(job: Job, knobs: Knobs, defaults: Knobs, facts: ModelFacts) -> tuple[Proposal, ...]:
    """Lists what would make the training worth more, where the user's own words keep a plan from choosing it."""
    is_lora = knobs.use_peft and kind_of(knobs.peft_config) in ("", LORA)
    of_adapter = [*_adapters_rate(job, knobs, defaults), *_targets(job, knobs, facts)] if is_lora else []
    return (*of_adapter, *_lost_updates(job, knobs))


def _adapters_rate(job: Job, knobs: Knobs, defaults: Knobs) -> Iterator[Proposal]:
    wanted, rate = adapter_learning_rate(replace(defaults, optim=knobs.optim), job), knobs.learning_rate
    if wanted is None or rate is None or wanted / NEAR < rate < wanted * NEAR:
        return
    is_given = "learning_rate" in job.arguments
    whose = f"the given {rate:g}" if is_given else f"TRL's {rate:g} is for full fine-tuning, and"
    yield Proposal(
        flags=f"--learning_rate {wanted:g}",
        why=f"{whose} is {'low' if rate < wanted else 'high'} for an adapter: these learn best at about "
        f"{LEARNING_RATE_FACTOR} times full fine-tuning's learning rate",
    )


def _targets(job: Job, knobs: Knobs, facts: ModelFacts) -> Iterator[Proposal]:
    """Names more targets where the user turned LoRA on without any: PEFT's own list is often two layers of seven."""
    is_theirs = (
        knobs.lora_target_modules is None and knobs.peft_config is None and isinstance(facts.lora_targets, tuple)
    )
    if not is_theirs or facts.adapted is None or not isinstance(facts.lora_targets, tuple):
        return
    yield Proposal(
        flags=f"--lora_target_modules {_quoted(facts.adapted)}",
        why=f"PEFT adapts {' and '.join(facts.lora_targets)} of this architecture where no targets are named, and that "
        "learns less at any rank",
    )


def _quoted(text: str) -> str:
    return text if text.replace("-", "").isalnum() else f"'{text}'"


def _lost_updates(job: Job, knobs: Knobs) -> Iterator[Proposal]:
    rate = knobs.learning_rate or 0.0
    if not loses_updates(knobs):
        return
    yield Proposal(
        flags="--dtype float32" if "dtype" in job.arguments else f"--optim {KEEPS_UPDATES}",
        why=f"weights in bfloat16 lose small updates: a step of Adam is about {rate:g}, which leaves all above "
        f"{rate * LOST_ABOVE:.2g} as it was, and most are about {USUAL_WEIGHT:g}; float32 weights keep them, and so "
        f"does --optim {KEEPS_UPDATES}, which sums up what is lost (Kahan summation; pip install torch-optimi)",
    )
