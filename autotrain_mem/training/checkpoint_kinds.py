"""Finds the form in which a checkpoint holds model and optimizer, and which trainings can resume from it.

A training goes on with a checkpoint of its own form as the libraries do. What it reads of another form is in
``training.process.resharding``; what it cannot is refused here, before anything starts. ZeRO's is DeepSpeed's alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotrain_mem.settings.optimizer_verdicts import PARAMETER_SHAPED
from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.training.checkpoints import is_deepspeeds, is_in_shards, processes_of
from autotrain_mem.types import Knobs

Form = Literal["whole", "shards", "zero", "zero3"]
"""``whole``: files with all of the model and the optimizer (one process, DDP); ``shards``: those of
``torch.distributed.checkpoint`` (FSDP); ``zero`` and ``zero3``: DeepSpeed's, each rank's part in a file."""

_NAMES = {
    "whole": "whole (of one process, or of DDP)",
    "shards": "in FSDP's shards",
    "zero": "DeepSpeed's ZeRO-1 or 2",
    "zero3": "DeepSpeed's ZeRO-3",
}
_FAMILIES = {"zero1": "zero", "zero2": "zero", "zero3": "zero3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumer:
    """Holds how the resuming training divides the model among its processes."""

    sharding: str | None
    processes: int
    optim: str | None = None
    """None where it is not known yet."""

    @classmethod
    def of(cls, knobs: Knobs) -> Resumer:
        """The one that these settings make."""
        return cls(sharding=knobs.sharding, processes=knobs.processes, optim=knobs.optim)

    @property
    def form(self) -> Form:
        """The form of the checkpoints that it writes.

        >>> Resumer(sharding="hsdp", processes=8).form
        'shards'
        """
        if self.sharding in (None, "ddp"):
            return "whole"
        return _FAMILIES.get(str(self.sharding), "shards")  # type: ignore[return-value]


def form_of(checkpoint: Path) -> Form:
    """The form that its files have (``deepspeed/runtime/engine.py: _get_ckpt_name`` names those of ZeRO-3)."""
    if is_deepspeeds(checkpoint):
        return "zero3" if any(checkpoint.glob("global_step*/zero_pp_rank_*_model_states.pt")) else "zero"
    return "shards" if is_in_shards(checkpoint) else "whole"


def is_of_another_form(checkpoint: Path, resumer: Resumer) -> bool:
    """Returns whether the libraries would not go on with it by themselves: DeepSpeed does with as many ranks as wrote
    it alone (``deepspeed/runtime/engine.py: _load_zero_checkpoint``)."""
    form = form_of(checkpoint)
    return form != resumer.form or (form in ("zero", "zero3") and processes_of(checkpoint) != resumer.processes)


def why_not(checkpoint: Path, resumer: Resumer) -> str:
    """Returns what keeps a training from going on with a checkpoint; empty for nothing."""
    if not is_of_another_form(checkpoint, resumer):
        return ""
    name, processes = _NAMES[form_of(checkpoint)], processes_of(checkpoint)
    if is_deepspeeds(checkpoint):
        return f"it is {name} of {processes} ranks, and DeepSpeed resumes it with that stage and as many alone"
    if resumer.form in ("zero", "zero3"):
        return f"it is {name}, and DeepSpeed resumes its own alone"
    if resumer.optim is not None and resumer.optim not in PARAMETER_SHAPED:
        return f"it is {name}, and the state of {resumer.optim} cannot be divided otherwise"
    return ""


def check_form(checkpoint: Path, resumer: Resumer) -> None:
    """Refuses a checkpoint that a training cannot go on with.

    Raises:
        OutputFolderError: it is one, with the flags that go on with it as it was written.
    """
    if why := why_not(checkpoint, resumer):
        raise OutputFolderError(f"Cannot resume from {checkpoint}: {why}.", hint=as_it_was_begun(checkpoint))


def as_it_was_begun(checkpoint: Path) -> str:
    """Returns the flags that resume it as it was written, and what else there is to do."""
    form, before = form_of(checkpoint), processes_of(checkpoint)
    if form == "whole":
        return f"Go on as it was begun: --gpus {before}" + (" --sharding ddp." if before > 1 else ".")
    if form == "shards":
        return "Go on as it was begun, with any number of GPUs: --sharding fsdp2."
    stage = "zero3" if form == "zero3" else "zero1 or zero2"
    script = checkpoint / "zero_to_fp32.py"
    return (
        f"Go on as it was begun: --gpus {before} --sharding {stage}.\n"
        f"For a new run from its weights: python {script} {checkpoint} FOLDER writes them in float32."
    )
