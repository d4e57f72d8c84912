"""Finds a run's output folder, and checks that the run overwrites nothing that it reads."""

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping

from autotrain_mem.support.errors import ModelNotFoundError, OutputFolderError, UsageError
from autotrain_mem.types import Job
from autotrain_mem.types.methods_table import OTHER_MODEL_ARGUMENTS

RESUME = "resume_from_checkpoint"


def output_dir(job: Job) -> str:
    """Returns the folder of the run: the given one, or TRL's default name from model and method."""
    return str(job.arguments.get("output_dir") or default_dir(job.method, job.model))


def default_dir(method: str, model: str) -> str:
    """Returns TRL's default name: ``tiny-SFT`` for ``models/tiny`` and ``sft``."""
    return f"{model.rstrip('/').split('/')[-1]}-{method.upper()}"


def resumes(job: Job) -> bool:
    """Returns whether the run continues an earlier one."""
    return bool(job.arguments.get(RESUME))


def resumes_in_folder(job: Job) -> bool:
    """Returns whether the run continues from its own output folder, not from a checkpoint elsewhere."""
    if not (request := job.arguments.get(RESUME)) or request is True:
        return bool(request)
    return pathlib.Path(str(request)).resolve().parent == pathlib.Path(output_dir(job)).resolve()


def check_output(job: Job, *, overwrite: bool) -> None:
    """Rejects an output folder that is, contains or is inside a folder that the training reads.

    A model that is saved there would replace the one that is read, and the datasets library reads all files in a
    folder. The folder of a data file is allowed. Raises OutputFolderError if the folders overlap, and UsageError if
    ``--overwrite_output_dir`` would move away data, or the run to resume."""
    if overwrite and resumes_in_folder(job):
        raise UsageError(
            f"--overwrite_output_dir moves a run away, and --{RESUME} continues it.", hint="Remove one of them."
        )
    given, folder = output_dir(job), pathlib.Path(output_dir(job)).resolve()
    if not given.isprintable():
        hint = "Give --output_dir a name of printable characters: TRL writes it into README.md, for terminals to read."
        raise OutputFolderError(f"The name of the output folder {given} has control characters.", hint=hint)
    models = (job.model, *map(job.arguments.get, OTHER_MODEL_ARGUMENTS))
    read = [*(("model", name) for name in models if name), *(("dataset", name) for name in _datasets(job))]
    for kind, name in read:
        path = pathlib.Path(str(name)).resolve()
        is_inside, holds = (path.is_dir() and _lies_in(*pair) for pair in ((folder, path), (path, folder)))
        if is_inside or holds:
            relation = "is" if is_inside and holds else "lies in" if is_inside else "holds"
            raise OutputFolderError(
                f"The output folder {given} {relation} the {kind}'s folder, {name}, which the training reads.",
                hint="Give another --output_dir, beside that folder: what is saved could replace what is read.",
            )
    if _lies_in(folder, hub_cache()):
        raise OutputFolderError(
            f"The output folder {given} is in the cache of the Hugging Face Hub, {hub_cache()}.",
            hint="Give another --output_dir: what is saved could replace what was downloaded.",
        )
    for name in (*_datasets(job), hub_cache()) if overwrite else ():
        path = pathlib.Path(str(name)).resolve()
        if path.exists() and _lies_in(path, folder):
            raise UsageError(
                f"--overwrite_output_dir would move {name} away, which the training reads.",
                hint="Give another --output_dir.",
            )


def check_saves_over_no_model(output_dir: str, models: Iterable[str]) -> None:
    """Raises OutputFolderError if saving would replace one of these models, or a run with one of them as checkpoint."""
    folder = pathlib.Path(output_dir).resolve()
    for name in filter(None, models):
        path = pathlib.Path(name).resolve()
        saved_to = path.parent if path.name.startswith("checkpoint-") else path
        if path.is_dir() and any(_lies_in(folder, each) and _lies_in(each, folder) for each in (path, saved_to)):
            raise OutputFolderError(
                f"What is saved to the output folder {output_dir} would replace the model in {name}.",
                hint="Give another --output_dir.",
            )


def _datasets(job: Job) -> Iterator[str]:
    """Yields all files and folders of the data, also of a mixture (``trl/scripts/utils.py: DatasetConfig``)."""
    yield from filter(None, (job.dataset, job.arguments.get("dataset_name")))
    for part in job.arguments.get("datasets") or ():
        if isinstance(part, Mapping):
            files = part.get("data_files") or ()
            files = files.values() if isinstance(files, Mapping) else [files] if isinstance(files, str) else files
            named = (part.get("path"), part.get("data_dir"), *files)
            yield from (name for name in named if isinstance(name, str))


def _lies_in(inner: pathlib.Path, outer: pathlib.Path) -> bool:
    """Returns whether ``inner`` is ``outer`` or inside it, by inode, since a folder may be mounted under two names."""
    return outer.exists() and any(each.exists() and each.samefile(outer) for each in (inner, *inner.parents))


def hub_cache() -> pathlib.Path:
    """Returns the folder of models from the hub (``huggingface_hub/constants.py: HF_HUB_CACHE``)."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(variable):
            return pathlib.Path(os.path.expandvars(named)).expanduser()
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return pathlib.Path(os.path.expandvars(home)).expanduser() / "hub"


def how_to_resume(folder: pathlib.Path) -> str:
    """Returns the hint that explains how to resume after an interrupt."""
    if any(folder.glob("checkpoint-*")):
        return f"Its checkpoint is in {folder}; resume with --{RESUME}."
    return "There is no checkpoint to resume from: --save_steps sets how often one is written."


def check_weights(model: pathlib.Path) -> None:
    """Raises ModelNotFoundError if a model's folder holds no weights."""
    if model.is_dir() and not any(next(model.glob(kind), None) for kind in ("*.safetensors", "*model*.bin")):
        raise ModelNotFoundError(
            f"{model} holds no weights (*.safetensors or *.bin), so there is nothing to train.",
            hint="--plan_only plans with the config alone. To train, give a folder made by save_pretrained.",
        )
