"""Trains the same data on the same cards with plain TRL, with ``auto_find_batch_size=True``, and with autofit."""

import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench import ROOT

from autotrain_mem.support.units import KIB, format_bytes
from survival_cases import jobs
from survival_cases.command import autofit, surroundings
from survival_cases.jobs import LARGE, card_of
from survival_cases.kept import Row

METHODS = ("sft", "reward", "dpo", "grpo")
MICRO_BATCH, ACCUMULATION = 20, 2
"""40 rows per step; the card is sized by the memory that these need."""
GENERATION = 40
"""GRPO's micro-batch: 20 prompts with 2 completions each. TRL refuses auto_find_batch_size there before training."""
SITUATIONS = ("the long row", "from the start")
TOOLS = ("TRL", "auto_find_batch_size", "autofit")
LIMIT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    method: str
    situation: str
    tool: str

    def __str__(self) -> str:
        return f"{self.method}, {self.situation}, {self.tool}"


def cases() -> list[Case]:
    """Returns all cases; for GRPO only the one that TRL refuses."""
    every = [
        Case(method=method, situation=situation, tool=tool)
        for method in METHODS
        for situation in SITUATIONS
        for tool in TOOLS
    ]
    return [case for case in every if case.method != "grpo" or str(case) == str(REFUSED)]


REFUSED = Case(method="grpo", situation=SITUATIONS[0], tool="auto_find_batch_size")


def run(case: Case, place: pathlib.Path) -> Row:
    """Runs one case. The card is sized once for each method, from the peaks of a run on a large card."""
    card = LARGE
    if case != REFUSED:  # too small for the batch with the long row, or for any batch
        kept = place / f"peaks-{case.method}.json"
        if not kept.is_file():
            kept.write_text(json.dumps(_plain(case.method, LARGE, place, auto=False)["attempts"][0]["peaks"]))
        peaks = json.loads(kept.read_text())
        usual = statistics.median_low(peaks[:3])
        card = card_of((usual + max(peaks)) // 2 if case.situation == SITUATIONS[0] else usual * 3 // 4)
    if case.tool == "autofit":
        return {"card": card, **_with_autofit(case, card, place)}
    return {"card": card, **judged(_plain(case.method, card, place, auto=case.tool == "auto_find_batch_size"))}


def _plain(method: str, card: str, place: pathlib.Path, *, auto: bool) -> dict[str, Any]:
    started = time.time()
    asked = {
        "method": method,
        "card": card,
        "micro_batch": GENERATION if method == "grpo" else MICRO_BATCH,
        "accumulation": 1 if method == "grpo" else ACCUMULATION,
        "auto_find_batch_size": auto,
        "output_dir": f"runs/plain-{method}-{card}-{auto}",
        "started": started,
    }
    done = subprocess.run(
        [sys.executable, "-m", "survival_cases.plain", json.dumps(asked)],
        cwd=place,
        env=surroundings(place, {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told | {"seconds": time.time() - started}


def judged(told: Mapping[str, Any]) -> Row:
    """Returns the row of a TRL run. The steps of all attempts but the last are wasted, since each attempt restarts
    the schedule and the data, with the weights of the one before."""
    attempts, error = told["attempts"], told["error"]
    abandoned, last = attempts[:-1], attempts[-1] if attempts else None
    return {
        "outcome": error or "finished",
        "restarts": len(abandoned),
        "wasted_steps": sum(attempt["steps"] for attempt in abandoned),
        "rows_twice": sum(attempt["steps"] * attempt["micro_batch"] * ACCUMULATION for attempt in abandoned),
        "rows_a_step": last["micro_batch"] * ACCUMULATION if last else None,
        "steps": last["steps"] if last else 0,
        "first_good_step_seconds": last["first_step_seconds"] if last and not error else None,
        "seconds": round(told["seconds"], 1),
    }


def _with_autofit(case: Case, card: str, place: pathlib.Path) -> Row:
    argv = [case.method, *jobs.flags(case.method, "full"), "--gpu", card, "--simulate", "--save_strategy", "no"]
    ended = autofit(argv, place, f"against-{case.method}-{card}", {})
    if ended.told is None:
        return {"outcome": ended.error, "seconds": round(ended.seconds, 1)}
    knobs, restarts = ended.told["plan"]["knobs"], ended.experience.get("restarts", ())
    wasted = sum(restart["step"] - restart["resumed_at"] for restart in restarts)
    return {
        "outcome": "finished",
        "restarts": len(restarts),
        "wasted_steps": wasted,
        "rows_twice": wasted * jobs.rows_per_step(case.method),
        "rows_a_step": knobs["per_device_train_batch_size"] * knobs["gradient_accumulation_steps"],
        "steps": ended.told["run"]["steps"],
        "first_good_step_seconds": ended.first_step_seconds,
        "seconds": round(ended.seconds, 1),
    }


def table(rows: Mapping[str, Row]) -> list[str]:
    columns = (
        *("", "card", "outcome", "restarts", "wasted steps", "rows trained twice", "rows per step"),
        *("steps", "first step that counts", "total"),
    )
    lines = [columns, ("---",) * len(columns)]
    for name, row in rows.items():
        card, outcome = row["card"], row["outcome"]
        if card != LARGE:
            card = format_bytes(int(card.removesuffix("KiB")) * KIB)
        if "out of memory" in outcome:
            outcome = "out of memory"
        elif len(outcome) >= 40:
            outcome = f"{outcome[:60]}..."
        figures = [""] * 7
        if row.get("steps"):
            first, changed = row["first_good_step_seconds"], row["rows_a_step"] != MICRO_BATCH * ACCUMULATION
            figures = [
                *(f"{row[name]:,}" for name in ("restarts", "wasted_steps", "rows_twice")),
                f"40 -> {row['rows_a_step']}" if changed else "40",
                str(row["steps"]),
                "" if first is None else f"{first:.0f} s",
                f"{row['seconds']:.0f} s",
            ]
        lines.append((name, card, outcome, *figures))
    return ["| " + " | ".join(line) + " |" for line in lines]
