"""Chooses an adapter's targets, rank and learning rate if a plan turns LoRA on.

Sources: John Schulman and Thinking Machines Lab, "LoRA Without Regret" (doi 10.64434/tml.20250929), TRL's guide to it
(``docs/source/lora_without_regret.md``) and Unsloth's "LoRA hyperparameters guide". An adapter on every linear layer
learns like full fine-tuning if its rank suffices for the data. ``lora_alpha`` stays TRL's 32: PEFT scales by
alpha / rank, with which the best learning rate is nearly the same at every rank.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotrain_mem.methods.interface import method_of, steps_of
from autotrain_mem.settings.knobs import DROPOUT, EXPERTS
from autotrain_mem.types import METHODS, DataProfile, Job, Knobs, ModelFacts

LEARNING_RATE_FACTOR = 10
"""The best learning rate of an adapter divided by that of full fine-tuning ("LoRA Without Regret"; TRL's
``docs/source/peft_integration.md`` for DPO and GRPO). A method with figures of its own has an ``adapter_rate``."""

SWEPT_ROWS, SWEPT_STEPS, SWEPT_WIDTHS = 128, 780, (2048, 8192)
"""The rows of an optimizer step, the steps and the hidden sizes of the best public sweep: tinker-cookbook,
``recipes/chat_sl/results/sft_sweep.md``, SFT on Tulu 3 of 35 models of 1B to 1T. Losses between its rates are read here
from a parabola over the logarithm of the rate, each at the model's largest rank."""
FAMILIES = {"llama": (5e-4, 0.781), "qwen": (5e-4, 0.0775)}
"""Model family -> the best rate for :data:`SWEPT_ROWS` rows at width 2,000, and the power of 2,000 / width by which it
falls (tinker-cookbook, ``hyperparam_utils.py: get_lr``). In the sweep its test loss is 0.5 % above the best in the mean
of 24 models, and at most 1.8 % (Llama-3.2-3B, which learns best at 1e-3)."""
OTHER_FAMILY = (3e-4, 0.0)
"""The same for families that ``get_lr`` refuses as not calibrated: the rate with the least loss over all models of the
sweep, 0.4 % above the best in the mean. For its 9 models of other families, of 30B to 1T, it is at most 1 %."""
FEWEST_ROWS = 32
"""The best rate goes with the root of the rows (tinker-cookbook, ``skills/research/references/hyperparams.md``) from
these to :data:`SWEPT_ROWS`, the range in which the sources measured; beyond it stays. In pretraining the best rate of 1
row is a third of that of 1,024 (Marek et al., arXiv 2507.07101), and recipes of 8 to 16 rows have 1e-4 to 2e-4 (QLoRA,
``scripts/finetune_guanaco_65b.sh``, ``_7b.sh``; ``trl/scripts/sft.py``; Axolotl, ``examples/llama-3/lora-8b.yml``)."""
SHORT_RUN, SHORT_RUN_FACTOR = 100, 1.5
"""Below so many optimizer steps the best factor is about 15 in place of 10 ("LoRA Without Regret", which calls its
evidence anecdotal)."""

NEAR = 4
"""A learning rate within this factor of the best one gets no advice: in the sweep a third of it costs 1.1 % of the loss
in the mean, and three times as much 2.0 %."""

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
    lora_target_parameters: tuple[str, ...] | None = None
    lora_dropout: float | None = None
    layers_rank: int = RANKS[0]
    """The rank of an adapter on layers alone, which is used if adapted experts do not fit."""
    why: Mapping[str, str] = field(hash=False)

    def settings(self, pinned: Collection[str]) -> dict[str, Any]:
        """Returns the knobs to set, without those that the user gave."""
        names = ("lora_r", "lora_target_modules", *EXPERTS, "learning_rate")
        return {name: getattr(self, name) for name in names if name not in pinned and getattr(self, name) is not None}

    def on_layers(self, knobs: Knobs) -> Knobs | None:
        """Returns a point whose adapter leaves experts as they are; None if this adapter has none."""
        if not self.lora_target_parameters or not knobs.lora_target_parameters:
            return None
        return replace(knobs, lora_r=self.layers_rank, lora_target_parameters=None, lora_dropout=DROPOUT)


