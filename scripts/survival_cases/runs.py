"""Makes 60 runs with 6 trainers, each on a simulated card whose memory its plan fills."""

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

from survival_cases import jobs
from survival_cases.command import Ended, autofit
from survival_cases.kept import Row

SHARES = (1.0, 0.6, 0.4)
"""Sizes of cards, as shares of the memory that the whole effective batch needs as a single micro-batch."""
SHARES_OF_FULL = (0.8,)
"""Further sizes for full fine-tuning. The cases are 6 methods x (3 modes x 3 sizes + 1), which is 60."""
LEAST_FILL = 0.85
SAVE_STEPS = "10"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    method: str
    mode: str
    share: float

    def __str__(self) -> str:
        return f"{self.method} {self.mode} {self.share:.1f}"

    @property
    def flags(self) -> list[str]:
        return jobs.flags(self.method, self.mode)


def cases() -> list[Case]:
    """Returns all 60 cases, method by method."""
    return [
        Case(method=method, mode=mode, share=share)
        for method in jobs.METHODS
        for mode in jobs.MODES
        for share in (*SHARES, *(SHARES_OF_FULL if mode == "full" else ()))
    ]


def run(case: Case, card: str, place: pathlib.Path) -> Row:
    argv = [case.method, *case.flags, "--gpu", card, "--simulate", "--save_steps", SAVE_STEPS]
    ended = autofit(argv, place, str(case).replace(" ", "-"), {})
    return {"card": card, "seconds": round(ended.seconds, 1), **judged(case, ended)}


def judged(case: Case, ended: Ended) -> Row:
    """Returns the row of a command. It is ``finished`` if one epoch took the planned steps of the planned batch."""
    if ended.told is None:
        return {"outcome": "died", "code": ended.code, "error": ended.error[:2000]}
    plan, state = ended.told["plan"], ended.state()
    knobs, estimate = plan["knobs"], plan["estimate"]
    batch = knobs["per_device_train_batch_size"] * knobs["gradient_accumulation_steps"]
    row = {
        "fill": round(estimate["required_bytes"] / estimate["budget_bytes"], 3),
        "micro_batch": knobs["per_device_train_batch_size"],
        "steps": ended.told["run"]["steps"],
        "steps_planned": plan["optimizer_steps"],
        "epoch": state.get("epoch"),
        "batch_kept": batch == jobs.rows_per_step(case.method),
        **{name: ended.count(name) for name in ("probes", "incidents", "restarts")},
    }
    whole = row["steps"] == row["steps_planned"] == state.get("global_step") and state.get("epoch") == 1.0
    return {"outcome": "finished" if whole and row["batch_kept"] else "changed", **row}


def table(rows: Mapping[str, Row]) -> list[str]:
    """Returns the head, a line for each run, and two lines of totals."""
    lines = [f"{'run':20} {'card':>10} {'fill':>6} {'micro':>5} {'steps':>7} {'OOM':>4} {'restarts':>8} {'seconds':>7}"]
    for name, row in rows.items():
        if row["outcome"] == "died":
            error = row["error"].splitlines()[0] if row["error"] else row["code"]
            lines.append(f"{name:20} {row['card']:>10}  died: {error}")
            continue
        steps = f"{row['steps']}/{row['steps_planned']}"
        changed = "" if row["outcome"] == "finished" else f"  * epoch {row['epoch']}, batch kept: {row['batch_kept']}"
        lines.append(
            f"{name:20} {row['card']:>10} {row['fill']:6.0%} {row['micro_batch']:5} {steps:>7} {row['incidents']:4} "
            f"{row['restarts']:8} {row['seconds']:7.1f}{changed}"
        )
    every = rows.values()
    finished = [row for row in every if row["outcome"] == "finished"]
    filled = sum(row["fill"] >= LEAST_FILL for row in finished)
    caught, restarts = (sum(row.get(name, 0) for row in every) for name in ("incidents", "restarts"))
    lost = sum(row.get("steps", 0) != row.get("steps_planned", 1) for row in every)
    changed_batch = sum(not row.get("batch_kept", False) for row in every)
    return [
        *lines,
        f"{len(finished)} of {len(rows)} finished; {lost} lost a step, {changed_batch} changed the effective batch",
        f"{filled} plans fill at least {LEAST_FILL:.0%} of the budget; {caught} out-of-memory errors caught, "
        f"{restarts} restarts",
    ]


def missed(rows: Mapping[str, Row]) -> bool:
    """Returns whether a run did not finish as planned, or its plan did not fill the card."""
    return any(row["outcome"] != "finished" or row["fill"] < LEAST_FILL for row in rows.values())
