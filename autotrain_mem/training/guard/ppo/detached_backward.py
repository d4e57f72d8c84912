"""Cuts a graph at a model's outputs, so that the model's part of a backward can be done again without the loss.

    inputs -> model -> outputs | cut | outputs -> loss

The loss's backward ends at the cut and leaves the outputs' gradients in a list; :func:`backward_from` goes on from
there. The same numbers as in one backward, whatever the loss, and no second copy of the outputs: on both sides of the
cut they share their storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _Cut(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped to mypy here
    """Detaches outputs from their model; their gradients are put into ``caught``.

    They are marked as changed in place, which makes them neither leaves nor views: TRL divides its logits in place.
    """

    @staticmethod
    def forward(ctx: Any, caught: list[torch.Tensor], anchor: torch.Tensor, *outputs: torch.Tensor) -> Any:
        ctx.caught = caught
        ctx.mark_dirty(*outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.caught[:] = gradients
        return (None,) * (2 + len(gradients))


class _GoOn(torch.autograd.Function):  # type: ignore[misc]
    """A root whose backward hands over the caught gradients and keeps none: each is freed once it is used."""

    @staticmethod
    def forward(ctx: Any, caught: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.caught = caught
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        gradients = tuple(ctx.caught)
        ctx.caught.clear()
        return None, *gradients


def cut(outputs: Sequence[torch.Tensor], caught: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values, for a loss; its backward fills ``caught`` with one gradient per output."""
    anchor = outputs[0].new_empty(0).requires_grad_()
    return list(_Cut.apply(caught, anchor, *(output.detach() for output in outputs)))


def backward_from(outputs: Sequence[torch.Tensor], caught: list[torch.Tensor]) -> None:
    """Goes on with the backward that was cut; empties ``caught``. Does nothing where no output has a graph."""
    if any(output.requires_grad for output in outputs):
        root = _GoOn.apply(caught, *outputs)
        torch.autograd.backward((root,), (torch.empty_like(root),))
