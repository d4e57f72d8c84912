"""Determines which trainers' losses are the weighted sum of their parts' losses, and with which weights."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autotrain_mem.methods.interface import Basis, method_of_trainer
from autotrain_mem.training.guard.batch_split import Layout
from autotrain_mem.training.guard.context import keep_rng_state
from autotrain_mem.types.methods_table import MethodFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Describes how a trainer's loss is computed from the losses of a micro-batch's parts."""

    layout: Layout
    train: Basis
    evaluate: Basis
    why_not: str | None
    """Why the sum is not exact; None if it is."""

    def as_tried(self, own: "OwnLoss | None") -> "Rule":
        """Returns the rule with the basis that a test found. ``own``: the test's result; None for TRL's own loss."""
        if own is None or own.heeds_count:
            return self
        if own.basis is None:
            return replace(self, why_not=self.why_not or "it is unknown how this model averages its own loss")
        return replace(self, train=own.basis, evaluate=own.basis)


def rule_of(trainer: Any, *, counted: bool) -> Rule:
    """Returns how to split micro-batches. ``counted``: whether transformers divides each loss by the step's tokens."""
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
    """Returns whether a trainer that can be split uses the loss that its model's forward returns."""
    method = method_of_trainer(trainer)
    return method is not None and why_not_exact(trainer) is None and method.is_models_loss(trainer)


def why_division_matters(trainer: Any, *, counted: bool) -> str | None:
    """Returns why the division into micro-batches changes a step's gradient; None if it does not, or if unknown."""
    if (method := method_of_trainer(trainer)) is None or _own_loss(trainer, method.facts) is not None:
        return None
    is_of_tokens = method.loss_basis(trainer, is_counted=counted) in (Basis.TOKENS, Basis.CHOSEN_TOKENS)
    over_tokens = "the loss is a mean over the tokens of a micro-batch, and a step takes the mean of these means"
    return why_not_exact(trainer) or (over_tokens if is_of_tokens else None)


def why_not_exact(trainer: Any) -> str | None:
    """Returns why splitting this trainer's micro-batches would change the gradient; None if it would not."""
    if (method := method_of_trainer(trainer)) is None:
        return f"it is unknown how {type(trainer).__name__} combines rows into a loss"
    if (own := _own_loss(trainer, method.facts)) is not None:
        return f"{own} is not TRL's, and it is unknown how it combines rows into a loss"
    config: Any = getattr(trainer.model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    # A mixture-of-experts model whose config outputs router logits adds the router's auxiliary loss itself.
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
    if callable(loss) and getattr(loss, "__module__", "") != home:  # GRPO's is a string that turns off loss scaling
        return "compute_loss_func"
    return None


COLUMNS = 8
"""The most tokens of a test row: enough to distinguish the means, and too few to need noticeable memory."""
FEW = 2
"""The number of labels in the first test row. The second row has one for every column except the first."""
ITEMS = 16
"""The ``num_items_in_batch`` of the test; any number works."""
TOLERANCE = 1e-3
"""The relative tolerance for fp32 losses of the same logits; for a 16-bit loss it is twice the dtype's epsilon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLoss:
    """Describes how a model's forward reduces many labels to one loss."""

    heeds_count: bool
    """True if the forward divides by ``num_items_in_batch`` when that is given."""
    basis: Basis | None
    """The units that the loss is a mean over if ``num_items_in_batch`` is missing or ignored; None if unknown."""


UNKNOWN = OwnLoss(heeds_count=False, basis=None)


def try_loss(compute_loss: Callable[..., Any], model: Any, inputs: Mapping[str, Any]) -> OwnLoss:
    """Tests a model's loss by two to six forward passes of two short rows: many forwards silently ignore
    ``num_items_in_batch`` (huggingface/transformers#37766). Leaves gradients and random states unchanged."""
    batch = _short_rows(inputs)
    ids = batch["input_ids"]
    few, many = _labelled(ids, 0, slice(1, 1 + FEW)), _labelled(ids, 1, slice(1, None))
    tolerance = TOLERANCE

    def loss(labels: Any, items: int | None = None) -> float:
        nonlocal tolerance
        counted = None if items is None else torch.tensor(items, device=ids.device)
        value = compute_loss(model, {**batch, "labels": labels}, num_items_in_batch=counted)
        tolerance = max(TOLERANCE, 2 * torch.finfo(value.dtype).eps)
        return float(value)

    def near(one: float, other: float) -> bool:
        return math.isclose(one, other, rel_tol=tolerance)

    modes = [(module, module.training) for module in model.modules()]
    restore_rng = keep_rng_state()
    model.eval()
    try:
        with torch.no_grad():
            once, twice = loss(many, ITEMS), loss(many, 2 * ITEMS)
            if near(once, 2 * twice):
                return OwnLoss(heeds_count=True, basis=Basis.TOKENS)
            if not near(once, twice):
                return UNKNOWN
            of_few, of_many, of_both = loss(few), loss(many), loss(torch.where(few == -100, many, few))
            number = ids.shape[1] - 1
            over_tokens, over_rows = (FEW * of_few + number * of_many) / (FEW + number), (of_few + of_many) / 2
            if near(of_both, over_tokens) == near(of_both, over_rows):
                return UNKNOWN
            if near(of_both, over_rows):
                return OwnLoss(heeds_count=False, basis=Basis.UNITS)
            of_first = loss(_labelled(ids, 1, slice(0, 1)))  # NaN or 0 if labels are shifted
            is_shifted = not math.isfinite(of_first) or of_first == 0
            return OwnLoss(heeds_count=False, basis=Basis.TOKENS) if is_shifted else UNKNOWN
    finally:
        for module, mode in modes:
            module.training = mode
        restore_rng()


def _short_rows(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the per-token inputs for the first tokens of the first row, as two equal rows."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    attended = torch.ones_like(ids[0]) if mask is None else mask[0]
    if len(columns := attended.nonzero()[:COLUMNS, 0]) <= FEW + 1:
        raise ValueError("the row has too few tokens for the test")
    per_token = {
        name: value
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.shape == ids.shape and name not in _OF_THE_WHOLE_ROW
    }
    return {name: value[:1, columns].repeat(2, 1) for name, value in per_token.items()}


_OF_THE_WHOLE_ROW = ("labels", "shift_labels", "position_ids", "completion_mask")


def _labelled(ids: Any, row: int, columns: slice) -> Any:
    labels = torch.full_like(ids, -100)
    labels[row, columns] = ids[row, columns]
    return labels
