"""Trains on rows of every length, and compares reserved memory after 10, 20, 50, 100 ... steps with its prediction.

There are twelve trainings of four methods, with rows in any order or the longest first, and both kinds of segments.
Each prediction uses two rehearsals, of the longest rows and of shorter ones. It is made for the batches that the run
drew, to which the limits apply, and for batches that planning draws from the histogram of row lengths.
"""

import json
import math
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench
from gpu_records.cases import GpuCase, make
from gpu_records.child import real_trainer_spec, sampled

from autotrain_mem import api
from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.estimator.mixed_steps import Rehearsed, drawn_batches, mixed_lengths, reserved_after
from autotrain_mem.support import codec
from autotrain_mem.support.units import GIB
from autotrain_mem.types import DataProfile
from hollow_cuda.build import Hollow
from hollow_cuda.child import complete_as_rehearsed
from hollow_cuda.models import SHALLOW
from hollow_cuda.runs import RunFailed, model_of, run_child

CAPABILITY = (9, 0)
MEDIAN_BAR, WORST_BAR = 0.02, 0.05
LIMIT_SECONDS = 4 * 3600.0
LOOKED_AT = (10, 20, 50, 100, 200, 500, 1000)
SHORTER = 5 / 16
"""The length of the second rehearsal's rows, as a share of the longest rows'."""

SHORTEST_TOKENS, SPREAD = 16, 0.7
"""Lengths are log-normal, as is usual for instructions with answers; the median is an eighth of the longest."""
ROWS = 2000
LENGTH, PROMPT = 1024, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class HoursCase:
    """One training of many steps, each with one micro-batch of rows that the sampler draws."""

    run: GpuCase
    steps: int
    longest_first: bool
    """Whether the longest rows run once before the first step, as in runs of this project."""

    @property
    def name(self) -> str:
        return f"{self.run.name}{'-longest-first' if self.longest_first else ''}"

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row, or of its prompt in online methods; the same in every call."""
        source = random.Random(self.run.length)
        median = self.run.length / 8
        drawn = [round(median * math.exp(source.gauss(0, SPREAD))) for _ in range(ROWS - 1)]
        return [self.run.length, *(min(self.run.length, max(SHORTEST_TOKENS, tokens)) for tokens in drawn)]

    @property
    def profile(self) -> DataProfile:
        """The number of rows of each length, as planning counts them."""
        return DataProfile(rows_by_length=dict(Counter(self.lengths)))


def hours_cases(steps: int) -> list[HoursCase]:
    """Returns three cases each of SFT, DPO, Reward and GRPO; GRPO's steps are slower, so it has a fifth of them."""
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


def compare_hours(hollow: Hollow, chosen: Sequence[HoursCase]) -> bool:
    """Prints lines for each training; returns whether all limits are kept."""
    errors: list[float] = []
    failed = 0
    print(f"{'GiB reserved':46} {'steps':>5} {'real':>8} {'predicted':>9} {'error':>8} {'worst batch':>12}")
    with api.Worker() as worker:
        for case in chosen:
            try:
                errors += compared(case, real_run(hollow, case), *rehearsed(hollow, worker, case))
            except RunFailed as error:
                failed += 1
                print(f"{case.name:46} failed: {str(error).strip().splitlines()[-2:]}", flush=True)
    return bool(errors) and bench.within("reserved", errors, MEDIAN_BAR, WORST_BAR) and not failed


def real_run(hollow: Hollow, case: HoursCase) -> list[dict[str, int]]:
    """Returns the reserved bytes and the longest row's tokens of each step. Raises RunFailed."""
    out = hollow.cache / "hours" / f"{case.name}-{case.steps}.json"
    out.parent.mkdir(exist_ok=True)
    if not out.is_file():
        asked = {"case": codec.to_json(case), "out": str(out)}
        run_child("hollow_cuda.hours", hollow, case.run, asked, LIMIT_SECONDS)
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
    """Prints a line for each number of steps; returns the relative errors."""
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
    mixed = mixed_lengths(longest, shorter, batches, AllocatorSettings())
    modes = {"fixed size": mixed.native, "expandable": mixed.expandable_segments}
    return "; ".join(
        f"{kind}, longest first {' '.join(f'{size / GIB:.2f}' for size in sizes)}" for kind, sizes in modes.items()
    )


def main() -> None:
    """Trains one case on the stand-in device: ``python -m hollow_cuda.hours REQUEST.json``."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    case = codec.from_json(HoursCase, request["case"])
    with tempfile.TemporaryDirectory(prefix="hours-", ignore_cleanup_errors=True) as scratch:
        rows = train(case, Path(request["model"]), scratch)
    Path(request["out"]).write_text(json.dumps(rows), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # autograd's device thread cannot be stopped; a regular exit would abort the process


def train(case: HoursCase, model: Path, scratch: str) -> list[Mapping[str, int]]:
    """Returns the peak of reserved bytes and the longest row's tokens of each step."""
    import torch
    from transformers import TrainerCallback

    from autotrain_mem.training.process.longest_batch import LongestBatch, attach_longest_batch
    from hollow_cuda.values import HostValues

    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda.init()
    reserved: list[int] = []

    class Reserved(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            reserved.append(torch.cuda.max_memory_reserved())

    drawn: list[int] = []
    torch.manual_seed(0)
    with HostValues(), sampled(complete_as_rehearsed), _rows_of(case):
        steps = {"max_steps": case.steps, "logging_steps": case.steps}
        spec = real_trainer_spec(case.run, model, scratch, on_host=False, **steps)
        trainer = spec.build()
        collate = trainer.data_collator

        def collated(batch: list[Any]) -> Any:
            drawn.append(max(_tokens(row) for row in batch))
            return collate(batch)

        def forget(longest: LongestBatch) -> None:
            if not longest.why_not:
                drawn.pop()

        trainer.data_collator = collated
        trainer.add_callback(Reserved())
        with spec.patches(trainer):
            if case.longest_first:
                attach_longest_batch(trainer, forget)
            trainer.train()
    pairs = zip(reserved, drawn, strict=False)  # the data loader draws one batch ahead
    return [{"reserved": size, "tokens": tokens} for size, tokens in pairs]


def _tokens(row: Mapping[str, Any]) -> int:
    """Counts the tokens of a row: of the longer sequence in a pair, of the prompt in an online method."""
    lengths = {
        name: len(value.split() if isinstance(value, str) else value)
        for name, value in row.items()
        if hasattr(value, "__len__")
    }
    prompt = lengths.pop("prompt_ids", lengths.pop("prompt", 0))
    return prompt + max(lengths.values(), default=0)


@contextmanager
def _rows_of(case: HoursCase) -> Iterator[None]:
    """Inside, a trainer gets the case's rows instead of a rehearsal's."""
    from datasets import concatenate_datasets

    from autotrain_mem.methods.interface import method_of

    method = method_of(case.run.method)
    worst = method.worst_rows

    def rows(filled: Any, length: int, count: int) -> Any:
        made = {tokens: worst(filled, tokens, 1) for tokens in {*case.lengths}}
        return concatenate_datasets([made[tokens] for tokens in case.lengths])

    with patch.object(method, "worst_rows", rows):
        yield


if __name__ == "__main__":
    main()
