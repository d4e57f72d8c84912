"""Trains on rows of every length, and compares what is reserved after 10, 20, 50, 100 ... steps with its prediction.

Twelve trainings of four methods, rows in any order and the longest first, both kinds of segments. Two rehearsals, of
the longest rows and of shorter ones, predict it: once for the batches that the run drew, which the bars judge, and once
for those that planning draws from the histogram of the data.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import bench
from gpu_records.cases import GpuCase, make

from autotrain_mem import api
from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.estimator.mixed_steps import Rehearsed, drawn_batches, mixed_lengths, reserved_after
from autotrain_mem.support import codec
from autotrain_mem.support.units import GIB
from autotrain_mem.types import DataProfile
from hollow_cuda.build import Hollow
from hollow_cuda.models import SHALLOW
from hollow_cuda.runs import RunFailed, model_of, run_child

CAPABILITY = (9, 0)
MEDIAN_BAR, WORST_BAR = 0.02, 0.05
LIMIT_SECONDS = 4 * 3600.0
LOOKED_AT = (10, 20, 50, 100, 200, 500, 1000)
SHORTER = 5 / 16
"""Of the longest rows, the second rehearsal's."""

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


def hours_cases(steps: int) -> list[HoursCase]:
    """Three each of SFT, DPO, Reward and GRPO, whose steps take ten times as long and are a fifth as many."""
    fewer = max(1, steps // 5)
    longest_first, expandable = {"longest_first": True}, {"expandable_segments": True}
    return [
        _case("sft", "lora", False, steps),
        _case("sft", "lora", False, steps, **longest_first),
        _case("sft", "full", True, steps, **expandable),
        _case("dpo", "lora", True, steps),
        _case("dpo", "full", False, steps, **longest_first),
        _case("dpo", "lora", False, steps, **expandable),
        _case("reward", "full", False, steps),
        _case("reward", "lora", True, steps, **longest_first),
        _case("reward", "full", True, steps, **expandable),
        _case("grpo", "lora", True, fewer),
        _case("grpo", "full", False, fewer, **longest_first),
        _case("grpo", "lora", False, fewer, **expandable),
    ]


def _case(
    method: str, weights: str, checkpointing: bool, steps: int, *, longest_first: bool = False, **knobs: Any
) -> HoursCase:
    rows = 8 if method == "sft" else 4
    sizes: dict[str, Any] = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": rows}
    length = PROMPT if method == "grpo" else LENGTH
    run = make(method, weights, length, checkpointing, model=SHALLOW, **sizes, **knobs)
    return HoursCase(run=run, steps=steps, longest_first=longest_first)


def compare_hours(hollow: Hollow, chosen: Sequence[HoursCase], *, again: bool) -> bool:
    """Prints lines for each training; returns whether all bars are kept."""
    errors: list[float] = []
    failed = 0
    print(f"{'GiB reserved':46} {'steps':>5} {'real':>8} {'predicted':>9} {'error':>8} {'worst batch':>12}")
    with api.Worker() as worker:
        for case in chosen:
            try:
                errors += compared(case, real_run(hollow, case, again=again), *rehearsed(hollow, worker, case))
            except RunFailed as error:
                failed += 1
                print(f"{case.name:46} failed: {str(error).strip().splitlines()[-2:]}", flush=True)
    return bool(errors) and bench.within("reserved", errors, MEDIAN_BAR, WORST_BAR) and not failed


def real_run(hollow: Hollow, case: HoursCase, *, again: bool) -> list[dict[str, int]]:
    """What torch's allocator held after each step. Raises RunFailed."""
    out = hollow.cache / "hours" / f"{case.name}-{case.steps}.json"
    out.parent.mkdir(exist_ok=True)
    if again or not out.is_file():
        asked = {"case": codec.to_json(case), "out": str(out)}
        run_child("hollow_cuda.hours_child", hollow, case.run, asked, LIMIT_SECONDS)
    rows: list[dict[str, int]] = json.loads(out.read_text(encoding="utf-8"))
    return rows


def rehearsed(hollow: Hollow, worker: api.Worker, case: HoursCase) -> tuple[Rehearsed, Rehearsed]:
    run = case.run
    job, knobs = run.job(model_of(hollow, run)), replace(run.knobs, expandable_segments=False)
    longest, shorter = (
        Rehearsed(tokens=tokens, trace=worker.rehearse(job, knobs, tokens, CAPABILITY))
        for tokens in (run.length, round(run.length * SHORTER))
    )
    return longest, shorter


def compared(case: HoursCase, real: Sequence[dict[str, int]], longest: Rehearsed, shorter: Rehearsed) -> list[float]:
    """Prints a line for each number of steps; returns the errors."""
    settings = AllocatorSettings(grows=case.run.knobs.expandable_segments)
    tokens = [row["tokens"] for row in real]
    predicted = reserved_after(longest, shorter, tokens, settings, longest_first=case.longest_first)
    worst_batch = reserved_after(longest, longest, [longest.tokens] * 2, settings, longest_first=False)[-1]
    errors = []
    for steps in (each for each in LOOKED_AT if each <= len(real)):
        held, foretold = real[steps - 1]["reserved"], predicted[steps - 1]
        errors.append(foretold / held - 1)
        print(
            f"{case.name:46} {steps:5} {held / GIB:8.3f} {foretold / GIB:9.3f} {errors[-1]:+8.2%} "
            f"{worst_batch / GIB:12.3f}",
            flush=True,
        )
    print(f"{'':46} by the histogram: {by_histogram(case, longest, shorter)}", flush=True)
    return errors


def by_histogram(case: HoursCase, longest: Rehearsed, shorter: Rehearsed) -> str:
    knobs = case.run.knobs
    rows = max(1, knobs.per_device_train_batch_size // (knobs.num_generations or 1))
    batches = drawn_batches(case.profile, rows=rows, each_step=1, limit=None, longest=longest.tokens)
    mixed = mixed_lengths(longest, shorter, batches, AllocatorSettings(), capacity_bytes=None)
    orders: dict[str, Any] = {
        f"{kind}, {order}": getattr(getattr(mixed, name), order.replace(" ", "_"))
        for kind, name in (("fixed size", "native"), ("expandable", "expandable_segments"))
        for order in ("any order", "longest first")
    }
    return "; ".join(
        f"{name} {' '.join(f'{size / GIB:.2f}' for size in order.reserved_bytes)}" for name, order in orders.items()
    )
