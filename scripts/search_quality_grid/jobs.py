"""The jobs: six models, each with a trainer, a length and an effective batch, on five cards; ten on several GPUs."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

from autotrain_mem.types import Job


@dataclass(frozen=True, slots=True)
class Question:
    """One job on one kind of card. Its length is pinned, so no row is truncated and speeds are comparable."""

    model: str
    method: str
    max_length: int
    effective_batch_size: int
    card: str
    gpus: int = 1
    use_peft: bool = False

    def __str__(self) -> str:
        model = self.model.rsplit("/", 1)[-1]
        of = f"{model}{' LoRA' if self.use_peft else ''} {self.method} {self.effective_batch_size} x {self.max_length}"
        return f"{of}, {'' if self.gpus == 1 else f'{self.gpus} x '}{self.card}"

    def job(self, models: pathlib.Path) -> Job:
        """Returns the same job as a command that has ``--max_length`` and ``--effective_batch_size``."""
        return Job(
            method=self.method,
            model=str(models / self.model),
            dataset=None,
            arguments={"max_length": self.max_length} | ({"use_peft": True} if self.use_peft else {}),
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
"""Small and large output heads, tied and untied; one or two sequences per row; batches with 4 to 6 divisors."""

CARDS = ("rtx3060", "rtx4090", "l40s", "a100-80gb", "h200")
"""Cards of 12 to 140 GiB. The first three share their rehearsals."""


def _several(model: str, gpus: int, card: str, effective: int, *, use_peft: bool = False) -> Question:
    return Question(model, "sft", 2048, effective, card, gpus, use_peft)


SEVERAL_GPUS = (
    _several("Qwen/Qwen2.5-0.5B", 4, "rtx4090", 32),
    _several("Qwen/Qwen2.5-0.5B", 8, "a100-80gb", 256),
    _several("Qwen/Qwen2.5-0.5B", 4, "rtx4090", 32, use_peft=True),
    _several("meta-llama/Llama-3.2-1B", 2, "rtx4090", 16),
    _several("meta-llama/Llama-3.2-1B", 4, "l40s", 64),
    _several("meta-llama/Llama-3.2-3B", 4, "rtx4090", 32),
    _several("meta-llama/Llama-3.2-3B", 8, "a100-80gb", 64),
    _several("meta-llama/Llama-3.1-8B", 8, "a100-80gb", 64),
    _several("meta-llama/Llama-3.1-8B", 2, "h200", 16),
    _several("meta-llama/Llama-3.1-8B", 4, "rtx4090", 32, use_peft=True),
)
"""Jobs for which every sharding fits, and jobs for which the whole model does not; on slow and fast links."""


def questions() -> Iterator[Question]:
    """Yields all jobs; those that share rehearsals are adjacent."""
    for model, card in itertools.product(MODELS, CARDS):
        yield Question(*model, card)
    yield from SEVERAL_GPUS
