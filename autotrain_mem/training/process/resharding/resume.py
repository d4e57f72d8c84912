"""Has a trainer go on with a checkpoint of another form, and checks that it holds what the checkpoint does.

Example: a run under DDP on 2 GPUs goes on in FSDP2's shards on 4. Scheduler, random numbers and counters are read by
transformers, as of any checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import trainer as trainer_module

from autotrain_mem.support.errors import OutputFolderError, TrainingError
from autotrain_mem.training.checkpoint_kinds import Resumer, form_of, is_of_another_form
from autotrain_mem.training.checkpoints import instead_of
from autotrain_mem.training.process.checkpointing import without_code
from autotrain_mem.training.process.resharding.names import OptimizerOrder, Weight, numbered, weights_of
from autotrain_mem.training.process.resharding.parts import TorchParts, on_host, states_of
from autotrain_mem.training.process.resharding.saved import Saved, Shards, WholeFiles
from autotrain_mem.training.process.resharding.zero_files import ZeroFiles
from autotrain_mem.training.process.resharding.zero_parts import ZeroParts
from autotrain_mem.training.task import SendEvent
from autotrain_mem.types import Knobs

Parts = TorchParts | ZeroParts


@contextmanager
def reading_other_forms(trainer: Any, checkpoint: str | None, knobs: Knobs, send: SendEvent) -> Iterator[None]:
    """Inside, ``trainer.train`` goes on with a checkpoint that is shared otherwise than the training.

    Nothing is done where it has the training's own form.
    """
    if not checkpoint or not is_of_another_form(Path(checkpoint), Resumer.of(knobs)):
        yield
        return
    order = OptimizerOrder(trainer)

    def load(*_: Any, **__: Any) -> None:
        _load(trainer, Path(checkpoint), knobs, order, send)

    def load_all(folder: str | None) -> None:
        if not knobs.zero_stage:
            load()
        _load_schedule(trainer.lr_scheduler, Path(str(folder)) / "scheduler.pt")

    patched: Any = nullcontext()
    if knobs.zero_stage:  # before the schedule (``transformers/trainer.py: _prepare_for_training``)
        patched = patch.object(trainer_module, "deepspeed_load_checkpoint", load)
    else:
        trainer._load_from_checkpoint = lambda *_, **__: None
    trainer._load_optimizer_and_scheduler = load_all
    with patched:
        yield


@contextmanager
def opened(checkpoint: Path) -> Iterator[Saved]:
    """Open a checkpoint of whatever form.

    Raises:
        OutputFolderError: a file cannot be read, or asks for code.
    """
    form = form_of(checkpoint)
    with without_code(checkpoint), ExitStack() as close:
        try:
            other: Any = Shards if form == "shards" else ZeroFiles
            saved: Saved = WholeFiles(checkpoint, close) if form == "whole" else other(checkpoint)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ImportError) as error:
            raise OutputFolderError(
                f"Cannot resume from {checkpoint}, whose files are not as they should be: {type(error).__name__}: "
                f"{' '.join(str(error).split())}",
                hint=instead_of(checkpoint),
            ) from error
        yield saved


def _load(trainer: Any, checkpoint: Path, knobs: Knobs, order: OptimizerOrder, send: SendEvent) -> None:
    parts: Parts = (
        ZeroParts(trainer) if knobs.zero_stage else TorchParts(trainer, state_on_host=knobs.optimizer_offload)
    )
    with opened(checkpoint) as saved:
        weights = weights_of(trainer.model, saved)
        _check_trained(trainer.model, weights)
        for weight in weights:
            parts.put_weight(weight, saved)
        parts.put_states(order, numbered(order, saved), saved)
        # Wrong weights would train on without a word.
        numbers = list(numbered(order, saved).items())
        sample = dict([numbers[0], numbers[len(numbers) // 2], numbers[-1]])
        steps = {float(state["step"]) for _, state in states_of(saved, sample) if "step" in state}
        now = {*parts.steps()}
        problems = [
            f"{weight.name} is not as it was saved" for weight in _sample(weights) if _differs(weight, saved, parts)
        ]
        if saved.states() and parts.states() != len(order.names):
            problems.append(f"{parts.states()} of {len(order.names)} parameters have optimizer state")
        if len(steps) > 1 or now != steps:
            problems.append(f"the optimizer has made {sorted(now)} steps, and {sorted(steps)} were saved")
        if problems:
            raise TrainingError(
                f"The checkpoint was not taken over as it is: {'; '.join(problems)}.",
                hint="Resume as the run was begun, with the same --gpus and --sharding.",
            )
        if not knobs.zero_stage and (rounding := _rounding(weights, saved)):  # ZeRO has float32 beside them
            send({"event": "note", "message": rounding})


def _load_schedule(scheduler: Any, file: Path) -> None:
    """Take over a schedule; what it has of each group is the same for all, so that DeepSpeed may have left some out.

    Raises:
        TrainingError: the groups have schedules of their own, and are other groups.
    """
    state = torch.load(file, map_location="cpu", weights_only=True)
    groups = len(scheduler.optimizer.param_groups)
    for name, values in state.items():
        if isinstance(values, list) and len(values) != groups:
            if any(value != values[0] for value in values):
                raise TrainingError(
                    f"The schedule in {file} has {name} {values}, and the optimizer has {groups} groups here.",
                    hint="Resume as the run was begun.",
                )
            state[name] = values[:1] * groups
    scheduler.load_state_dict(state)


def _check_trained(model: Any, weights: list[Weight]) -> None:
    """Every parameter that trains is in the checkpoint."""
    taken = {id(weight.tensor) for weight in weights}
    left = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in taken]
    if left:
        raise TrainingError(
            f"The checkpoint lacks {len(left)} of the parameters that are trained, such as {left[0]}.",
            hint="Resume with the model and the LoRA settings of the first run.",
        )


def _sample(weights: list[Weight]) -> list[Weight]:
    """Three weights that are gathered one by one: the smallest, that of middle size, and the one between."""
    by_size = sorted(weights, key=lambda weight: getattr(weight.tensor, "ds_numel", weight.tensor.numel()))
    middle = len(by_size) // 2
    return list({weight.name: weight for weight in (by_size[0], by_size[middle // 2], by_size[middle])}.values())


def _differs(weight: Weight, saved: Saved, parts: Parts) -> bool:
    now = parts.weight(weight)
    with on_host():
        kept = saved.weight(weight.saved_as)
        return not torch.equal(now.cpu(), kept.to(now.dtype))


def _rounding(weights: list[Weight], saved: Saved) -> str:
    """Say that trained weights have fewer bits here than in the checkpoint: accelerate keeps those of FSDP in float32
    with mixed precision (``accelerate/utils/fsdp_utils.py: fsdp2_prepare_model``), DDP as they were loaded."""
    trained = next((weight for weight in weights if weight.tensor.requires_grad), weights[0])
    with on_host():
        before, now = saved.weight(trained.saved_as).dtype, trained.tensor.dtype
    if before.itemsize <= now.itemsize:
        return ""
    return (
        f"weights are {str(before).removeprefix('torch.')} in the checkpoint and are rounded to "
        f"{str(now).removeprefix('torch.')}, in which this training keeps them"
    )
