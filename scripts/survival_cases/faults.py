"""What goes wrong in a run that is planned well: each fault at 20 random moments, and what the run makes of it.

The losses of a run that survives are held against those of the undisturbed one, at every step. What was resumed is the
same to the bit. A micro-batch in two parts adds its gradients in another order, and each part rounds a weight's
gradient to bfloat16 (2^-9), which TRL computes in by default; AdamW divides by gradients that may be near zero, so
that single weights move otherwise. That came to 9e-5 of the loss in 12 steps (without bf16 the norm of the gradients
was the same to 1e-7), just below ``TOLERANCE``. A change that matters, such as a row that is lost or twice, is 1e-2.
"""

from __future__ import annotations

import pathlib
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

from autotrain_mem import api
from autotrain_mem.machine.fault_injection import COUNT, MARKS_NAME, VARIABLE
from autotrain_mem.support.units import KIB, MIB
from survival_cases.command import AUTOFIT, Ended, Running, autofit
from survival_cases.jobs import METHODS, filled_card
from survival_cases.kept import Kept, Row

MOMENTS = 20
TOLERANCE = 1e-4
"""Of a loss; see above."""
LEAST_LOSS = 1e-2
"""Differences of a loss below this are told as shares of this: GRPO's is about zero in its first step."""
OTHER_SAMPLES = "draws other samples"
"""The wording of ``training/guard/generation_split.py``: such a run has no losses to compare."""
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
PLAIN = ("survived", "reported")
ACCEPTED = (*PLAIN, "other samples", "never came")
SIGNALS = {"SIGHUP": signal.SIGHUP, "SIGTERM": signal.SIGTERM}
FROM_OUTSIDE = ("second run", *SIGNALS)
"""Not the process's own doing: for them a mishap is ``step:N`` of the run."""
SECOND = ((), ("--overwrite_output_dir",), ("--resume_from_checkpoint",))
"""What the second run is asked for beside the first one's words, in turn."""
TORN_FILES = ("", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors")
ROTTEN_FILES = (*TORN_FILES[1:], "training_args.bin", "config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    fault: str
    number: int
    kind: str
    """Which undisturbed run it repeats: of a method, or of two ranks under a sharding."""
    mishap: str
    """As ``AUTOFIT_MISHAPS`` has it, or ``step:N``."""

    def __str__(self) -> str:
        return f"{self.fault} {self.number:02} {self.kind}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Undisturbed:
    card: str
    losses: Mapping[int, float]
    counts: Mapping[str, int]
    """Allocations by phase, of ``all``, and ``checkpoints``."""


def flags(method: str) -> list[str]:
    """Of a short run: 12 steps, a checkpoint every 4."""
    kind = METHODS[method].replace(".jsonl", "").replace("--dataset ", "--dataset short_")
    evaluated = EVALUATED if method in FAULTS["oom:evaluate"] else ""
    return f"{SHARED} {kind} {evaluated} --effective_batch_size {BATCHES[method]}".split()


def undisturbed(
    workers: api.Workers, place: pathlib.Path, kept: Kept, commands: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Undisturbed]:
    """Plan and train each kind of run once.

    Args:
        commands: A method and its flags, by kind; None: all methods.
    """
    every = commands or {method: [method, *flags(method)] for method in BATCHES}

    def trained(kind: str) -> Row:
        method, *words = every[kind]
        card = filled_card(workers, method, words, SHARE)
        argv = [method, *words, "--gpu", card, "--simulate", "--no_probe"]
        ended = autofit(argv, place, f"undisturbed-{kind}", {VARIABLE: COUNT})
        if not ended.finished:
            raise RuntimeError(f"the undisturbed run of {kind} failed: {ended.error or ended.code}")
        lines = [line.split() for line in (ended.folder / MARKS_NAME).read_text().splitlines()]
        counts = {name if unit == "allocations" else unit: int(number) for name, number, unit in lines}
        losses = {str(step): loss for step, loss in ended.losses().items()}
        return {"card": card, "losses": losses, "counts": counts, "outcome": "undisturbed"}

    rows = kept.fill(every, trained, processes=1)
    return {
        kind: Undisturbed(
            card=row["card"], losses={int(step): loss for step, loss in row["losses"].items()}, counts=row["counts"]
        )
        for kind, row in rows.items()
    }


def cases(quiet: Mapping[str, Undisturbed]) -> list[Case]:
    """300: each fault at moments that are drawn evenly from those of the undisturbed run; each file rots in turn."""
    random = Random(0)
    every = [
        Case(fault=fault, number=number, kind=method, mishap=drawn(random, fault, quiet[method]))
        for fault, methods in FAULTS.items()
        for number, method in enumerate(islice(cycle(methods), MOMENTS))
    ]
    files = cycle(ROTTEN_FILES)
    return [
        replace(case, mishap=f"{case.mishap}:{next(files)}") if case.fault == "rot:save" else case for case in every
    ]


def drawn(random: Random, fault: str, quiet: Undisturbed) -> str:
    """A mishap at a moment of the undisturbed run."""
    kind, _, where = fault.partition(":")
    if kind == "oom" and where != "save":
        return f"{fault}:{random.randint(1, quiet.counts[where])}"
    if fault in FROM_OUTSIDE:
        return f"step:{random.randint(int(fault == 'SIGTERM'), max(quiet.losses) - 1)}"
    if kind in ("kill", "stop"):
        return f"{kind}:{random.randint(1, quiet.counts['all'])}"
    if kind == "taken":  # between 1 MiB and half of the card
        taken_bytes = random.randint(MIB, int(quiet.card.removesuffix("KiB")) * KIB // 2)
        return f"taken:{taken_bytes}B:{random.randint(1, quiet.counts['all'])}"
    if fault == "disk":
        disk = random.randint(1, quiet.counts["all"])
        return f"disk:{disk} oom:backward:{random.randint(1, quiet.counts['backward'])}"
    if kind == "clock":
        save = random.randint(2, quiet.counts["checkpoints"])
        return f"clock:save:{save} kill:{random.randint(1, quiet.counts['all'])}"
    is_last_spared = kind in ("torn", "rot")  # a run that is done needs it no more
    save = random.randint(1, quiet.counts["checkpoints"] - is_last_spared)
    file = random.choice(TORN_FILES) if kind == "torn" else ""
    return f"{fault}:{save}" + (f":{file}" if file else "")


def run(
    case: Case, quiet: Mapping[str, Undisturbed], place: pathlib.Path, method: str = "", more: Sequence[str] = ()
) -> tuple[Row, Ended]:
    """One case, with the plan of the undisturbed run.

    Args:
        method: Where the case's kind is none.
        more: Further flags.
    """
    losses = quiet[case.kind].losses
    argv = [method or case.kind, "--plan", f"runs/undisturbed-{case.kind}", "--simulate", "--no_probe", *more]
    name = f"{case.fault}-{case.kind}-{case.number:02}".replace(":", "-").replace(" ", "-")
    if case.fault in FROM_OUTSIDE:
        row, ended = _from_outside(case, argv, place, name, losses)
    else:
        argv += ["--save_total_limit", "1"] if case.fault == "clock:save" else []
        module = "survival_cases.full_disk" if case.fault == "disk" else AUTOFIT
        ended = autofit(argv, place, name, {VARIABLE: case.mishap}, module=module)
        marks = ended.folder / MARKS_NAME
        came = marks.is_file() and bool(marks.read_text().strip())  # a run that goes otherwise may allocate less
        row = judged(ended, came=came, losses=losses)
    return {"mishap": case.mishap, "seconds": round(ended.seconds, 1), **row}, ended


def _from_outside(
    case: Case, argv: Sequence[str], place: pathlib.Path, name: str, losses: Mapping[int, float]
) -> tuple[Row, Ended]:
    step = int(case.mishap.partition(":")[2])
    if number := SIGNALS.get(case.fault):
        stopped, ended = hang_up(argv, place, name, step=step + (case.fault == "SIGHUP"), number=number)
        came, wrong = not stopped.finished, "" if stopped.finished or stopped.is_reported else "lost"
    else:
        ended, stopped = second_run(argv, place, name, step=step, words=SECOND[case.number % len(SECOND)])
        came, wrong = True, "" if stopped.is_reported else "both ran"
    row = {**judged(ended, came=came, losses=losses), "stopped": stopped.error[:500]}
    return ({**row, "outcome": wrong, "code": stopped.code} if wrong else row), ended


def second_run(
    argv: Sequence[str], place: pathlib.Path, run: str, *, step: int, words: Sequence[str]
) -> tuple[Ended, Ended]:
    """A run, and another in its folder: from some step on while the first one is held, or at 0 both at once.

    Returns the one that trained, and the one that ought to have been refused.
    """
    others: list[Ended] = []

    def intrude(running: Running) -> None:
        is_held = step > 0 and running.reaches(step)
        if is_held:
            running.process.send_signal(signal.SIGSTOP)  # else it may be done before the other has begun
        others.append(autofit([*argv, *words], place, f"{run}-second", {}, folder=place / "runs" / run))
        if is_held:
            running.process.send_signal(signal.SIGCONT)

    first = autofit(argv, place, run, {}, meanwhile=intrude)
    (second,) = others
    return (second, first) if second.finished and not first.finished else (first, second)


def hang_up(
    argv: Sequence[str], place: pathlib.Path, run: str, *, step: int, number: signal.Signals
) -> tuple[Ended, Ended]:
    """A run whose terminal goes after some step, and the one that goes on with it."""

    def end(running: Running) -> None:
        if running.reaches(step):
            running.process.send_signal(number)

    first = autofit(argv, place, run, {}, meanwhile=end)
    if first.finished:
        return first, first
    rest = autofit([*argv, "--resume_from_checkpoint"], place, f"{run}-resumed", {}, folder=first.folder)
    return first, replace(rest, seconds=first.seconds + rest.seconds)


def judged(ended: Ended, *, came: bool, losses: Mapping[int, float]) -> Row:
    row: Row = {name: ended.count(name) for name in ("incidents", "restarts")}
    if not ended.finished:
        return {"outcome": "reported" if ended.is_reported else "lost", "error": ended.error[:2000], **row}
    if any(OTHER_SAMPLES in incident["remedy"] for incident in ended.experience.get("incidents", ())):
        return {"outcome": "other samples", **row}
    found, run = ended.losses(), (ended.told or {}).get("run", {})
    if run.get("last_loss") is not None:  # the last step may have met a full disk, and left no checkpoint
        found.setdefault(run["steps"], run["last_loss"])
    if not (set(found) <= set(losses) and max(found, default=0) == max(losses)):
        return {"outcome": "steps differ", "steps": sorted(found), **row}
    apart = [abs(found[step] - loss) / max(abs(loss), LEAST_LOSS) for step, loss in losses.items() if step in found]
    outcome = "survived" if all(each <= TOLERANCE for each in apart) else "losses differ"
    return {"outcome": outcome if came else "never came", "apart": max(apart, default=0.0), **row}


def table(rows: Mapping[str, Row], named: Iterable[str] = FAULTS) -> list[str]:
    head = ("fault", "moments", "survived", "reported", "else", "caught", "restarts", "loss apart")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for fault in named:
        own = [row for name, row in rows.items() if name.startswith(f"{fault} ")]
        outcomes = Counter(row["outcome"] for row in own)
        others = [f"{count} {outcome}" for outcome, count in outcomes.items() if outcome not in PLAIN]
        apart = max((row.get("apart", 0.0) for row in own if row["outcome"] == "survived"), default=0.0)
        figures = (
            *(fault, len(own), *(outcomes[outcome] for outcome in PLAIN), ", ".join(others)),
            *(sum(row[name] for row in own) for name in ("incidents", "restarts")),
            f"{apart:.0e}",
        )
        lines += ["| " + " | ".join(map(str, figures)) + " |"] if own else []
    return lines


def missed(rows: Mapping[str, Row]) -> bool:
    """Whether a run was lost, or went on to something else."""
    return any(row["outcome"] not in ACCEPTED for row in rows.values())
