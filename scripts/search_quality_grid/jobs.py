"""The jobs: six models on five cards, ten on several GPUs, and ten that need more than full fine-tuning can give."""

import itertools
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

from autotrain_mem.types import Job


@dataclass(frozen=True, slots=True)
class Question:
    """One job on one kind of card. Its flags pin the lengths, so no row is truncated and speeds are comparable."""

    model: str
    method: str
    flags: str
    """What is typed beside it, in TRL's names."""
    effective_batch_size: int
    card: str
    gpus: int = 1
    prompt_length: int | None = None

    def __str__(self) -> str:
        model, flags = self.model.rsplit("/", 1)[-1], self.flags.replace("--", "")
        gpus = "" if self.gpus == 1 else f"{self.gpus} x "
        return f"{model} {self.method} {self.effective_batch_size} rows, {flags}, {gpus}{self.card}"

    def job(self, models: pathlib.Path) -> Job:
        """Returns the same job as a command, without the flags."""
        return Job(
            method=self.method,
            model=str(models / self.model),
            dataset=None,
            effective_batch_size=self.effective_batch_size,
            prompt_length=self.prompt_length,
        )


def _rows(tokens: int, more: str = "") -> str:
    return f"--max_length {tokens}{more}"


def _generated(tokens: int, group: int) -> str:
    return f"--max_completion_length {tokens} --num_generations {group}"


LORA = " --use_peft"
LORA_ON_4_BITS = " --use_peft --load_in_4bit"

MODELS = (
    ("Qwen/Qwen2.5-0.5B", "sft", _rows(2048), 8),
    ("meta-llama/Llama-3.2-1B", "sft", _rows(4096), 16),
    ("Qwen/Qwen2.5-1.5B", "dpo", _rows(1024), 8),
    ("meta-llama/Llama-3.2-3B", "sft", _rows(2048), 16),
    ("Qwen/Qwen2.5-0.5B", "reward", _rows(1024), 32),
    ("meta-llama/Llama-3.1-8B", "sft", _rows(2048), 8),
)
"""Small and large output heads, tied and untied; one or two sequences per row; batches with 4 to 6 divisors."""

CARDS = ("rtx3060", "rtx4090", "l40s", "a100-80gb", "h200")
"""Cards of 12 to 140 GiB. The first three share their rehearsals."""


def _several(model: str, gpus: int, card: str, effective: int, more: str = "") -> Question:
    return Question(model, "sft", _rows(2048, more), effective, card, gpus)


SEVERAL_GPUS = (
    _several("Qwen/Qwen2.5-0.5B", 4, "rtx4090", 32),
    _several("Qwen/Qwen2.5-0.5B", 8, "a100-80gb", 256),
    _several("Qwen/Qwen2.5-0.5B", 4, "rtx4090", 32, LORA),
    _several("meta-llama/Llama-3.2-1B", 2, "rtx4090", 16),
    _several("meta-llama/Llama-3.2-1B", 4, "l40s", 64),
    _several("meta-llama/Llama-3.2-3B", 4, "rtx4090", 32),
    _several("meta-llama/Llama-3.2-3B", 8, "a100-80gb", 64),
    _several("meta-llama/Llama-3.1-8B", 8, "a100-80gb", 64),
    _several("meta-llama/Llama-3.1-8B", 2, "h200", 16),
    _several("meta-llama/Llama-3.1-8B", 4, "rtx4090", 32, LORA),
)
"""Jobs for which every sharding fits, and jobs for which the whole model does not; on slow and fast links."""

FURTHER_LEVELS = (
    Question("Qwen/Qwen3-4B", "grpo", _generated(256, 8), 8, "rtx4090", prompt_length=256),
    Question("Qwen/Qwen2.5-3B", "grpo", _generated(200, 8), 8, "t4", prompt_length=256),
    Question("Qwen/Qwen2.5-0.5B", "dpo", _rows(1024), 16, "rtx3060"),
    Question("Qwen/Qwen2.5-7B", "dpo", _rows(1024), 8, "h200"),
    Question("Qwen/Qwen3-4B", "kto", _rows(2048), 8, "rtx4090"),
    Question("Qwen/Qwen3-4B", "sft", _rows(2048), 8, "rtx4090"),
    Question("meta-llama/Llama-3.1-8B", "sft", _rows(2048), 8, "t4"),
    Question("Qwen/Qwen3-30B-A3B", "sft", _rows(2048), 8, "h100-80gb"),
    Question("meta-llama/Llama-3.1-70B", "sft", _rows(2048, LORA_ON_4_BITS), 8, "rtx-a6000"),
    Question("meta-llama/Llama-3.1-70B", "sft", _rows(2048, LORA_ON_4_BITS), 16, "rtx4090", gpus=2),
)
"""Jobs whose plans take Kahan summation, a precomputed reference, an adapter (of fused experts too), a quantized base,
or shards of one on the host."""


def questions() -> Iterator[Question]:
    """Yields all jobs; those that share rehearsals are adjacent."""
    for model, card in itertools.product(MODELS, CARDS):
        yield Question(*model, card)
    yield from (*SEVERAL_GPUS, *FURTHER_LEVELS)
