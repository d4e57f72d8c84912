"""Resumes a PPO run: finds the checkpoint, loads the weights, and restores the position in the data."""

import collections
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import load_peft_weights, set_peft_model_state_dict
from transformers import TrainerCallback
from transformers.modeling_utils import load_state_dict

from autotrain_mem.support.errors import OutputFolderError, TrainingError

VALUE_MODEL = "value_model"
"""The subfolder that holds the value model, in checkpoints and in the output folder."""
STATE = "trainer_state.json"
"""The file that transformers writes last in a checkpoint (``trainer.py: _save_checkpoint``)."""


def find_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str) -> Path | None:
    """Returns the checkpoint to resume from: the named one, or for True the newest complete one in the output folder.
    Raises OutputFolderError if the output folder has no checkpoint, and TrainingError if the checkpoint lacks a part,
    as do checkpoints of TRL's own PPOTrainer."""
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        return None
    if resume_from_checkpoint is not True:
        return _whole(Path(resume_from_checkpoint))
    numbered = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in Path(output_dir).glob("checkpoint-*")}
    steps = {int(match[1]): path for path, match in numbered.items() if match and (path / STATE).is_file()}
    if not steps:
        raise OutputFolderError(
            f"The output folder {output_dir} holds no checkpoint to resume from.",
            hint="Give the --output_dir of the run to resume, or remove --resume_from_checkpoint.",
        )
    return _whole(steps[max(steps)])


def _whole(checkpoint: Path) -> Path:
    parts = (STATE, "optimizer.pt", "scheduler.pt", VALUE_MODEL)
    if missing := [name for name in parts if not (checkpoint / name).exists()]:
        raise TrainingError(
            f"Cannot resume from {checkpoint}: it lacks {', '.join(missing)}.",
            hint="Resume from a checkpoint that this trainer wrote with save_only_model off.",
        )
    return checkpoint


def load_weights(model: Any, folder: Path) -> None:
    """Loads the adapters or weights from the files of ``save_pretrained`` into the parameters of a model. Raises
    TrainingError if the files and the model do not have the same parameters."""
    if isinstance(model, PeftModel):
        # Every adapter except ``default`` is in a subfolder with its name (``peft/peft_model.py: save_pretrained``).
        strangers: set[str] = set()
        for name in model.peft_config:
            weights = load_peft_weights(str(folder if name == "default" else folder / name), device="cpu")
            result = set_peft_model_state_dict(model, weights, adapter_name=name)
            adapter = {key for key in result.missing_keys if f".{name}." in key}
            strangers |= adapter | set(result.unexpected_keys)
    else:
        strangers = _load_files(model, folder) and _load_converted(model, folder)
    if strangers:
        raise TrainingError(
            f"The weights in {folder} are not those of this model; {len(strangers)} names differ, "
            f"such as {min(strangers)}.",
            hint="Resume with the models and the LoRA settings of the first run.",
        )


def _load_files(model: Any, folder: Path) -> set[str]:
    loaded: set[str] = set()
    strangers: set[str] = set()
    for file in sorted(folder.glob("model*.safetensors")):
        weights = load_state_dict(file)
        strangers |= set(model.load_state_dict(weights, strict=False).unexpected_keys)
        loaded |= set(weights)
    state = model.state_dict()
    places = {state[name].data_ptr() for name in loaded & set(state)}
    # Tied weights are saved only once, under one of their names.
    return strangers | {name for name, tensor in state.items() if tensor.data_ptr() not in places}


def _load_converted(model: Any, folder: Path) -> set[str]:
    """Loads weights that transformers renamed or split when it saved them, such as a mixture's experts
    (``core_model_loading.py: revert_weight_conversion``). Only ``from_pretrained`` can reverse this."""
    saved, loading = type(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if not (strangers := {*loading["missing_keys"], *loading["unexpected_keys"]}):
        model.load_state_dict(saved.state_dict())
    return strangers


def seed_shuffling(dataloader: Any, seed: int) -> None:
    """Gives the sampler its own random generator. In a single process TRL's uses the global one, as rollouts do."""
    batches = dataloader.batch_sampler
    sampler = getattr(batches, "batch_sampler", batches).sampler  # accelerate wraps it if there are several processes
    if sampler.generator is None:
        sampler.generator = torch.Generator()
    sampler.generator.manual_seed(seed)


def batches_after(done: int, dataloader: Any, restore_rng: Callable[[], None]) -> Iterator[Any]:
    """Yields the batches of endless passes over the data, without the first ``done`` batches. ``restore_rng``: restores
    the state that the global generators had after batch ``done``. It is called once a pass has begun, since its
    beginning draws from them (``torch/utils/data/dataloader.py: _BaseDataLoaderIter``)."""
    passes, within = divmod(done, len(dataloader))
    for _ in range(passes):
        collections.deque(dataloader.batch_sampler, maxlen=0)
    if within:
        dataloader.skip_batches = within
        rest = iter(dataloader)
        first = next(rest)
        dataloader.skip_batches = 0
        restore_rng()
        yield first
        yield from rest
    else:
        restore_rng()
    while True:
        yield from dataloader


class Continuation(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Restores a checkpoint's trainer state after TRL's loop has reset it. It must be the first callback."""

    kept = ("global_step", "episode", "epoch", "total_flos", "log_history")

    def __init__(self, saved: Any) -> None:
        self._saved = saved

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name in self.kept:
            setattr(state, name, getattr(self._saved, name))
        for name, kept in self._saved.stateful_callbacks.items():
            if name in state.stateful_callbacks:  # this run has such a callback
                state.stateful_callbacks[name] = kept


class Agreement(TrainerCallback):  # type: ignore[misc]
    """Makes all processes save or stop after the same step. It must be the last callback."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wishes = torch.tensor([control.should_save, control.should_training_stop], device=self._accelerator.device)
        save, stop = self._accelerator.reduce(wishes.long(), "sum").tolist()
        control.should_save, control.should_training_stop = save > 0, stop > 0
