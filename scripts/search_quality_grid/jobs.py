"""The jobs: six models, each with a trainer, a length and an effective batch, on five cards each."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

from autotrain_mem.spec import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One job on one card. Its length is pinned, so that no row is ever cut and speeds compare."""

    model: str
    method: str
    max_length: int
    effective_batch_size: int
    card: str

    def __str__(self) -> str:
        model = self.model.rsplit("/", 1)[-1]
        return f"{model} {self.method} {self.effective_batch_size} x {self.max_length}, {self.card}"

    def job(self, models: pathlib.Path) -> Job:
        """As a command would make it of ``--max_length`` and ``--effective_batch_size``."""
        return Job(
            method=self.method,
            model=str(models / self.model),
            dataset=None,
            arguments={"max_length": self.max_length},
            effective_batch_size=self.effective_batch_size,
        )


MODELS = (
    ("Qwen/Qwen2.5-0.5B", "sft", 2048, 8),
    ("meta-llama/Llama-3.2-1B", "sft", 4096, 16),
    ("Qwen/Qwen2.5-1.5B", "dpo", 1024, 8),
    ("meta-llama/Llama-3.2-3B", "sft", 2048, 16),
    ("Qwen/Qwen2.5-0.5B", "reward", 1024, 32),
    ("meta-llama/Llama-3.1-8B", "sft", 2048, 8),
)
"""Small heads and large ones, tied and not; two sequences a row; batches with 4 to 6 ways to split them."""

CARDS = ("rtx3060", "rtx4090", "l40s", "a100-80gb", "h200")
"""12 to 140 GiB. The first three share their rehearsals."""


def questions() -> Iterator[Question]:
    """All of them; those that share rehearsals follow each other."""
    for model, method, max_length, effective_batch_size in MODELS:
        for card in CARDS:
            yield Question(
                model=model,
                method=method,
                max_length=max_length,
                effective_batch_size=effective_batch_size,
                card=card,
            )
