"""Measures how long the rows are that a model trains on, at its embedding: the one place where all of them pass."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """The batches that a model was trained on in some time."""

    rows: int
    tokens: int
    """Of a row, with padding: the batch with the longest rows, and how many rows that had."""
    all_tokens: int
    """Rows x tokens of every batch."""


class Rows:
    """Looks at the shape of what comes into a model's embedding while gradients are asked for.

    The embedding, since a loss may call the model's body and leave out the model itself (Liger's do). Evaluation,
    generation and reference models run without gradients. Costs some microseconds per micro-batch.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._rows = self._tokens = self._all_tokens = 0

    def follow(self, model: torch.nn.Module) -> None:
        """Look at this model from now on; one that was followed before is left first."""
        self.leave()
        module = embedding_of(model)
        if module is not None:
            self._hooks.append(module.register_forward_pre_hook(self._see, with_kwargs=True))

    def leave(self) -> None:
        """The model is as it was before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take(self) -> Batches | None:
        """Give what came since the last call; None for nothing."""
        if not self._all_tokens:
            return None
        batches = Batches(rows=self._rows, tokens=self._tokens, all_tokens=self._all_tokens)
        self._rows = self._tokens = self._all_tokens = 0
        return batches

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # a count that changes would have the model compiled anew at every step
            return
        with contextlib.suppress(Exception):  # a watch ends no training
            if not torch.is_grad_enabled():
                return
            ids = args[0] if args else kwargs.get("input")
            if isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.dtype.is_floating_point:
                rows, tokens = ids.shape
                self._all_tokens += rows * tokens
                self._rows, self._tokens = max((self._tokens, self._rows), (tokens, rows))[::-1]


def embedding_of(model: Any) -> torch.nn.Module | None:
    """Find the embedding of the model that is trained; None for one that does not read tokens.

    PPO's stands beside its value model (``trl/experimental/ppo/ppo_trainer.py: PolicyAndValueWrapper``).
    """
    for candidate in (model, getattr(model, "policy", None)):
        with contextlib.suppress(Exception):  # NotImplementedError, and what models of other kinds raise
            embedding: Any = candidate.get_input_embeddings()  # type: ignore[union-attr]  # None raises too
            if isinstance(embedding, torch.nn.Module):
                return embedding
    return None
