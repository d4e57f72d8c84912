"""Trains on rows of every length, and compares what is reserved after 10, 20, 50, 100 ... steps with its prediction.

Twelve trainings of four methods, rows in any order and the longest first, both kinds of segments. Two rehearsals, of
the longest rows and of shorter ones, predict it: once for the batches that the run drew, which the bars judge, and once
for those that planning draws from the histogram of the data.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpu_records.cases import GpuCase, make
from gpu_records.runs import ENVIRONMENT

from autotrain_mem import api
from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.estimator.mixed_steps import Rehearsed, drawn_batches, mixed_lengths, reserved_after
from autotrain_mem.support import codec
from autotrain_mem.support.units import GIB
from autotrain_mem.types import DataProfile
from hollow_cuda.build import Hollow
from hollow_cuda.models import SHALLOW, sparse_folder
from hollow_cuda.runs import CAPACITY_BYTES

CAPABILITY = (9, 0)
MEDIAN_BAR, WORST_BAR = 0.02, 0.05
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


def compare_hours(hollow: Hollow, chosen: Sequence[HoursCase], *, again: bool) -> bool:
    """Prints lines for each training; returns whether all bars are kept."""
    errors: list[float] = []
    failed = 0
    print(f"{'GiB reserved':46} {'steps':>5} {'real':>8} {'predicted':>9} {'error':>8} {'worst batch':>12}")
    with api.Worker() as worker:
        for case in chosen:
            try:
                errors += compared(case, real_run(hollow, case, again=again), *rehearsed(hollow, worker, case))
            except subprocess.CalledProcessError as error:
                failed += 1
                print(f"{case.name:46} failed: {error.stderr.strip().splitlines()[-1:]}", flush=True)
    return verdict(errors) and not failed


def real_run(hollow: Hollow, case: HoursCase, *, again: bool) -> list[dict[str, int]]:
    """What torch's allocator held after each step. Raises CalledProcessError."""
    folder = hollow.cache / "hours"
    folder.mkdir(exist_ok=True)
    out, request = folder / f"{case.name}-{case.steps}.json", folder / f"{case.name}.request.json"
    if again or not out.is_file():
        model = sparse_folder(hollow.cache / "models", case.run.model)
        asked = {"case": codec.to_json(case), "model": str(model), "out": str(out)}
        request.write_text(json.dumps(asked), encoding="utf-8")
        environment = hollow.environment(CAPACITY_BYTES, case.run.allocator) | ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "hollow_cuda.hours_child", str(request)]
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        request.unlink()
    rows: list[dict[str, int]] = json.loads(out.read_text(encoding="utf-8"))
    return rows


def rehearsed(hollow: Hollow, worker: api.Worker, case: HoursCase) -> tuple[Rehearsed, Rehearsed]:
    """The longest rows, and shorter ones."""
    run = case.run
    job, knobs = (
        run.job(sparse_folder(hollow.cache / "models", run.model)),
        replace(run.knobs, expandable_segments=False),
    )
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
    """What planning says of these rows."""
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


def verdict(errors: Sequence[float]) -> bool:
    """Prints whether the bars are kept."""
    if not errors:
        return False
    sizes = [abs(error) for error in errors]
    median, worst = statistics.median(sizes), max(sizes)
    kept = median <= MEDIAN_BAR and worst <= WORST_BAR
    print(
        f"{len(errors)} figures: {median:.2%} off in the median (bar {MEDIAN_BAR:.0%}), "
        f"{worst:.2%} at most ({WORST_BAR:.0%}): {'kept' if kept else 'MISSED'}"
    )
    return kept
