"""``--out FILE`` and ``--plan FILE``: a plan written for later, and one followed in place of a search."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from autotrain_mem import api
from autotrain_mem.cli import flags
from autotrain_mem.errors import UsageError
from autotrain_mem.report.progress import SearchProgress
from autotrain_mem.spec import Job, Plan
from autotrain_mem.spec.job import MAX_SLOWDOWN
from autotrain_mem.spec.knobs import OWN_KNOBS
from autotrain_mem.spec.plan_file import STDIN, check_place, load_plan, save_plan

OUT = "--out a file"
RESUME = "resume_from_checkpoint"

_MODEL_NAMES = ("model", "model_name_or_path")
_DATASET_NAMES = ("dataset", "dataset_name", "datasets")
"""What names the same: ours, and TRL's own."""


def read(own: flags.Own, method: str) -> Plan | None:
    """The plan to follow; None where none is given. Looks at where to write one, too: now, not after minutes.

    Raises:
        PlanFileError: there is none in that file; or ``--out`` names a file that is no plan.
        OutputFolderError: ``--out`` names a file that cannot be written.
        UsageError: it is another method's, or was made of a script's objects and these are not named; one plan for many
            cards; ``-``.
    """
    if own.help:
        return None
    _check_one_card(own)
    _check_not_standard(own)
    if own.out is not None:
        check_place(own.out, OUT)
    if own.plan is None:
        return None
    plan = load_plan(own.plan)
    if plan.method != method:
        raise UsageError(
            f"{own.plan} is a plan for {plan.method}, not for {method}.",
            hint=f"autofit {plan.method} --plan {own.plan}  trains with it;\n"
            f"autofit plan {method} --model {shlex.quote(plan.model)} --gpu NAME --out FILE  makes one for {method}.",
        )
    if plan.objects is not None and not (_says(own, _MODEL_NAMES) and _says(own, _DATASET_NAMES)):
        raise UsageError(
            f"{own.plan} was made in Python, from data or a model that no file holds.",
            hint=f'Follow it there: AutoFit(plan="{own.plan}"). To follow it here, name --model and --dataset.',
        )
    return plan


def of_own_run(own: flags.Own, method: str, told: Callable[[str], None]) -> flags.Own:
    """A run that goes on follows its own plan, ``plan.json`` in its output folder, unless ``--plan`` names another.

    Args:
        told: Hears that it does.
    """
    if own.plan is not None or own.help or not _word(own, RESUME):
        return own
    model = own.model or _word(own, "model_name_or_path")
    folder = _word(own, "output_dir") or (model and api.default_dir(method, str(model)))
    if not folder or api.plan_of_own_run(str(folder)) is None:
        return own
    told(f"going on with the run in {folder}, with its plan")
    return replace(own, plan=str(folder))


def _word(own: flags.Own, name: str) -> object:
    """What the command line or the YAML file says of one of TRL's arguments; None where neither does.

    A flag without a value is one.
    """
    for token, after in zip(own.rest, (*own.rest[1:], "--"), strict=False):
        flag, equals, value = token.partition("=")
        if flag == f"--{name}":
            given = value if equals else ("true" if after.startswith("--") else after)
            return None if given.lower() == "false" else given
    return own.config.get(name)


def _check_one_card(own: flags.Own) -> None:
    given = "--plan" if own.plan is not None else "--out" if own.out is not None else ""
    if given and api.several(own.gpu or ""):
        raise UsageError(
            f"{given} is about one plan, and --gpu {own.gpu} asks for many.", hint="Give --gpu one card (autofit gpus)."
        )


def _check_not_standard(own: flags.Own) -> None:
    """A plan on stdout is said otherwise, and one on stdin is only told."""
    if own.out == STDIN:
        raise UsageError("--out takes a file, and - is none.", hint="--json prints the plan on standard output.")
    if own.plan == STDIN:
        raise UsageError(
            "--plan takes a file, and - is none.",
            hint="Write standard input to a file and name that; autofit explain - tells what a plan there holds.",
        )


def laid_over(own: flags.Own, plan: Plan | None, *, to_train: bool) -> flags.Own:
    """The words of the plan's job, and over them what is given beside it; without a plan just these.

    Args:
        to_train: On the card that is here; else on the plan's, unless ``--gpu`` names another.
    """
    if plan is None:
        return own
    job, here = plan.job, to_train and not own.simulate
    return replace(
        own.with_autofit(own.autofit.over(plan, here=here)),
        model=own.model if _says(own, _MODEL_NAMES) else job.model,
        dataset=own.dataset if _says(own, _DATASET_NAMES) else job.dataset,
        config={**job.trl_arguments, **own.config},
        environment={**job.environment, **own.environment},
    )


def _says(own: flags.Own, names: Sequence[str]) -> bool:
    """Whether one of these is given beside the plan, as a flag or in the YAML file."""
    spoken = {token.partition("=")[0].lstrip("-").replace("-", "_") for token in own.rest if token.startswith("--")}
    ours = any(getattr(own, name, None) is not None for name in names)
    return ours or not spoken.isdisjoint(names) or not own.config.keys().isdisjoint(names)


def follow(rehearsals: api.Rehearsals, plan: Plan, own: flags.Own, *, to_train: bool) -> Plan:
    """The plan as it holds here, with a live line on stderr where it must be rehearsed again."""
    again = command(rehearsals.job, gpu=own.gpu or "NAME", out=str(own.plan))
    with SearchProgress(Console(stderr=True)) as progress:
        return api.follow(
            rehearsals,
            plan,
            progress.tried,
            progress.counting,
            to_train=to_train,
            simulate=own.simulate,
            again=again,
        )


def write(plan: Plan, out: str) -> None:
    """Write it, and say on stderr what can be done with it."""
    file = str(save_plan(out, plan, place=OUT))
    said = f"Wrote the plan to {file}: autofit {plan.method} --plan {shlex.quote(file)} trains with it."
    Console(stderr=True).print(said, soft_wrap=True, highlight=False, markup=False)


# -- the command that plans again ----------------------------------------------------------------------------------


def command(job: Job, *, gpu: str, out: str) -> str:
    """``autofit plan sft --model tiny --lora_r 8 --gpu l4 --out plan.json``: all that the job is made of."""
    ours = {
        "model": job.model,
        "dataset": job.dataset,
        "effective_batch_size": job.effective_batch_size,
        "prompt_length": job.prompt_length,
        "fit": None if job.fit == "all" else job.fit,
        "forbid": ",".join(sorted(job.forbid)) or None,
        "max_slowdown": None if job.max_slowdown == MAX_SLOWDOWN else job.max_slowdown,
    }
    said = {name: value for name, value in ours.items() if value is not None}
    trls = {name: value for name, value in job.arguments.items() if name != "model_name_or_path"}
    return shlex.join(["autofit", "plan", job.method, *_flags(said | trls | {"gpu": gpu, "out": out})])


def _flags(words: Mapping[str, Any]) -> Iterator[str]:
    for name, value in words.items():
        yield f"--{name}"
        if name in OWN_KNOBS:
            continue  # ours are switches, TRL's take true or false
        for each in value if isinstance(value, list) else [value]:
            yield each if isinstance(each, str) else "none" if each is None else json.dumps(each)
