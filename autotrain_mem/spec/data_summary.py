"""What a plan tells of the data: figures, where a profile holds every length."""

from __future__ import annotations

from dataclasses import dataclass

from autotrain_mem.spec.data import DataProfile

PERCENTILES = (0.5, 0.95, 0.99, 0.999)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """Token lengths of the rows that are trained on, and what a plan's ``max_length`` and micro-batch make of them.

    >>> from autotrain_mem import AutoFit, plan
    >>> ours = AutoFit(gpu="rtx3060")
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", dataset="data.jsonl", autofit=ours, max_length=512)
    >>> chosen.data.rows, chosen.data.longest > 512, chosen.data.truncated_rows_fraction
    (60, True, 0.016666666666666666)
    """

    rows: int
    tokens: int
    longest: int
    percentiles: tuple[int, ...]
    """Tokens of a row at each of :data:`PERCENTILES`."""
    padding_fraction: float
    """Share of what a micro-batch computes that is padding, on average; 0 where rows are packed."""
    truncated_rows_fraction: float
    truncated_tokens_fraction: float


def summary(profile: DataProfile, *, max_length: int | None, rows: int, pads: bool) -> DataSummary:
    """The figures of a profile under a plan.

    Args:
        rows: Of a micro-batch.
        pads: Whether its rows are padded to the longest of them.
    """
    return DataSummary(
        rows=profile.rows,
        tokens=profile.tokens,
        longest=profile.longest,
        percentiles=tuple(profile.percentile(share) for share in PERCENTILES),
        padding_fraction=profile.padding_fraction(rows, max_length) if pads else 0.0,
        truncated_rows_fraction=profile.truncated_rows_fraction(max_length),
        truncated_tokens_fraction=profile.truncated_tokens_fraction(max_length),
    )
