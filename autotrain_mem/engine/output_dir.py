"""The output folder of a run: where it is, whether it may be written, and how to go on with what is in it."""

from __future__ import annotations

import pathlib

from autotrain_mem.errors import ModelNotFoundError, UsageError
from autotrain_mem.spec import Job
from autotrain_mem.training import launch

RESUME = "resume_from_checkpoint"


def output_dir(job: Job) -> str:
    """Returns the folder of the run: as given, or named after the model and the method as TRL names it."""
    return str(job.arguments.get("output_dir") or default_dir(job.method, job.model))


def default_dir(method: str, model: str) -> str:
    """``tiny-SFT`` for ``models/tiny`` and ``sft``."""
    name = model.rstrip("/").split("/")[-1]
    return f"{name}-{method.upper()}"


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
            f"--overwrite_output_dir moves a run away, and --{RESUME} goes on with it.", hint="Remove one of them."
        )
    folder = pathlib.Path(output_dir(job)).absolute()
    for name in filter(None, (job.model, job.dataset)):
        path = pathlib.Path(name).absolute()
        if path.exists() and folder in (path, *path.parents):
            raise UsageError(
                f"--overwrite_output_dir would move {name} away, which the training reads.",
                hint="Give another --output_dir.",
            )


def how_to_resume(folder: pathlib.Path) -> str:
    """After an interrupt."""
    if any(folder.glob("checkpoint-*")):
        return f"Its checkpoint is in {folder}; resume with --{RESUME}."
    return "There is no checkpoint to resume from: --save_steps says how often one is written."


def check_weights(model: pathlib.Path) -> None:
    """A folder is planned for by its config alone, but trained with its weights; a hub id is not looked up here."""
    if model.is_dir() and not any(next(model.glob(kind), None) for kind in ("*.safetensors", "*.bin")):
        raise ModelNotFoundError(
            f"{model} holds no weights (*.safetensors or *.bin), so there is nothing to train.",
            hint="--plan_only plans with the config alone. To train, give a folder made by save_pretrained.",
        )
