"""``--dry_run`` and ``--export TOOL``: the plan as a file on stdout, in place of training with it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from autotrain_mem import api
from autotrain_mem.cli.flags import Output
from autotrain_mem.cli.plan_files import check_one_card
from autotrain_mem.exports.case import case_of
from autotrain_mem.exports.dry_run import dry_run
from autotrain_mem.exports.tools import OF_MACHINES, check_adapter, check_method, check_sharding, export
from autotrain_mem.report.first_screen import first_screen
from autotrain_mem.report.terminal import Console
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Job, Plan, codec
from autotrain_mem.types.knobs import ZEROS
from autotrain_mem.types.plan import as_recorded


def check(wish: api.Wish, output: Output) -> None:
    """Refuse before minutes of planning what no file can be written for.

    Raises:
        UsageError: a method that the tool does not have; many cards; two things for stdout.
    """
    if not output.stops:
        return
    asked = "--dry_run" if output.export is None else f"--export {output.export}"
    check_one_card(f"{asked} writes", wish)
    if output.export is None:
        return
    if output.dry_run:
        raise UsageError(
            f"{asked} and --dry_run exclude each other: stdout holds one of them.",
            hint="--export prints the plan for another tool and --dry_run what would run here; neither trains.",
        )
    if output.json:
        raise UsageError(
            f"{asked} and --json exclude each other: stdout holds one of them.",
            hint="--dry_run --json prints TRL's config, the command and the environment as one object.",
        )
    check_method(output.export, wish.method)
    shared = max(wish.autofit.cp_size or 1, wish.autofit.sp_size or 1)
    check_sharding(output.export, is_zero=wish.autofit.sharding in ZEROS, token_shards=shared)
    check_adapter(output.export, wish.autofit.peft_config)
    if output.export in OF_MACHINES:
        _check_flags_say_all(asked, wish)


def _check_flags_say_all(asked: str, wish: api.Wish) -> None:
    """Refuses what no flag can say, where flags are all that a machine is told."""
    if wish.autofit.accelerate_config is not None:
        raise UsageError(
            f"{asked} writes commands of autofit's own, and --accelerate_config is a file of yours.",
            hint="Give --gpus, --nodes and --sharding in its place;\n"
            "or --export trl and --export accelerate write what accelerate launch takes.",
        )
    if "datasets" in wish.config:
        raise UsageError(
            f"{asked} writes flags, and a mixture of datasets stands in a YAML file only.",
            hint="Mix the rows into one dataset and name that;\n"
            "or --export trl writes a file that autofit METHOD --config takes.",
        )


def write(rehearsals: api.Rehearsals, chosen: Plan, wish: api.Wish, output: Output) -> int:
    """Print the file, with the plan beside it on stderr."""
    Console(stderr=True).print(first_screen(chosen))
    job = _spelled_out(rehearsals, chosen)
    if output.export is not None:
        sys.stdout.write(export(output.export, chosen, job))
        return 0
    public = replace(rehearsals, job=as_recorded(job))
    shown = dry_run(chosen, job, api.training_environment(public, chosen, simulate=wish.simulate))
    sys.stdout.write(json.dumps(codec.to_json(shown), indent=2) + "\n" if output.json else shown.to_text())
    return 0


def _spelled_out(rehearsals: api.Rehearsals, chosen: Plan) -> Job:
    """The job with what TRL and PEFT would choose by themselves, and other tools otherwise."""
    job = rehearsals.job
    defaults: dict[str, Any] = {"output_dir": api.output_dir(job)}
    if chosen.knobs.use_peft and not job.arguments.get("lora_target_parameters"):
        defaults["lora_target_modules"] = _named(rehearsals.describe().lora_targets)
    given = {name: value for name, value in job.arguments.items() if value is not None}
    spelled_out = replace(job, arguments={**defaults, **given})
    if not chosen.knobs.is_sharded or job.accelerate is not None:
        return spelled_out
    layers = rehearsals.workers.first.layers_to_name(job)
    return replace(spelled_out, accelerate=case_of(chosen, spelled_out).launched(layers))


def _named(targets: str | tuple[str, ...] | None) -> list[str]:
    """Writes names as a flag takes them, which makes a regular expression for whole names of a single one."""
    if targets is None or isinstance(targets, str):
        return [targets or "all-linear"]
    return [rf".*\.{targets[0]}"] if len(targets) == 1 else list(targets)
