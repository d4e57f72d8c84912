"""What goes wrong in a run that is planned well: each fault at 20 random moments, and what the run makes of it.

The losses of a run that survives are held against those of the undisturbed one, at every step. What was resumed is the
same to the bit. A micro-batch in two parts adds its gradients in another order, and each part rounds a weight's
gradient to bfloat16 (2^-9), which TRL computes in by default; AdamW divides by gradients that may be near zero, so
that single weights move otherwise. That came to 9e-5 of the loss in 12 steps (without bf16 the norm of the gradients
was the same to 1e-7), just below ``TOLERANCE``. A change that matters, such as a row that is lost or twice, is 1e-2.
"""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

from autotrain_mem import api
from autotrain_mem.machine.fault_injection import COUNT, MARKS_NAME, VARIABLE
from autotrain_mem.support.units import MIB
from survival_cases import from_outside
from survival_cases.command import AUTOFIT, Ended, autofit
from survival_cases.jobs import METHODS
from survival_cases.kept import Kept, Row
from survival_cases.sizes import filled_card

MOMENTS = 20
TOLERANCE = 1e-4
"""Of a loss; see above."""
LEAST_LOSS = 1e-2
"""Differences of a loss below this are told as shares of this: GRPO's is about zero in its first step."""
OTHER_SAMPLES = "draw other samples"
"""In the words of ``training/guard_generation.py``: such a run has no losses to compare."""
SHARE = 0.6
"""Of what the whole effective batch needs: so there is a micro-batch to split, and accumulation."""
SHARED = (
    "--model model --num_train_epochs 1 --learning_rate 1e-3 --logging_steps 1 --fit lossless --save_steps 4 "
    "--use_peft false"
)
EVALUATED = "--eval_strategy steps --eval_steps 6"
BATCHES = {"sft": 8, "dpo": 8, "grpo": 16, "ppo": 8}
"""96 rows in 12 steps."""

