"""The output folder of a run: where it is, whether it may be written, and what to do about another run in it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from autotrain_mem.errors import PlanFileError, UsageError
from autotrain_mem.spec import Job, Plan
from autotrain_mem.training import launch

RESUME = "resume_from_checkpoint"


def output_dir(job: Job) -> str:
    """Where the run goes: as given, or named after the model and the method as TRL names it."""
    return str(job.arguments.get("output_dir") or default_dir(job.method, job.model))


def default_dir(method: str, model: str) -> str:
    """``tiny-SFT`` for ``models/tiny`` and ``sft``."""
    name = model.rstrip("/").split("/")[-1]
    return f"{name}-{method.upper()}"


def plan_of_own_run(folder: str) -> Plan | None:
    """What the run that is in an output folder went by; None where there is none, or a version of old wrote it."""
    try:
        return Plan.load(folder)
    except PlanFileError:
        return None


def own_plan(method: str, model: str, arguments: Mapping[str, Any]) -> Plan | None:
    """The same for a job in words; None for one that goes on with no run, too. Raises UsageError for another method."""
    if not arguments.get(RESUME):
        return None
    made = plan_of_own_run(str(arguments.get("output_dir") or default_dir(method, model)))
    if made is not None and made.method != method:
        raise UsageError(
            f"The run in the output folder is one of {made.method}, not of {method}.",
            hint=f"Go on with {made.method}, or give another output_dir.",
        )
    return made


def resumes(job: Job) -> bool:
    """Whether it goes on with the run that is in the folder."""
    return bool(job.arguments.get(RESUME))


def check_output(job: Job, *, overwrite: bool) -> None:
    """Fail before minutes of planning, not after.

    Raises:
        OutputFolderError: the folder cannot be written, or holds a run.
        UsageError: the run in it is to be moved away, and read from.
    """
    launch.check_folder(output_dir(job), resuming=resumes(job) or overwrite)
    if not overwrite:
        return
    if resumes(job):
        raise UsageError(
            f"--overwrite_output_dir moves a run away, and --{RESUME} goes on with it.", hint="Leave one of them away."
        )
    folder = pathlib.Path(output_dir(job)).absolute()
    for name in filter(None, (job.model, job.dataset)):
        path = pathlib.Path(name).absolute()
        if path.exists() and folder in (path, *path.parents):
            raise UsageError(
                f"--overwrite_output_dir would move {name} away, which the training reads.",
                hint="Give another --output_dir.",
            )


def move_aside(job: Job) -> pathlib.Path | None:
    """Another run's folder gets another name; None where there is none. Raises OutputFolderError."""
    return launch.move_aside(output_dir(job))


def how_to_go_on(folder: pathlib.Path) -> str:
    """After an interrupt."""
    if any(folder.glob("checkpoint-*")):
        return f"Its checkpoint is in {folder}; go on with --{RESUME}."
    return "There is no checkpoint to go on from: --save_steps says how often one is written."
