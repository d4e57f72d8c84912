"""Chooses what an adapter is where a plan turns LoRA on and the user names no value: targets, rank, learning rate.

Sources: John Schulman and Thinking Machines Lab, "LoRA Without Regret" (doi 10.64434/tml.20250929), TRL's guide to it
(``docs/source/lora_without_regret.md``) and Unsloth's "LoRA hyperparameters guide". An adapter on every linear layer
learns as full fine-tuning does as long as it has room for what the data say; on attention alone it does not, at any
rank. ``lora_alpha`` stays what TRL makes it, 32: PEFT scales an adapter by alpha / rank, with which the best learning
rate is nearly the same at every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotrain_mem.methods.interface import method_of
from autotrain_mem.types import DataProfile, Job, Knobs
from autotrain_mem.types.methods_table import METHODS
from autotrain_mem.types.model import ModelFacts

LEARNING_RATE_FACTOR = 10
"""The best learning rate of an adapter over that of full fine-tuning, whatever model and rank ("LoRA Without Regret");
TRL's documentation gives 1e-5 in place of 1e-6 (DPO, GRPO) and 1e-3 in place of 1e-4 (Reward)."""

NEAR = 4
"""Factor by which a learning rate may differ without advice: sweeps in steps of 3 to 4 find no difference."""

RANKS = (16, 32, 64, 128, 256)
"""TRL's default (``trl/trainer/model_config.py: lora_r``), which is Unsloth's too, up to what "LoRA Without Regret"
found to follow full fine-tuning on large data."""

SMALLEST_RANK = 8
"""PEFT's default (``peft/tuners/lora/config.py: r``): what memory may take a rank down to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Holds the settings that come with LoRA where the plan turns it on, under TRL's names, each with its reason."""

    lora_r: int
    lora_target_modules: tuple[str, ...] | None
    learning_rate: float | None
    why: Mapping[str, str] = field(hash=False)

    def settings(self, pinned: Collection[str]) -> dict[str, Any]:
        """Returns the knobs and their values, without those that the user gave and those that stay TRL's."""
        names = ("lora_r", "lora_target_modules", "learning_rate")
        chosen = {name: getattr(self, name) for name in names if name not in pinned}
        return {name: value for name, value in chosen.items() if value is not None}


ADAPTED = ("lora_r", "lora_alpha", "lora_target_modules", "learning_rate")
"""Knobs that say what an adapter is and how it learns."""


def adapter_for(base: Knobs, job: Job, facts: ModelFacts, profile: DataProfile | None) -> Adapter:
    """Chooses an adapter for this job.

    Example: Qwen2.5-0.5B on 19 million tokens: an adapter on all linear layers has 0.55 million parameters for each of
    its ranks, so rank 64 is the first with as many parameters as there are tokens.

    Args:
        base: The knobs asked for; those that the user gave stay, since they are pinned.
        profile: Of the data; None where nobody counted.
    """
    rank, why_rank = _rank(job, facts, profile)
    why_targets = "all of attention: PEFT adapts no fused experts as layers"
    if facts.adapted == "all-linear":
        why_targets = "an adapter on attention alone learns less at any rank (LoRA Without Regret)"
    return Adapter(
        lora_r=base.lora_r if "lora_r" in job.arguments else rank,
        lora_target_modules=None if facts.adapted is None else (facts.adapted,),
        learning_rate=adapter_learning_rate(base, job) if base.is_adam else None,
        why={
            "lora_r": why_rank,
            "lora_target_modules": why_targets,
            "learning_rate": f"adapters learn best at about {LEARNING_RATE_FACTOR} times full fine-tuning's, at any "
            "rank with this alpha (LoRA Without Regret)",
        },
    )


def adapter_learning_rate(base: Knobs, job: Job) -> float:
    """Returns the learning rate of an adapter, by TRL's default: 2e-4 for SFT's 2e-5. For Adam-like optimizers."""
    default = base.learning_rate if "learning_rate" not in job.arguments else None
    full = default or METHODS[job.method].defaults["learning_rate"]
    return float(f"{LEARNING_RATE_FACTOR * full:.6g}")


def _rank(job: Job, facts: ModelFacts, profile: DataProfile | None) -> tuple[int, str]:
    """Finds the smallest rank whose adapter has about as many parameters as the data have bits of information.

    Text has about a bit a token, and a parameter holds about two, so that Thinking Machines asks for as many parameters
    as tokens; a preference, a label or an episode's reward tells about one bit.
    """
    learns_tokens, width = method_of(job.method).learns_tokens, facts.adapter_width
    bits = None if profile is None else profile.kept_tokens(None) if learns_tokens else profile.rows
    noun = "tokens" if learns_tokens else METHODS[job.method].row_noun
    if bits is None or width is None:
        return RANKS[0], f"the rank that TRL takes: how many {noun} there are to learn from is not known"
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
    """``8.8 million``, ``12,000``."""
    return f"{number / 1e6:.3g} million" if number >= 1e6 else f"{number:,}"
