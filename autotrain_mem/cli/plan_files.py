"""``--out FILE`` and ``--plan FILE``: a plan written for later, and one followed in place of a search."""

from __future__ import annotations

import shlex
from pathlib import Path

from autotrain_mem import api
from autotrain_mem.cli.flags import Output
from autotrain_mem.report.command_line import command_line
from autotrain_mem.report.terminal import Console
from autotrain_mem.support.errors import OutputFolderError, PlanFileError, UsageError
from autotrain_mem.types import Job, Plan
from autotrain_mem.types.adapter_config import without_said
from autotrain_mem.types.autofit import AutoFit
from autotrain_mem.types.job import MAX_SLOWDOWN
from autotrain_mem.types.knobs import LAUNCH_KNOBS
from autotrain_mem.types.plan import save_plan
from autotrain_mem.types.plan_file import STDIN, check_place

OUT = "--out a file"

HINTS = api.PlanHints(
    other_method="autofit {made_for} --plan {plan}  trains with it;\n"
    "autofit plan {method} --model {model} --gpu NAME --out FILE  makes one for {method}.",
    objects='Follow it there: AutoFit(plan="{plan}"). To follow it here, name --model and --dataset.',
)


def check_files(wish: api.Wish, output: Output) -> None:
    """Refuse before minutes of planning what cannot be read or written.

    Raises:
        PlanFileError: ``--out`` names a file that is no plan.
        OutputFolderError: ``--out`` names a file that cannot be written.
        UsageError: one plan for many cards; ``-``.
    """
    plan, out = wish.autofit.plan, output.out
    given = "--plan" if plan is not None else "--out" if out is not None else ""
    if given:
        check_one_card(f"{given} is about", wish)
    if out == STDIN:
        raise UsageError("--out takes a file, and - is none.", hint="--json prints the plan on standard output.")
    if plan == STDIN:
        raise UsageError(
            "--plan takes a file, and - is none.",
            hint="Write standard input to a file and name that; autofit explain - tells what a plan there holds.",
        )
    if out is not None:
        check_place(out, OUT)


def check_one_card(what_is: str, wish: api.Wish) -> None:
    """Refuses many cards for what is of one plan. Raises UsageError, which begins ``--out is about``."""
    if api.compared(wish.autofit):
        counts = wish.autofit.gpu_counts
        many = f" --gpus {','.join(map(str, counts))}" if len(counts) > 1 else ""
        raise UsageError(
            f"{what_is} one plan, and --gpu {wish.autofit.gpu}{many} asks for many.",
            hint="Give --gpu one card (autofit gpus), and --gpus one number.",
        )


def write(plan: Plan, out: str) -> None:
    """Write it, and say on stderr what can be done with it."""
    file = str(save_plan(out, plan, place=OUT))
    line = f"Wrote the plan to {file}: autofit {plan.method} --plan {shlex.quote(file)} trains with it."
    Console(stderr=True).print(line, soft_wrap=True, highlight=False)


def refresh(out: str, run: str) -> None:
    """Replaces a plan written before a training by the run's own, which a probe may have moved and has measured."""
    try:
        save_plan(out, Plan.load(run), place=OUT)
    except (PlanFileError, OutputFolderError) as error:  # the training is done all the same
        message = f"note: {out} holds the plan as it was before the training: {error.message}"
        Console(stderr=True).print(message, style="dim", highlight=False, markup=False)


# -- the command that plans again ----------------------------------------------------------------------------------


def command(job: Job, autofit: AutoFit, *, out: str) -> str:
    """``autofit plan sft --model tiny --lora_r 8 --gpu l4 --out plan.json``: all that the job is made of."""
    ours = {
        "model": job.model,
        "dataset": job.dataset,
        "gpu": autofit.gpu or "NAME",
        "gpus": autofit.gpus,
        "nodes": autofit.nodes,
        "link": autofit.link,
        "effective_batch_size": job.effective_batch_size,
        "prompt_length": job.prompt_length,
        "image_sizes": ",".join(job.images) or None,
        "fit": None if job.fit == "all" else job.fit,
        "forbid": ",".join(sorted(job.forbid)) or None,
        "within": autofit.within,
        "budget": autofit.budget,
        "prices": None if autofit.prices is None else str(autofit.prices),
        "max_slowdown": None if job.max_slowdown == MAX_SLOWDOWN else job.max_slowdown,
    }
    own, unsaid = autofit.accelerate_config, ["model_name_or_path", "dp_replicate_size"]
    if isinstance(own, str | Path):
        ours |= {"accelerate_config": str(own), "gpus": None, "nodes": None}
        unsaid += LAUNCH_KNOBS
    given = {name: value for name, value in ours.items() if value is not None}
    trls = {name: value for name, value in without_said(job.arguments).items() if name not in unsaid}
    return command_line(["plan", job.method], given | trls | {"out": out})
