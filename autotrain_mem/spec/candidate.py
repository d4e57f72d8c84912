"""A candidate is what a search and a plan keep of one configuration: what it needs, and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autotrain_mem.spec.codec import Form
from autotrain_mem.spec.estimate import Estimate
from autotrain_mem.spec.knobs import Knobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A configuration on one device: a search rehearsed it, or a level of harm has it to offer.

    >>> from autotrain_mem import AutoFit, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> any(attempt.fits for attempt in chosen.attempts)
    True
    >>> [other.level for other in chosen.alternatives if other.fits]
    ['rounding']
    """

    json_form: ClassVar = Form(derived={"fits": "fits"})

    level: str = ""
    """The level of harm whose best plan it is, or the least that the level would need; empty for a rehearsal of the
    search."""
    knobs: Knobs
    required_bytes: int
    budget_bytes: int
    tokens_per_second: float | None = None
    """None on a device whose speed is not known."""
    rehearsed_layers: int | None = None
    """How many layers the rehearsed copies had at most; None where the whole model was rehearsed."""
    ratio: float | None = None
    """Its tokens per second over the chosen plan's; None where it does not fit, and for a rehearsal of the search."""
    would_fit: tuple[str, ...] = ()
    """Where it would: the next larger cards, or more of these, each in a few words; empty where it fits here."""

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.budget_bytes


def candidate(
    estimate: Estimate, *, level: str = "", beside: Estimate | None = None, would_fit: tuple[str, ...] = ()
) -> Candidate:
    """Keeps the figures of an estimate: of a rehearsal, or of what a level offers beside the plan that was chosen."""
    ratio = None
    if beside is not None and beside.tokens_per_second and estimate.fits:
        ratio = estimate.tokens_per_second / beside.tokens_per_second
    return Candidate(
        level=level,
        knobs=estimate.knobs,
        required_bytes=estimate.required_bytes,
        budget_bytes=estimate.budget_bytes,
        tokens_per_second=estimate.time.known_tokens_per_second,
        rehearsed_layers=estimate.memory.rehearsed_layers,
        ratio=ratio,
        would_fit=would_fit,
    )
