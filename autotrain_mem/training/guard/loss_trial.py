"""Finds out by trying over what a model's own loss is a mean, and whether it heeds ``num_items_in_batch``.

transformers takes every forward with ``**kwargs`` for one that divides by that count (``trainer.py: Trainer.__init__,
model_accepts_loss_kwargs``), and divides by nothing itself then. Some accept the count and take a mean all the same
(``modeling_bart.py: BartForCausalLM.forward``, XLNet, code from the hub): the parts of a micro-batch, and the
micro-batches of a step, would add up to a multiple of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autotrain_mem.methods.interface import Basis
from autotrain_mem.training.guard.context import keep_rng_state

COLUMNS = 8
"""Of the tokens tried: enough to tell means apart, few enough to take no memory that matters."""
FEW = 2
"""Labels of the first row that is tried; the second has all but that of its first column."""
ITEMS = 16
"""Any count will do."""
TOLERANCE = 1e-3
"""Of fp32 losses of the same logits; a loss of 16 bits gets two of its last places."""

ComputeLoss = Callable[..., Any]
"""``Trainer.compute_loss``, of the trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLoss:
    """Says how a model's forward makes one loss of many labels."""

    heeds_count: bool
    """It divides by ``num_items_in_batch`` where it is given."""
    basis: Basis | None
    """What it is a mean over without that count; None where that is not known."""


UNKNOWN = OwnLoss(heeds_count=False, basis=None)


def try_loss(compute_loss: ComputeLoss, model: Any, inputs: Mapping[str, Any]) -> OwnLoss:
    """Compute the losses of two short rows with several labels: no gradient, no dropout, no random number is other.

    It takes two forward passes where the model heeds the count, else six.

    Args:
        inputs: A micro-batch: its first row's first tokens are taken.
    """
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

    with _unnoticed(model):
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
        of_first = loss(_labelled(ids, 1, slice(0, 1)))  # is no number, or nothing, where labels are shifted
        is_shifted = not math.isfinite(of_first) or of_first == 0
        return OwnLoss(heeds_count=False, basis=Basis.TOKENS if is_shifted else Basis.LABELS)


def _short_rows(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Take the first tokens of the first row, twice, with what else there is for each token.

    Raises:
        ValueError: there are too few.
    """
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    attended = torch.ones_like(ids[0]) if mask is None else mask[0]
    columns = attended.nonzero()[:COLUMNS, 0]
    if len(columns) <= FEW + 1:
        raise ValueError("a row of this few tokens tells nothing")
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


@contextmanager
def _unnoticed(model: Any) -> Iterator[None]:
    """Inside, the model is one that is evaluated; afterwards each module trains or not as before."""
    modes = [(module, module.training) for module in model.modules()]
    restore_rng = keep_rng_state()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        restore_rng()
