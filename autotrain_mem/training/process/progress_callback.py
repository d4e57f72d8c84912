"""Sends a training process's progress to its parent while it runs. Imported only where transformers already is."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from autotrain_mem.spec import codec
from autotrain_mem.spec.report import REWARD_NAMES, MemoryReading
from autotrain_mem.training.request import SendEvent


class ProgressCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Sends ``start``, ``step`` and ``loss`` events, and ends the training after the step in which Ctrl-C came.

    Args:
        send: Takes one event.
        read: Reads the device's allocator; gives None where nothing measures.
    """

    def __init__(self, send: SendEvent, read: Callable[[], MemoryReading | None]) -> None:
        self._send = send
        self._read = read
        self.interrupted = False
        self.losses: list[float] = []
        self.rewards: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let an interrupt wait for the end of the step from here on, so that no file is left half written."""
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, self._interrupt)
        self._send({"event": "start", "step": state.global_step, "total_steps": state.max_steps})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One optimizer step is done."""
        reading = self._read()
        memory = None if reading is None else codec.to_json(reading)
        self._send({"event": "step", "step": state.global_step, "memory": memory})
        if self.interrupted:
            control.should_training_stop = True
            # So that the run can be gone on with from here; who asks for no checkpoints gets none.
            control.should_save = args.save_strategy != "no"

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """The trainer logged; every number that it logs is passed on."""
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        self.rewards += [numbers[name] for name in REWARD_NAMES if name in numbers]
        if "loss" in numbers:
            self.losses.append(numbers["loss"])
        elif "train_loss" in numbers and not self.losses:
            self.losses.append(numbers["train_loss"])  # shorter than --logging_steps: the mean is all there is
        self._send({"event": "log", "step": state.global_step, "logs": numbers})

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True


class NoStepAfterTheLast(TrainerCallback):  # type: ignore[misc]
    """Ends a training that goes on from its last step before it makes another.

    transformers asks whether it is done after a step only (``trainer.py: _run_epoch``), so a run that died between its
    last checkpoint and its model would train one step too many.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The one place between the checkpoint's being read and the first step."""
        if 0 < state.max_steps <= state.global_step:
            self._trainer._run_epoch = lambda **_: None
            control.should_training_stop = True
