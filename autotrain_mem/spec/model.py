"""What planning needs to know of a model beside what is rehearsed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Read from the model's config."""

    context_length: int | None
    """Tokens that the model can attend to; None when its config does not say."""
    is_quantized: bool
    """The checkpoint holds quantized weights, which cannot be quantized again."""
