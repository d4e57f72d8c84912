"""Which trainers' losses are the weighted sum of their parts' losses, and with which weights.

Read from TRL 1.12 and 1.16: ``trl/trainer/{sft,reward,dpo,grpo,rloo}_trainer.py: compute_loss, _compute_loss``. A loss
that is not listed here is not known to be such a sum: its micro-batch is not split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotrain_mem.training.guard.batch_split import Basis, Layout

FAMILIES = {
    "SFTTrainer": "sft",
    "RewardTrainer": "reward",
    "DPOTrainer": "dpo",
    "GRPOTrainer": "grpo",
    "RLOOTrainer": "rloo",
}

PAIRWISE = frozenset(
    [
        "sigmoid",
        "hinge",
        "ipo",
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
        "sigmoid_norm",
    ]
)
"""DPO's losses that are one number per pair, of which the mean is taken."""

GRPO_BASES = {
    "grpo": Basis.UNITS,
    "sapo": Basis.UNITS,
    "dr_grpo": Basis.UNITS,
    "luspo": Basis.UNITS,
    "bnpo": Basis.TOKENS,
    "dapo": Basis.WHOLE,
    "cispo": Basis.WHOLE,
    "vespo": Basis.WHOLE,
}

PAIRS = frozenset({"reward", "dpo"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How a trainer's loss is put together from those of the parts of a micro-batch."""

    family: str
    layout: Layout
    train: Basis
    evaluate: Basis
    why_not: str | None
    """None where the sum is exact."""


def family_of(trainer: Any) -> str | None:
    """``sft``, ``reward``, ``dpo``, ``grpo`` or ``rloo``; None for others."""
    return next((FAMILIES[kind.__name__] for kind in type(trainer).__mro__ if kind.__name__ in FAMILIES), None)


def rule_of(trainer: Any, *, counted: bool) -> Rule:
    """How to split.

    Args:
        counted: transformers counted the tokens of all micro-batches, and each one's loss is divided by that.
    """
    family = family_of(trainer)
    layout = Layout.PAIRS if family in PAIRS else Layout.ROWS
    if family == "sft":
        train, evaluate = Basis.WHOLE if counted else Basis.TOKENS, Basis.TOKENS
    elif family == "grpo":
        train = evaluate = GRPO_BASES.get(trainer.loss_type, Basis.UNITS)
    elif family == "dpo" and list(trainer.loss_types) == ["sft"]:
        train = evaluate = Basis.CHOSEN_TOKENS
    else:
        train = evaluate = Basis.UNITS
    return Rule(family=family or "", layout=layout, train=train, evaluate=evaluate, why_not=why_not_exact(trainer))


def why_not_exact(trainer: Any) -> str | None:
    """Why this trainer's micro-batches cannot be split without another gradient; None where they can."""
    family = family_of(trainer)
    if family is None:
        return f"how {type(trainer).__name__} makes one loss of many rows is not known"
    own = _own_loss(trainer, family)
    if own is not None:
        return f"{own} is not TRL's, and how it makes one loss of many rows is not known"
    if getattr(trainer, "aux_loss_enabled", False) or _model_adds_router_loss(trainer):
        return "the router's auxiliary loss is one number of the whole micro-batch, not a mean over its rows"
    return {"dpo": _why_not_dpo, "grpo": _why_not_grpo}.get(family, _no_reason)(trainer)


def _no_reason(trainer: Any) -> None:
    return None


def _own_loss(trainer: Any, family: str) -> str | None:
    home = f"trl.trainer.{family}_trainer"
    for name in ("compute_loss", "_compute_loss"):
        method = getattr(type(trainer), name, None)
        if method is not None and method.__module__ != home:
            return f"{type(trainer).__name__}.{name}"
    loss = getattr(trainer, "compute_loss_func", None)
    if callable(loss) and getattr(loss, "__module__", "") != home:  # GRPO's is a word, which switches off a division
        return "compute_loss_func"
    return None


def _model_adds_router_loss(trainer: Any) -> bool:
    """A mixture of experts whose configuration asks for the router's logits adds their loss by itself."""
    config: Any = getattr(trainer.model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(config, "output_router_logits", False))


def _why_not_dpo(trainer: Any) -> str | None:
    kinds = list(trainer.loss_types)
    if kinds == ["sft"]:
        return None
    others = [kind for kind in kinds if kind not in PAIRWISE]
    if not others:
        return None
    if "sft" in others:
        return "loss_type sft is a mean over tokens and stands beside means over pairs"
    return f"loss_type {others[0]} compares each pair with the others of its micro-batch"


def _why_not_grpo(trainer: Any) -> str | None:
    if trainer.loss_type not in GRPO_BASES:
        return f"how loss_type {trainer.loss_type} makes one loss of many rows is not known"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile is drawn over all tokens of the micro-batch"
    if getattr(trainer, "use_adaptive_entropy", False):
        return "the adaptive entropy bonus is steered by whole micro-batches"
    if getattr(trainer, "_entropy_bonus_enabled", False) and trainer.loss_type != "bnpo":
        return f"the entropy bonus is a mean over tokens and loss_type {trainer.loss_type} is not"
    return None


# -- what is logged ------------------------------------------------------------------------------------------------

_SFT = {"entropy": Basis.TOKENS, "mean_token_accuracy": Basis.TOKENS}
_DPO = {
    "entropy": Basis.TOKENS,
    "mean_token_accuracy": Basis.CHOSEN_TOKENS,
    "logits/chosen": Basis.CHOSEN_TOKENS,
    "logits/rejected": Basis.REJECTED_TOKENS,
}
_CLIPPED = {"clip_ratio/low_min": Basis.LOWEST, "clip_ratio/high_max": Basis.HIGHEST, "step_time": Basis.SUM}
_PER_TOKEN = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
LOGGED = {
    "sft": _SFT,
    "dpo": _DPO,
    "reward": {"min_reward": Basis.LOWEST, "max_reward": Basis.HIGHEST},
    "grpo": {**_CLIPPED, "entropy": Basis.TOKENS},
    "rloo": {**_CLIPPED, "entropy": Basis.TOKENS},
}
"""What each number that a trainer logs is over; a mean over rows or pairs where it is not named."""


def logged_basis(trainer: Any, family: str, name: str) -> Basis:
    """What one number that a trainer logs is over."""
    per_token = family == "grpo" and trainer.importance_sampling_level == "token"
    if (per_token and name in _PER_TOKEN) or (family == "grpo" and name == "kl"):
        return Basis.TOKENS
    if name == "policy_loss" and family == "grpo":
        return GRPO_BASES.get(trainer.loss_type, Basis.UNITS)
    return LOGGED.get(family, {}).get(name, Basis.UNITS)