ONLY_ATTENTION = ": the experts are not adapted, and an adapter on attention alone learns less (LoRA Without Regret)"
ADAPTED = ("lora_r", "lora_alpha", "lora_target_modules", *EXPERTS, "learning_rate")
PINNING = ("lora_r", "lora_target_modules", "lora_dropout", "use_dora", "lora_target_parameters", "peft_config")
"""Arguments of users who choose themselves what is adapted, so that a plan adapts no experts by itself."""


def adapter_for(base: Knobs, job: Job, facts: ModelFacts, profile: DataProfile | None) -> Adapter:
    """Chooses an adapter for this job; ``base`` has the knobs that the user gave.

    Example: for Qwen2.5-0.5B, an adapter on all linear layers has 0.55 million parameters per unit of rank, so with 19
    million tokens rank 64 is the first with as many parameters as tokens.
    """
    rank, why_rank = _rank(job, facts, profile)
    rate, why_rate = adapter_learning_rate(base, job, facts, profile)
    layers_rank = base.lora_r if "lora_r" in job.arguments else rank
    why_targets = "an adapter on attention alone learns less at any rank (LoRA Without Regret)"
    experts = facts.experts if job.arguments.keys().isdisjoint(PINNING) else ()
    if facts.adapted != "all-linear":
        why_targets = f"all attention layers{', beside the experts' if experts else ONLY_ATTENTION}"
    why_layers = why_rank
    if experts:
        rank = max(SMALLEST_RANK, layers_rank // facts.active_experts)
        why_rank = (
            f"{layers_rank} divided by the {facts.active_experts} experts of a token (LoRA Without Regret), but at "
            f"least {SMALLEST_RANK}, since TRL has one rank for all: {why_rank}"
        )
    return Adapter(
        lora_r=rank if experts else layers_rank,
        layers_rank=layers_rank,
        lora_target_parameters=experts or None,
        lora_dropout=0.0 if experts else None,
        lora_target_modules=None if facts.adapted is None else (facts.adapted,),
        learning_rate=rate if base.is_adam else None,
        why={
            "lora_r": why_rank,
            "layers_rank": why_layers,
            "lora_target_modules": why_targets,
            "lora_target_parameters": "most weights are experts, and an adapter on attention alone learns less at any "
            "rank (LoRA Without Regret)",
            "lora_dropout": "PEFT adapts parameters without dropout (peft/tuners/lora/layer.py: ParamWrapper)",
            "learning_rate": why_rate,
        },
    )


def adapter_learning_rate(knobs: Knobs, job: Job, facts: ModelFacts, profile: DataProfile | None) -> tuple[float, str]:
    """Returns the learning rate of an adapter under Adam, and what it is derived from.

    Example: for SFT of Qwen2.5-7B with TRL's 8 rows, 5e-4 * (2000 / 3584) ** 0.0775 * (32 / 128) ** 0.5 = 2.4e-4.
    """
    method = method_of(job.method)
    if not method.learns_tokens:
        rate = LEARNING_RATE_FACTOR * METHODS[job.method].defaults["learning_rate"]
        why = f"{LEARNING_RATE_FACTOR} times full fine-tuning's rate, as for every adapter (LoRA Without Regret)"
        return method.adapter_rate or (float(f"{rate:.6g}"), why)
    family = next((name for name in FAMILIES if facts.model_type.startswith(name)), None)
    best, power = OTHER_FAMILY if family is None else FAMILIES[family]
    best *= (2000 / sorted((facts.hidden_size or 0, *SWEPT_WIDTHS))[1]) ** power
    rows, steps = knobs.effective_batch_size, steps_of(job, knobs, profile)
    counted = sorted((rows, FEWEST_ROWS, SWEPT_ROWS))[1]
    is_short = steps is not None and steps < SHORT_RUN
    why = f"{'' if family else 'not calibrated for this family; '}for {rows} rows a step; {family or 'other'} models "
    why += f"learn best at {best:.2g} with {SWEPT_ROWS} rows a step and {SWEPT_STEPS} steps (tinker-cookbook)"
    if counted < SWEPT_ROWS:
        why += f", and the rate scales with the square root of the rows down to {FEWEST_ROWS}"
    if is_short:
        why += f"; {SHORT_RUN_FACTOR} times that in fewer than {SHORT_RUN} steps (LoRA Without Regret)"
    elif steps is None:
        why += f"; it is for at least {SHORT_RUN} steps"
    rate = best * math.sqrt(counted / SWEPT_ROWS) * (SHORT_RUN_FACTOR if is_short else 1)
    return float(f"{rate:.2g}"), why


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
