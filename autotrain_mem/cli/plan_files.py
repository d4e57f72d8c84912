"""Handles plan files (``--out``, ``--plan``); and ``--dry_run`` and ``--export``, which print instead of training."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotrain_mem import api
from autotrain_mem.cli.flags import Output
from autotrain_mem.exports.draft import draft_of
from autotrain_mem.exports.tools import OF_MACHINES, check, export
from autotrain_mem.exports.trl import dry_run
from autotrain_mem.report.first_screen import first_screen
from autotrain_mem.report.formatting import job_command
from autotrain_mem.report.terminal import Console, warn
from autotrain_mem.settings.knobs import LAUNCHED, ZEROS
from autotrain_mem.support import codec
from autotrain_mem.support.errors import OutputFolderError, PlanFileError, UsageError
from autotrain_mem.types import AutoFit, Job, Plan
from autotrain_mem.types.plan_file import STDIN, check_place
from autotrain_mem.types.planned import as_recorded, save_plan

OUT = "--out a file"

HINTS = api.PlanHints(
    other_method="autofit {made_for} --plan {plan}  trains with it;\n"
    "autofit plan {method} --model {model} --gpu NAME --out FILE  makes one for {method}.",
    objects='Use it in Python: AutoFit(plan="{plan}"). To use it here, give --model and --dataset.',
)


def check_files(request: api.RunRequest, output: Output) -> None:
    """Checks that the plan files can be read and written, before minutes of planning.

    Raises:
        PlanFileError: ``--out`` names a file that is not a plan.
        OutputFolderError: ``--out`` names a file that cannot be written.
        UsageError: one plan for several cards, or ``-`` as the file.
    """
    plan, out = request.autofit.plan, output.out
    given = "--plan" if plan is not None else "--out" if out is not None else ""
    if given:
        check_one_card(f"{given} is about", request)
    if out == STDIN:
        raise UsageError("--out takes a file, not -.", hint="--json prints the plan on standard output.")
    if plan == STDIN:
        raise UsageError(
            "--plan takes a file, not -.",
            hint="Save the plan to a file and give that file; autofit explain - shows a plan from standard input.",
        )
    if out is not None:
        check_place(out, OUT)


def check_one_card(what_is: str, request: api.RunRequest) -> None:
    """Raises UsageError if the request names several cards. ``what_is`` begins the message: ``--out is about``."""
    if api.compared(request.autofit):
        counts = request.autofit.gpu_counts
        many = f" --gpus {','.join(map(str, counts))}" if len(counts) > 1 else ""
        raise UsageError(
            f"{what_is} one plan, and --gpu {request.autofit.gpu}{many} names several cards.",
            hint="Give --gpu one card (autofit gpus lists them), and --gpus one number.",
        )


def write(plan: Plan, out: str) -> None:
    """Writes the plan, and prints on stderr how to train with it."""
    file = str(save_plan(out, plan, place=OUT))
    line = f"Wrote the plan to {file}: autofit {plan.method} --plan {shlex.quote(file)} trains with it."
    Console(stderr=True).print(line, soft_wrap=True, highlight=False)


def refresh(out: str, run: str) -> None:
    """Replaces a plan written before training by the run's own plan, which a probe may have changed and measured."""
    try:
        save_plan(out, Plan.load(run), place=OUT)
    except (PlanFileError, OutputFolderError) as error:  # the training itself has succeeded
        warn(f"{out} holds the plan as it was before the training: {error.message}")


def command(job: Job, autofit: AutoFit, *, out: str) -> str:
    """Returns the whole command that makes the plan again: ``autofit plan sft --model tiny --gpu l4 ...``."""
    ours: dict[str, Any] = {
        "gpu": autofit.gpu or "NAME",
        "gpus": autofit.gpus,
        "nodes": autofit.nodes,
        "link": autofit.link,
        "within": autofit.within,
        "budget": autofit.budget,
        "prices": None if autofit.prices is None else str(autofit.prices),
        "out": out,
    }
    own, unsaid = autofit.accelerate_config, ["dp_replicate_size"]
    if isinstance(own, str | Path):
        ours |= {"accelerate_config": str(own), "gpus": None, "nodes": None}
        unsaid += LAUNCHED
    return job_command(job, ours, unsaid)


def check_export(request: api.RunRequest, output: Output) -> None:
    """Checks that the file of ``--export`` or ``--dry_run`` can be written, before minutes of planning.

    Raises UsageError if the tool lacks the method, if several cards are given, or if two outputs go to stdout.
    """
    if not output.stops:
        return
    asked = "--dry_run" if output.export is None else f"--export {output.export}"
    check_one_card(f"{asked} writes", request)
    if output.export is None:
        return
    if output.dry_run:
        raise UsageError(
            f"{asked} and --dry_run exclude each other: stdout can hold only one of them.",
            hint="--export prints the plan for another tool and --dry_run what would run here; neither trains.",
        )
    if output.json:
        raise UsageError(
            f"{asked} and --json exclude each other: stdout can hold only one of them.",
            hint="--dry_run --json prints TRL's config, the command and the environment as one object.",
        )
    autofit = request.autofit
    check(
        output.export,
        request.method,
        is_zero=autofit.sharding in ZEROS,
        token_shards=autofit.token_shards,
        peft_config=autofit.peft_config,
    )
    if output.export not in OF_MACHINES:
        return
    # Each machine gets only flags, and some settings have no flag.
    if request.autofit.accelerate_config is not None:
        raise UsageError(
            f"{asked} writes autofit commands, which cannot carry your --accelerate_config file.",
            hint="Give --gpus, --nodes and --sharding instead;\n"
            "or --export trl and --export accelerate, which write what accelerate launch takes.",
        )
    if "datasets" in request.config:
        raise UsageError(
            f"{asked} writes flags, and only a YAML file can name a mixture of datasets.",
            hint="Mix the rows into one dataset and give that;\n"
            "or --export trl, which writes a file that autofit METHOD --config takes.",
        )


def write_export(rehearsals: api.Rehearsals, chosen: Plan, request: api.RunRequest, output: Output) -> int:
    """Prints the file on stdout, and the plan on stderr. The file also holds the defaults of TRL and PEFT that the job
    uses, since other tools have other defaults."""
    Console(stderr=True).print(first_screen(chosen))
    job = rehearsals.job
    defaults: dict[str, Any] = {"output_dir": api.output_dir(job)}
    if chosen.knobs.use_peft and not chosen.knobs.lora_target_parameters:
        if (targets := rehearsals.describe().lora_targets) is None or isinstance(targets, str):
            defaults["lora_target_modules"] = [targets or "all-linear"]
        else:  # TRL reads a single name as a regular expression for the whole name
            defaults["lora_target_modules"] = [rf".*\.{targets[0]}"] if len(targets) == 1 else list(targets)
    given = {name: value for name, value in job.arguments.items() if value is not None}
    job = replace(job, arguments={**defaults, **given})
    if chosen.knobs.is_sharded and job.accelerate is None:
        layers = rehearsals.workers.first.layers_to_name(rehearsals.job)
        job = replace(job, accelerate=draft_of(chosen, job).launched(layers))
    if output.export is not None:
        sys.stdout.write(export(output.export, chosen, job))
        return 0
    public = replace(rehearsals, job=as_recorded(job))
    shown = dry_run(chosen, job, api.training_environment(public, chosen, simulate=request.simulate))
    sys.stdout.write(json.dumps(codec.to_json(shown), indent=2) + "\n" if output.json else shown.to_text())
    return 0