FAULTS: Mapping[str, tuple[str, ...]] = {
    "oom:forward": ("sft", "dpo", "grpo", "ppo"),
    "oom:backward": ("sft", "dpo", "grpo", "ppo"),
    "oom:optimizer_step": ("sft", "dpo", "grpo", "ppo"),
    "oom:evaluate": ("sft", "dpo"),
    "oom:save": ("sft", "dpo", "grpo", "ppo"),
    "oom:generate": ("grpo", "ppo"),
    "kill": ("sft", "dpo", "grpo", "ppo"),
    "taken": ("sft", "dpo", "grpo", "ppo"),
    "disk:save": ("sft", "dpo", "ppo"),
    "torn:save": ("sft", "dpo", "ppo"),
    "rot:save": ("sft", "dpo", "grpo", "ppo"),
    "clock:save": ("sft", "dpo", "grpo", "ppo"),
    "disk": ("sft", "dpo", "grpo", "ppo"),
    "second run": ("sft", "dpo", "grpo", "ppo"),
    "SIGHUP": ("sft", "dpo", "grpo", "ppo"),
}
"""Fault -> the methods that it befalls, in turn."""
ACCEPTED = ("survived", "other samples", "reported", "never came")
FROM_OUTSIDE = ("second run", "SIGHUP")
"""Not the process's own doing: for them a mishap is ``step:N`` of the run."""
TORN_FILES = ("", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors")
ROTTEN_FILES = (*TORN_FILES[1:], "training_args.bin", "config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run and what befalls it."""

    fault: str
    number: int
    method: str
    mishap: str
    """As ``AUTOFIT_MISHAPS`` has it, or ``step:N``."""

    def __str__(self) -> str:
        return f"{self.fault} {self.number:02} {self.method}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Undisturbed:
    """A run to which nothing happens."""

    card: str
    losses: Mapping[int, float]
    counts: Mapping[str, int]
    """Allocations by phase, of ``all``, and ``checkpoints``."""


def flags(method: str) -> list[str]:
    """Of a short run: 12 steps, a checkpoint every 4."""
    kind = METHODS[method].replace(".jsonl", "").replace("--dataset ", "--dataset short_")
    evaluated = EVALUATED if method in FAULTS["oom:evaluate"] else ""
    return f"{SHARED} {kind} {evaluated} --effective_batch_size {BATCHES[method]}".split()


def undisturbed(workers: api.Workers, place: pathlib.Path, kept: Kept) -> dict[str, Undisturbed]:
    """By method; planned and trained once."""

    def trained(method: str) -> Row:
        card = filled_card(workers, method, flags(method), SHARE)
        argv = [method, *flags(method), "--gpu", card, "--simulate", "--no_probe"]
        ended = autofit(argv, place, f"undisturbed-{method}", {VARIABLE: COUNT})
        if not ended.finished:
            raise RuntimeError(f"the undisturbed run of {method} failed: {ended.error or ended.code}")
        lines = [line.split() for line in (ended.folder / MARKS_NAME).read_text().splitlines()]
        counts = {name if unit == "allocations" else unit: int(number) for name, number, unit in lines}
        losses = {str(step): loss for step, loss in ended.losses().items()}
        return {"card": card, "losses": losses, "counts": counts, "outcome": "undisturbed"}

    rows = kept.fill(BATCHES, trained, processes=1)
    return {
        method: Undisturbed(
            card=row["card"], losses={int(step): loss for step, loss in row["losses"].items()}, counts=row["counts"]
        )
        for method, row in rows.items()
    }


def cases(quiet: Mapping[str, Undisturbed]) -> list[Case]:
    """300: each fault at moments that are drawn evenly from those of the undisturbed run; each file rots in turn."""
    random = Random(0)
    every = [
        Case(fault=fault, number=number, method=method, mishap=_drawn(random, fault, quiet[method]))
        for fault, methods in FAULTS.items()
        for number, method in enumerate(islice(cycle(methods), MOMENTS))
    ]
    files = cycle(ROTTEN_FILES)
    return [
        replace(case, mishap=f"{case.mishap}:{next(files)}") if case.fault == "rot:save" else case for case in every
    ]


def _drawn(random: Random, fault: str, quiet: Undisturbed) -> str:
    kind, _, where = fault.partition(":")
    if kind == "oom" and where != "save":
        return f"{fault}:{random.randint(1, quiet.counts[where])}"
    if kind == "kill":
        return f"kill:{random.randint(1, quiet.counts['all'])}"
    if kind == "taken":
        return f"taken:{_taken_bytes(random, quiet)}B:{random.randint(1, quiet.counts['all'])}"
    is_last_spared = kind in ("torn", "rot")  # a run that is done needs it no more
    if fault in FROM_OUTSIDE:
        return f"step:{random.randint(0, max(quiet.losses) - 1)}"
    if fault == "disk":
        return (
            f"disk:{random.randint(1, quiet.counts['all'])} oom:backward:{random.randint(1, quiet.counts['backward'])}"
        )
    if kind == "clock":
        save = random.randint(2, quiet.counts["checkpoints"])
        return f"clock:save:{save} kill:{random.randint(1, quiet.counts['all'])}"
    save = random.randint(1, quiet.counts["checkpoints"] - is_last_spared)
    file = random.choice(TORN_FILES) if kind == "torn" else ""
    return f"{fault}:{save}" + (f":{file}" if file else "")


def _taken_bytes(random: Random, quiet: Undisturbed) -> int:
    """Between 1 MiB and half of the card."""
    card_bytes = int(quiet.card.removesuffix("KiB")) * 1024
    return random.randint(MIB, card_bytes // 2)


def run(case: Case, quiet: Mapping[str, Undisturbed], place: pathlib.Path) -> Row:
    """One case, with the plan of the undisturbed run."""
    still = quiet[case.method]
    argv = [case.method, "--plan", f"runs/undisturbed-{case.method}", "--simulate", "--no_probe"]
    name = f"{case.fault}-{case.number:02}".replace(":", "-").replace(" ", "-")
    if case.fault in FROM_OUTSIDE:
        row = _from_outside(case, argv, place, name, still.losses)
    else:
        argv += ["--save_total_limit", "1"] if case.fault == "clock:save" else []
        module = "survival_cases.full_disk" if case.fault == "disk" else AUTOFIT
        ended = autofit(argv, place, name, {VARIABLE: case.mishap}, module=module)
        row = {"seconds": round(ended.seconds, 1), **judged(ended, came=_came(ended), losses=still.losses)}
    return {"mishap": case.mishap, **row}


def _from_outside(case: Case, argv: Sequence[str], place: pathlib.Path, name: str, losses: Mapping[int, float]) -> Row:
    step = int(case.mishap.partition(":")[2])
    if case.fault == "SIGHUP":
        stopped, ended = from_outside.hang_up(argv, place, name, step=step + 1)
        is_told = stopped.finished or stopped.is_reported
        came, wrong = not stopped.finished, "" if is_told else "lost"
    else:
        words = from_outside.SECOND[case.number % len(from_outside.SECOND)]
        ended, stopped = from_outside.second_run(argv, place, name, step=step, words=words)
        came, wrong = True, "" if stopped.is_reported else "both ran"
    row = {
        "seconds": round(ended.seconds, 1),
        **judged(ended, came=came, losses=losses),
        "stopped": stopped.error[:500],
    }
    return {**row, "outcome": wrong, "code": stopped.code} if wrong else row


def _came(ended: Ended) -> bool:
    """Whether the mishap happened at all: a run that goes otherwise may have fewer allocations."""
    marks = ended.folder / MARKS_NAME
    return marks.is_file() and bool(marks.read_text().strip())


def judged(ended: Ended, *, came: bool, losses: Mapping[int, float]) -> Row:
    """What came of it."""
    row: Row = {name: ended.count(name) for name in ("incidents", "restarts")}
    if not ended.finished:
        return {"outcome": "reported" if ended.is_reported else "lost", "error": ended.error[:2000], **row}
    if any(OTHER_SAMPLES in incident["remedy"] for incident in ended.experience.get("incidents", ())):
        return {"outcome": "other samples", **row}
    found = _losses(ended)
    if not _reaches_the_end(found, losses):
        return {"outcome": "steps differ", "steps": sorted(found), **row}
    apart = [abs(found[step] - loss) / max(abs(loss), LEAST_LOSS) for step, loss in losses.items() if step in found]
    outcome = "survived" if all(each <= TOLERANCE for each in apart) else "losses differ"
    return {"outcome": outcome if came else "never came", "apart": max(apart, default=0.0), **row}


def _losses(ended: Ended) -> dict[int, float]:
    """Of every step up to the newest checkpoint, and of the last, which may have met a full disk."""
    found = ended.losses()
    run = (ended.told or {}).get("run", {})
    if run.get("last_loss") is not None:
        found.setdefault(run["steps"], run["last_loss"])
    return found


def _reaches_the_end(found: Mapping[int, float], losses: Mapping[int, float]) -> bool:
    return set(found) <= set(losses) and max(found, default=0) == max(losses)


def table(rows: Mapping[str, Row], named: Iterable[str] = FAULTS) -> list[str]:
    """In Markdown: a line for each fault."""
    head = ("fault", "moments", "survived", "reported", "else", "caught", "restarts", "loss apart")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    by_fault = {fault: [row for name, row in rows.items() if name.startswith(f"{fault} ")] for fault in named}
    return [*lines, *(_line(fault, own) for fault, own in by_fault.items() if own)]


def _line(fault: str, rows: list[Row]) -> str:
    outcomes = Counter(row["outcome"] for row in rows)
    others = [f"{count} {outcome}" for outcome, count in outcomes.items() if outcome not in ("survived", "reported")]
    figures = [
        str(len(rows)),
        *(str(outcomes[outcome]) for outcome in ("survived", "reported")),
        ", ".join(others),
        *(str(sum(row[name] for row in rows)) for name in ("incidents", "restarts")),
        f"{max((row.get('apart', 0.0) for row in rows if row['outcome'] == 'survived'), default=0.0):.0e}",
    ]
    return f"| {fault} | " + " | ".join(figures) + " |"


def missed(rows: Mapping[str, Row]) -> bool:
    """Whether a run was lost, or went on to something else."""
    return any(row["outcome"] not in ACCEPTED for row in rows.values())
