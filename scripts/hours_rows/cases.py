"""Lists the trainings: four methods, both kinds of segments, rows in any order and the longest rows first."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from gpu_records.cases import GpuCase, make
from hollow_cuda.models import SHALLOW

from autotrain_mem.types import DataProfile

SHORTEST_TOKENS, SPREAD = 16, 0.7
"""Rows are log-normal, as instructions with answers mostly are: the median is an eighth of the longest."""
ROWS = 2000
LENGTH, PROMPT = 1024, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class HoursCase:
    """One training of many steps, each with a micro-batch of rows as the sampler draws them."""

    run: GpuCase
    steps: int
    longest_first: bool
    """Whether the longest rows run once before the first step, as in runs of this project."""

    @property
    def name(self) -> str:
        return f"{self.run.name}{'-longest-first' if self.longest_first else ''}"

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row, of the prompt in online methods; the same ones each time."""
        source = random.Random(self.run.length)
        median = self.run.length / 8
        drawn = [round(median * math.exp(source.gauss(0, SPREAD))) for _ in range(ROWS - 1)]
        return [self.run.length, *(min(self.run.length, max(SHORTEST_TOKENS, tokens)) for tokens in drawn)]

    @property
    def profile(self) -> DataProfile:
        """The same rows as planning knows them: how many there are of each length."""
        return DataProfile(rows_by_length=dict(Counter(self.lengths)))


def cases(steps: int) -> list[HoursCase]:
    """Three each of SFT, DPO, Reward and GRPO, whose steps take ten times as long and are a fifth as many."""
    fewer = max(1, steps // 5)
    return [
        _case("sft", "lora", False, steps),
        _case("sft", "lora", False, steps, longest_first=True),
        _case("sft", "full", True, steps, expandable_segments=True),
        _case("dpo", "lora", True, steps),
        _case("dpo", "full", False, steps, longest_first=True),
        _case("dpo", "lora", False, steps, expandable_segments=True),
        _case("reward", "full", False, steps),
        _case("reward", "lora", True, steps, longest_first=True),
        _case("reward", "full", True, steps, expandable_segments=True),
        _case("grpo", "lora", True, fewer),
        _case("grpo", "full", False, fewer, longest_first=True),
        _case("grpo", "lora", False, fewer, expandable_segments=True),
    ]


def _case(
    method: str, weights: str, checkpointing: bool, steps: int, *, longest_first: bool = False, **knobs: Any
) -> HoursCase:
    online = method == "grpo"
    run = make(
        method,
        weights,
        PROMPT if online else LENGTH,
        checkpointing,
        model=SHALLOW,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=8 if method == "sft" else 4,
        **knobs,
    )
    return HoursCase(run=run, steps=steps, longest_first=longest_first)
