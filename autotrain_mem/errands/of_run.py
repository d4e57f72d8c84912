"""Makes the errands of a run that has ended: to chat with its model, to merge its adapter, to push it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from autotrain_mem.errands.errand import Errand, Task
from autotrain_mem.errands.trained_run import TrainedRun
from autotrain_mem.support.errors import ModelNotFoundError, OutputFolderError, UsageError

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def errand_of(run: TrainedRun, task: Task, *, base: str | None = None, trust_remote_code: bool = False) -> Errand:
    """Say what any job with a run's model has to know.

    Args:
        base: Where the base model is now; None for where it was when the adapter was trained.

    Raises:
        UsageError: a base is named, and the run has none.
        ModelNotFoundError: the base was a folder, which is not there any more.
    """
    if base is not None and not run.is_adapter:
        raise UsageError(f"{run.folder} holds the whole model: it needs no base.", hint="Remove --base.")
    return Errand(
        task=task,
        folder=str(run.folder),
        base=_base(run, base) if run.is_adapter else None,
        revision=None if base is not None else run.revision,
        gives_score=run.method.has_score_head,
        base_bits=run.base_bits,
        trust_remote_code=trust_remote_code,
    )


def _base(run: TrainedRun, named: str | None) -> str:
    base = named or run.base
    looks_local = base.startswith((".", "/", "~")) or base.count("/") != 1
    if looks_local and not Path(base).expanduser().is_dir():
        raise ModelNotFoundError(
            f"The adapter in {run.folder} belongs to the model {base}, and there is no such folder.",
            hint="Give --base the folder or the hub id where that model is now.",
        )
    return str(Path(base).expanduser()) if looks_local else base


def merge_errand(run: TrainedRun, errand: Errand, out: str | None) -> Errand:
    """Check where the merged model is to go; beside the run, with ``-merged`` behind its name, by default.

    Raises:
        UsageError: there is nothing to merge.
        OutputFolderError: the folder is there, or the one that it is to be in is not.
    """
    if not run.is_adapter:
        raise UsageError(
            f"{run.folder} holds the whole model: all of its weights were trained, so there is nothing to merge.",
            hint=f'Use it as it is: AutoModelForCausalLM.from_pretrained("{run.folder}"), or autofit push {run.folder}',
        )
    folder = run.folder.resolve()
    target = Path(out).expanduser() if out else folder.with_name(f"{folder.name}-merged")
    if target.exists():
        raise OutputFolderError(f"{target} exists, and is not written over.", hint="Give --out a new folder.")
    if not target.absolute().parent.is_dir():
        raise OutputFolderError(
            f"There is no folder {target.absolute().parent} to write to.", hint="Make it, or give --out another."
        )
    return replace(errand, to=str(target))


def quantized_note(errand: Errand) -> str | None:
    """Say what it means that an adapter was trained on a quantized base; None where it was not."""
    if errand.base is None or errand.base_bits is None:
        return None
    return (
        f"the adapter was trained on the base in {errand.base_bits} bits, and is laid over its full weights here: "
        "these differ a little from what it has learned beside, so compare an answer or two"
    )


def check_repository(name: str) -> None:
    """Raises UsageError where it is not the name of a repository on the hub."""
    if not _REPOSITORY.fullmatch(name):
        raise UsageError(f"--to {name!r} is no repository's name.", hint="--to ORG/NAME, or --to USER/NAME")
