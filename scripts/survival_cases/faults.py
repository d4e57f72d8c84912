"""Injects each fault into planned runs at 20 random moments, and checks the results.

The losses of a surviving run are compared with those of the undisturbed run, at every step. After a resume they are
equal to the bit. If a micro-batch was split in two, gradients are summed in another order, and each part rounds them to
bfloat16 (2^-9), TRL's default precision. AdamW divides by gradients that may be near zero, so some weights then move
differently. The effect was 9e-5 of the loss in 12 steps, just below ``TOLERANCE`` (without bf16, the norm of the
gradients agreed to 1e-7). An error that matters, such as a lost or repeated row, changes the loss by 1e-2.
"""

import pathlib
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

from autotrain_mem import api
from autotrain_mem.machine.fault_injection import COUNT, MARKS_NAME, VARIABLE
from autotrain_mem.support.errors import TrainingError
from autotrain_mem.support.units import KIB, MIB
from survival_cases.command import AUTOFIT, Ended, Running, autofit
from survival_cases.jobs import METHODS, filled_card
from survival_cases.kept import Kept, Row

MOMENTS = 20
TOLERANCE = 1e-4
"""The largest relative difference of a loss; see the module's docstring."""
LEAST_LOSS = 1e-2
"""The least divisor of a relative difference: GRPO's loss is about zero in its first step."""
OTHER_SAMPLES = "draws other samples"
"""A text of ``training/guard/generation_split.py``: the losses of such a run cannot be compared."""
SHARE = 0.6
"""The card's size as a share of what the whole effective batch needs, so that runs accumulate and can be split."""
SHARED = (
    "--model model --num_train_epochs 1 --learning_rate 1e-3 --logging_steps 1 --fit lossless --save_steps 4 "
    "--use_peft false"
)
EVALUATED = "--eval_strategy steps --eval_steps 6"
BATCHES = {"sft": 8, "dpo": 8, "grpo": 16, "ppo": 8}
"""Rows per step. An epoch of 96 rows has 12 steps; in GRPO, each of a prompt's two completions is a row."""

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
    "disk": ("sft", "dpo", "grpo", "ppo"),
    "second run": ("sft", "dpo", "grpo", "ppo"),
    "SIGHUP": ("sft", "dpo", "grpo", "ppo"),
}
"""Fault -> the methods into whose runs it is injected, in turn."""
PLAIN = ("survived", "reported")
ACCEPTED = (*PLAIN, "other samples", "never came")
SIGNALS = {"SIGHUP": signal.SIGHUP, "SIGTERM": signal.SIGTERM}
FROM_OUTSIDE = ("second run", *SIGNALS)
"""Faults that come from outside the process, at a moment ``step:N``."""
ARRIVING_STEPS = 6
"""The steps of 0.1 s that two busy ranks may take until they agree where to stop; the run must not end before."""
SECOND = ((), ("--overwrite_output_dir",), ("--resume_from_checkpoint",))
"""Flags of the second run in addition to the first one's, in turn."""
TORN_FILES = ("", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors")
ROTTEN_FILES = (*TORN_FILES[1:], "training_args.bin", "config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    fault: str
    number: int
    kind: str
    """The undisturbed run that it repeats: a method, or a sharding of two ranks."""
    mishap: str
    """The value of ``AUTOFIT_MISHAPS``, or ``step:N``."""

    def __str__(self) -> str:
        return f"{self.fault} {self.number:02} {self.kind}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Undisturbed:
    card: str
    losses: Mapping[int, float]
    counts: Mapping[str, int]
    """The numbers of allocations in each phase and in ``all``, and of ``checkpoints``."""


def flags(method: str) -> list[str]:
    """Returns the flags of a short run of 12 steps, with a checkpoint every 4."""
    kind = METHODS[method].replace(".jsonl", "").replace("--dataset ", "--dataset short_")
    evaluated = EVALUATED if method in FAULTS["oom:evaluate"] else ""
    return f"{SHARED} {kind} {evaluated} --effective_batch_size {BATCHES[method]}".split()


def undisturbed(
    workers: api.Workers, place: pathlib.Path, kept: Kept, commands: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Undisturbed]:
    """Plans and trains each kind of run once without a fault. ``commands``: the method and flags of each kind; None for
    all methods."""
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
    """Returns 280 cases: each fault at uniformly random moments of the undisturbed run. Files are corrupted in turn."""
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
    """Returns a fault at a random moment of the undisturbed run."""
    kind, _, where = fault.partition(":")
    if kind == "oom" and where != "save":
        return f"{fault}:{random.randint(1, quiet.counts[where])}"
    if fault in FROM_OUTSIDE:
        last = max(1, max(quiet.losses) - (ARRIVING_STEPS if fault in SIGNALS else 1))
        return f"step:{random.randint(int(fault == 'SIGTERM'), last)}"
    if kind in ("kill", "stop"):
        return f"{kind}:{random.randint(1, quiet.counts['all'])}"
    if kind == "taken":  # between 1 MiB and half of the card
        taken_bytes = random.randint(MIB, int(quiet.card.removesuffix("KiB")) * KIB // 2)
        return f"taken:{taken_bytes}B:{random.randint(1, quiet.counts['all'])}"
    if fault == "disk":
        disk = random.randint(1, quiet.counts["all"])
        return f"disk:{disk} oom:backward:{random.randint(1, quiet.counts['backward'])}"
    is_last_spared = kind in ("torn", "rot")  # no run resumes from the last checkpoint
    save = random.randint(1, quiet.counts["checkpoints"] - is_last_spared)
    file = random.choice(TORN_FILES) if kind == "torn" else ""
    return f"{fault}:{save}" + (f":{file}" if file else "")


def run(
    case: Case, quiet: Mapping[str, Undisturbed], place: pathlib.Path, method: str = "", more: Sequence[str] = ()
) -> tuple[Row, Ended]:
    """Runs one case, with the plan of the undisturbed run. ``method``: the method, if the case's kind is not a method.
    ``more``: further flags."""
    losses = quiet[case.kind].losses
    argv = [method or case.kind, "--plan", f"runs/undisturbed-{case.kind}", "--simulate", "--no_probe", *more]
    name = f"{case.fault}-{case.kind}-{case.number:02}".replace(":", "-").replace(" ", "-")
    if case.fault in FROM_OUTSIDE:
        row, ended = _from_outside(case, argv, place, name, losses)
    else:
        module = "survival_cases.full_disk" if case.fault == "disk" else AUTOFIT
        ended = autofit(argv, place, name, {VARIABLE: case.mishap}, module=module)
        marks = ended.folder / MARKS_NAME
        came = marks.is_file() and bool(marks.read_text().strip())  # a run may end before the drawn allocation
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
    """Starts a run and then a second one in its folder: at a step, while the first is stopped, or at once for step 0.

    Returns the run that trained, and the one that should have been refused.
    """
    others: list[Ended] = []

    def intrude(running: Running) -> None:
        is_held = step > 0 and running.reaches(step)
        if is_held:
            running.process.send_signal(signal.SIGSTOP)  # else it could finish before the second run starts
        others.append(autofit([*argv, *words], place, f"{run}-second", {}, folder=place / "runs" / run))
        if is_held:
            running.process.send_signal(signal.SIGCONT)

    first = autofit(argv, place, run, {}, meanwhile=intrude)
    (second,) = others
    return (second, first) if second.finished and not first.finished else (first, second)


def hang_up(
    argv: Sequence[str], place: pathlib.Path, run: str, *, step: int, number: signal.Signals
) -> tuple[Ended, Ended]:
    """Sends a signal to a run after a step, and resumes the run; returns both."""

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
        # Errors of a plan have smaller codes: such a run met no fault.
        is_of_training = ended.is_reported and (ended.code or 0) >= TrainingError.exit_code
        return {"outcome": "reported" if is_of_training else "lost", "error": ended.error[:2000], **row}
    if any(OTHER_SAMPLES in incident["remedy"] for incident in ended.experience.get("incidents", ())):
        return {"outcome": "other samples", **row}
    found, run = ended.losses(), (ended.told or {}).get("run", {})
    if run.get("last_loss") is not None:  # a full disk may have prevented the checkpoint of the last step
        found.setdefault(run["steps"], run["last_loss"])
    if not (set(found) <= set(losses) and max(found, default=0) == max(losses)):
        return {"outcome": "steps differ", "steps": sorted(found), **row}
    apart = [abs(found[step] - loss) / max(abs(loss), LEAST_LOSS) for step, loss in losses.items() if step in found]
    outcome = "survived" if all(each <= TOLERANCE for each in apart) else "losses differ"
    return {"outcome": outcome if came else "never came", "apart": max(apart, default=0.0), **row}


def table(rows: Mapping[str, Row], named: Iterable[str] = FAULTS) -> list[str]:
    head = ("fault", "moments", "survived", "reported", "other outcomes", "caught", "restarts", "loss error")
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
    """Returns whether a run was lost, or trained something else."""
    return any(row["outcome"] not in ACCEPTED for row in rows.values())
