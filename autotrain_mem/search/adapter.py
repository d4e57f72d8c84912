"""Chooses an adapter's targets, rank and learning rate if a plan turns LoRA on.

Sources: John Schulman and Thinking Machines Lab, "LoRA Without Regret" (doi 10.64434/tml.20250929), TRL's guide to it
(``docs/source/lora_without_regret.md``) and Unsloth's "LoRA hyperparameters guide". An adapter on every linear layer
learns like full fine-tuning if its rank suffices for the data. ``lora_alpha`` stays TRL's 32: PEFT scales by
alpha / rank, with which the best learning rate is nearly the same at every rank.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotrain_mem.methods.interface import method_of
from autotrain_mem.types import DataProfile, Job, Knobs
from autotrain_mem.types.methods_table import METHODS
from autotrain_mem.types.model import ModelFacts

LEARNING_RATE_FACTOR = 10
"""The best learning rate of an adapter divided by that of full fine-tuning, for any model and rank ("LoRA Without
Regret"). TRL's documentation gives 1e-5 in place of 1e-6 (DPO, GRPO) and 1e-3 in place of 1e-4 (Reward)."""

NEAR = 4
"""A learning rate within this factor of the best one gets no advice: sweeps in steps of 3 to 4 find no difference."""

RANKS = (16, 32, 64, 128, 256)
"""Ranks from TRL's default (``trl/trainer/model_config.py: lora_r``) to the largest of "LoRA Without Regret"."""

SMALLEST_RANK = 8
"""The smallest rank that is tried to save memory: PEFT's default (``peft/tuners/lora/config.py: r``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Holds the settings that come with LoRA if the plan turns it on, and their reasons."""

    lora_r: int
    lora_target_modules: tuple[str, ...] | None
    learning_rate: float | None
    why: Mapping[str, str] = field(hash=False)

    def settings(self, pinned: Collection[str]) -> dict[str, Any]:
        """Returns the knobs to set, without those that the user gave."""
        names = ("lora_r", "lora_target_modules", "learning_rate")
        chosen = {name: getattr(self, name) for name in names if name not in pinned}
        return {name: value for name, value in chosen.items() if value is not None}


ADAPTED = ("lora_r", "lora_alpha", "lora_target_modules", "learning_rate")


def adapter_for(base: Knobs, job: Job, facts: ModelFacts, profile: DataProfile | None) -> Adapter:
    """Chooses an adapter for this job; ``base`` has the knobs that the user gave.

    Example: for Qwen2.5-0.5B, an adapter on all linear layers has 0.55 million parameters per unit of rank, so with 19
    million tokens rank 64 is the first with as many parameters as tokens.
    """
    rank, why_rank = _rank(job, facts, profile)
    why_targets = "all attention layers: PEFT cannot adapt fused experts as layers"
    if facts.adapted == "all-linear":
        why_targets = "an adapter on attention alone learns less at any rank (LoRA Without Regret)"
    return Adapter(
        lora_r=base.lora_r if "lora_r" in job.arguments else rank,
        lora_target_modules=None if facts.adapted is None else (facts.adapted,),
        learning_rate=adapter_learning_rate(base, job) if base.is_adam else None,
        why={
            "lora_r": why_rank,
            "lora_target_modules": why_targets,
            "learning_rate": f"adapters learn best at about {LEARNING_RATE_FACTOR} times full fine-tuning's rate, "
            "at any rank with this alpha (LoRA Without Regret)",
        },
    )


def adapter_learning_rate(base: Knobs, job: Job) -> float:
    """Returns the learning rate of an adapter under Adam, from TRL's default: 2e-4 for SFT's 2e-5."""
    default = base.learning_rate if "learning_rate" not in job.arguments else None
    full = default or METHODS[job.method].defaults["learning_rate"]
    return float(f"{LEARNING_RATE_FACTOR * full:.6g}")


def _rank(job: Job, facts: ModelFacts, profile: DataProfile | None) -> tuple[int, str]:
    """Finds the smallest rank with as many parameters as the data have tokens, preferences, labels or rewards. Each of
    these has about one bit of information, and a parameter holds about two ("LoRA Without Regret")."""
    learns_tokens, width = method_of(job.method).learns_tokens, facts.adapter_width
    bits = None if profile is None else profile.kept_tokens(None) if learns_tokens else profile.rows
    noun = "tokens" if learns_tokens else METHODS[job.method].row_noun
    if bits is None or width is None:
        return RANKS[0], f"TRL's default rank: the number of {noun} to learn from is unknown"
    rank = next((each for each in RANKS if each * width >= bits), RANKS[-1])
    if rank * width < bits:
        return rank, (
            f"the largest rank that is known to help: {_millions(bits)} {noun} are more than its "
            f"{_millions(rank * width)} parameters can hold, and full fine-tuning would learn more"
        )
    first = "" if rank == RANKS[0] else "the smallest "
    parameters = _millions(rank * width)
    return rank, f"{first}rank with as many parameters ({parameters}) as there are {noun} ({_millions(bits)})"


def _millions(number: int) -> str:
    """Formats a count: ``8.8 million``, ``12,000``."""
    return f"{number / 1e6:.3g} million" if number >= 1e6 else f"{number:,}"
