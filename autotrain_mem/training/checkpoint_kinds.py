"""Determines the form in which a checkpoint stores model and optimizer, and which runs can resume from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from autotrain_mem.settings.optimizer_verdicts import OF_TORCH
from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.training.checkpoints import is_deepspeeds, processes_of
from autotrain_mem.types import Knobs

Form = Literal["whole", "shards", "zero", "zero3"]
"""``whole``: files with all of the model and the optimizer (one process, DDP); ``shards``: those of
``torch.distributed.checkpoint`` (FSDP); ``zero`` and ``zero3``: DeepSpeed's, one file for each rank's part."""

_NAMES = {
    "whole": "a whole checkpoint (of one process or DDP)",
    "shards": "a checkpoint in FSDP shards",
    "zero": "a DeepSpeed ZeRO-1 or ZeRO-2 checkpoint",
    "zero3": "a DeepSpeed ZeRO-3 checkpoint",
}
_FORMS: Mapping[str | None, Form] = {None: "whole", "ddp": "whole", "zero1": "zero", "zero2": "zero", "zero3": "zero3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumer:
    """Describes how the resuming run divides the model among its processes."""

    sharding: str | None
    processes: int
    optim: str | None = None
    """The value of ``--optim``; None if it is not yet decided."""

    @classmethod
    def of(cls, knobs: Knobs) -> Self:
        return cls(sharding=knobs.sharding, processes=knobs.processes, optim=knobs.optim)

    @property
    def form(self) -> Form:
        """The form of the checkpoints that this run writes.

        >>> Resumer(sharding="hsdp", processes=8).form
        'shards'
        """
        return _FORMS.get(self.sharding, "shards")


def form_of(checkpoint: Path) -> Form:
    """Returns the form of a checkpoint, by its files (ZeRO-3: ``deepspeed/runtime/engine.py: _get_ckpt_name``; FSDP:
    ``accelerate/utils/constants.py: FSDP_MODEL_NAME``)."""
    if is_deepspeeds(checkpoint):
        return "zero3" if any(checkpoint.glob("global_step*/zero_pp_rank_*_model_states.pt")) else "zero"
    return "shards" if any(path.is_dir() for path in checkpoint.glob("pytorch_model_fsdp*")) else "whole"


def is_of_another_form(checkpoint: Path, resumer: Resumer) -> bool:
    """Returns whether a checkpoint's form differs from the run's. For DeepSpeed the number of ranks must be the same,
    too (``deepspeed/runtime/engine.py: _load_zero_checkpoint``)."""
    form = form_of(checkpoint)
    return form != resumer.form or (form in ("zero", "zero3") and processes_of(checkpoint) != resumer.processes)


def why_not(checkpoint: Path, resumer: Resumer) -> str:
    """Returns why a run cannot resume from a checkpoint; empty if it can."""
    if not is_of_another_form(checkpoint, resumer):
        return ""
    name, processes = _NAMES[form_of(checkpoint)], processes_of(checkpoint)
    if is_deepspeeds(checkpoint):
        return f"it is {name} of {processes} ranks, and DeepSpeed resumes it only with that stage and as many ranks"
    if resumer.form in ("zero", "zero3"):
        return f"it is {name}, and DeepSpeed resumes only its own"
    if resumer.optim is not None and resumer.optim not in OF_TORCH:
        return f"it is {name}, and the state of {resumer.optim} cannot be resharded"
    return ""


def check_form(checkpoint: Path, resumer: Resumer) -> None:
    """Raises OutputFolderError if a run cannot resume from a checkpoint; the hint gives flags with which it can."""
    if why := why_not(checkpoint, resumer):
        raise OutputFolderError(f"Cannot resume from {checkpoint}: {why}.", hint=how_to_resume(checkpoint))


def how_to_resume(checkpoint: Path) -> str:
    """Returns :func:`check_form`'s hint: the flags to resume with, and for DeepSpeed also how to export the weights."""
    form, before = form_of(checkpoint), processes_of(checkpoint)
    if form == "whole":
        sharding = " --sharding ddp" if before > 1 else ""
        return f"Resume with the options of the first run: --gpus {before}{sharding}."
    if form == "shards":
        return "Resume it on any number of GPUs with --sharding fsdp2."
    stage = "zero3" if form == "zero3" else "zero1 or zero2"
    script = checkpoint / "zero_to_fp32.py"
    return (
        f"Resume with the options of the first run: --gpus {before} --sharding {stage}.\n"
        f"For a new run from its weights: python {script} {checkpoint} FOLDER writes them in float32."
    )
