"""20 runs on two simulated cards, over all trainers, under DDP and FSDP2, beside the same training on one card.

Both have the same micro-batches and as many rows per optimizer step, in fp32, so that their losses are the same but for
the order in which gradients are added up. Trainers that sample draw other completions on each rank: their losses are
not compared.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

from survival_cases import jobs
from survival_cases.command import Ended, autofit
from survival_cases.kept import Kept, Row

CARD = "2GiB"
STEPS = 6
ROWS = 2
ACCUMULATION = 4
"""On one card; half of it on two."""
TOKENS = 24
"""Of which there are many rows: of the longest there is one, beside which a micro-batch is mostly padding."""
SHARDINGS = ("ddp", "fsdp2")
LOSS_TOLERANCE = 1e-3
"""Relative: sums of gradients in another order, and six steps of a learning rate of 1e-3 on it."""
PEAK_TOLERANCE = 0.005
MODES = {
    **{"sft": ("full", "LoRA", "4-bit"), "reward": ("full", "LoRA"), "dpo": ("full", "LoRA")},
    **{"grpo": ("LoRA",), "rloo": ("full",), "ppo": ("full", "LoRA")},
}
"""Twice but for PPO, which no FSDP takes: 2 x (3 + 2 + 2 + 1 + 1) + 2 = 20."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    method: str
    mode: str
    sharding: str

    def __str__(self) -> str:
        return f"{self.method} {self.mode} {self.sharding}"


def cases() -> list[Case]:
    """All 20, method by method."""
    return [
        Case(method=method, mode=mode, sharding=sharding)
        for method, modes in MODES.items()
        for mode in modes
        for sharding in SHARDINGS
        if method != "ppo" or sharding == "ddp"
    ]


def run(case: Case, kept: Kept, place: pathlib.Path) -> Row:
    """One case, and its training on one card where that was not done yet."""
    alone = f"{case.method} {case.mode} alone"

    def train_alone(_: str) -> Row:
        ended = autofit(_flags(case, ACCUMULATION), place, f"one-{case.method}-{case.mode}", {})
        losses = {str(step): loss for step, loss in ended.losses().items()}
        return {"outcome": "finished" if ended.finished else "died", "losses": losses, "error": ended.error[:500]}

    one = kept.fill([alone], train_alone, processes=1)[alone]
    flags = _flags(case, ACCUMULATION // 2)
    ended = autofit([*flags, "--gpus", "2", "--sharding", case.sharding], place, f"two-{case}".replace(" ", "-"), {})
    return {"seconds": round(ended.seconds, 1), **judged(case, ended, one)}


def _flags(case: Case, accumulation: int) -> list[str]:
    shared = jobs.SHARED.replace("--num_train_epochs 1", f"--max_steps {STEPS}")
    sizes = f"--per_device_train_batch_size {ROWS} --gradient_accumulation_steps {accumulation}"
    length = "" if case.method in jobs.ONLINE else f"--max_length {TOKENS}"
    how = f"{length} --bf16 false --gpu {CARD} --simulate --no_probe --save_steps {STEPS}"
    return f"{case.method} {shared} {jobs.METHODS[case.method]} {jobs.MODES[case.mode]} {sizes} {how}".split()


def judged(case: Case, ended: Ended, one: Row) -> Row:
    """What came of it, beside the run on one card."""
    if ended.told is None or one["outcome"] == "died":
        return {"outcome": "died", "error": (ended.error or one["error"])[:500]}
    run, losses = ended.told["run"], ended.losses()
    row: Row = {"steps": run["steps"], "peak_error": run["prediction_error"]}
    is_sampled = case.method in jobs.ONLINE
    pairs = [(loss, one["losses"][str(step)]) for step, loss in losses.items()]
    row["loss_error"] = None if is_sampled else max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    is_same = row["loss_error"] is None or row["loss_error"] <= LOSS_TOLERANCE
    is_whole = row["steps"] == STEPS and len(pairs) == STEPS and abs(row["peak_error"]) <= PEAK_TOLERANCE
    return {"outcome": "finished" if is_same and is_whole else "changed", **row}


def table(rows: Mapping[str, Row]) -> list[str]:
    """A line for each run, and what it comes to."""
    lines = [f"{'run':22} {'outcome':9} {'steps':>5} {'loss differs by':>16} {'peak predicted':>15} {'seconds':>8}"]
    for name, row in rows.items():
        if row["outcome"] == "died":
            lines.append(f"{name:22} died: {row['error'].splitlines()[:1]}")
            continue
        loss = "sampled" if row["loss_error"] is None else f"{row['loss_error']:.1e}"
        figures = f"{row['steps']:5} {loss:>16} {row['peak_error']:>+15.2%} {row['seconds']:8.1f}"
        lines.append(f"{name:22} {row['outcome']:9} {figures}")
    finished = sum(row["outcome"] == "finished" for row in rows.values())
    return [*lines, f"{finished} of {len(rows)} finished as planned"]
