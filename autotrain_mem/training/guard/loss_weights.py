"""Tells which trainers' losses are the weighted sum of their parts' losses, and with which weights.

A loss that its method's module does not know to be such a sum is none: its micro-batch is not split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autotrain_mem.methods.interface import Basis, method_of_trainer
from autotrain_mem.training.guard.batch_split import Layout
from autotrain_mem.training.guard.loss_trial import OwnLoss
from autotrain_mem.types.methods_table import MethodFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Says how a trainer's loss is put together from those of the parts of a micro-batch."""

    layout: Layout
    train: Basis
    evaluate: Basis
    why_not: str | None
    """None where the sum is exact."""

    def as_tried(self, own: OwnLoss | None) -> Rule:
        """Go by what was found of a model's own loss; None where the loss is not the model's."""
        if own is None or own.heeds_count:
            return self
        if own.basis is None:
            return replace(self, why_not=self.why_not or "over what this model's own loss is a mean is not known")
        return replace(self, train=own.basis, evaluate=own.basis)


def rule_of(trainer: Any, *, counted: bool) -> Rule:
    """Tell how to split.

    Args:
        counted: transformers counted the tokens of all micro-batches, and each one's loss is divided by that.
    """
    method, why_not = method_of_trainer(trainer), why_not_exact(trainer)
    if method is None:
        return Rule(layout=Layout.ROWS, train=Basis.UNITS, evaluate=Basis.UNITS, why_not=why_not)
    return Rule(
        layout=Layout.PAIRS if method.joins_sides else Layout.ROWS,
        train=method.loss_basis(trainer, is_counted=counted),
        evaluate=method.loss_basis(trainer, is_counted=False),
        why_not=why_not,
    )


def is_models_loss(trainer: Any) -> bool:
    """Whether a trainer that can be split takes the loss that its model's forward returns."""
    method = method_of_trainer(trainer)
    return method is not None and why_not_exact(trainer) is None and method.is_models_loss(trainer)


def why_division_matters(trainer: Any, *, counted: bool) -> str | None:
    """Say why other micro-batches of the same rows make another gradient of a step; None where they do not.

    A loss of the user's own is the user's to know.
    """
    method = method_of_trainer(trainer)
    if method is None or _own_loss(trainer, method.facts) is not None:
        return None
    is_of_tokens = method.loss_basis(trainer, is_counted=counted) in (Basis.TOKENS, Basis.CHOSEN_TOKENS)
    over_tokens = "the loss is a mean over the tokens of a micro-batch, and a step takes the mean of these means"
    return why_not_exact(trainer) or (over_tokens if is_of_tokens else None)


def why_not_exact(trainer: Any) -> str | None:
    """Say why this trainer's micro-batches cannot be split without another gradient; None where they can."""
    method = method_of_trainer(trainer)
    if method is None:
        return f"how {type(trainer).__name__} makes one loss of many rows is not known"
    own = _own_loss(trainer, method.facts)
    if own is not None:
        return f"{own} is not TRL's, and how it makes one loss of many rows is not known"
    config: Any = getattr(trainer.model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    # A mixture of experts whose configuration asks for the router's logits adds their loss by itself.
    if getattr(trainer, "aux_loss_enabled", False) or getattr(config, "output_router_logits", False):
        return "the router's auxiliary loss is one number of the whole micro-batch, not a mean over its rows"
    return method.why_not_split(trainer)


def _own_loss(trainer: Any, method: MethodFacts) -> str | None:
    home = method.module
    for name in ("compute_loss", "_compute_loss"):
        function = getattr(type(trainer), name, None)
        if function is not None and function.__module__ not in (home, f"autotrain_mem.trainers.{method.name}_trainer"):
            return f"{type(trainer).__name__}.{name}"
    loss = getattr(trainer, "compute_loss_func", None)
    if callable(loss) and getattr(loss, "__module__", "") != home:  # GRPO's is a word, which switches off a division
        return "compute_loss_func"
    return None


def logged_basis(trainer: Any, name: str) -> Basis:
    """Tell what one number that a trainer logs is over; a mean over rows where the trainer is not known."""
    method = method_of_trainer(trainer)
    return Basis.UNITS if method is None else method.logged_basis(trainer, name)
