"""Builds the trainer, guards it, trains, saves, and reports the result."""

import functools
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from autotrain_mem.data import load
from autotrain_mem.support import codec
from autotrain_mem.support.errors import GpuOutOfMemoryError
from autotrain_mem.training.checkpoints import check_order
from autotrain_mem.training.cuda_oom import HOST, kind_of
from autotrain_mem.training.guard.attach import attach_guard
from autotrain_mem.training.process import checkpointing
from autotrain_mem.training.process.build import SMALLER, Device, DeviceOf, build, real_device
from autotrain_mem.training.process.finite_values import FiniteValues
from autotrain_mem.training.process.longest_batch import attach_longest_batch
from autotrain_mem.training.process.oom_report import shortage_of
from autotrain_mem.training.process.resharding import read_other_forms
from autotrain_mem.training.process.world import Moves, World
from autotrain_mem.training.run_folder import check_in_place
from autotrain_mem.training.task import Request, SendEvent
from autotrain_mem.training.watch.callback import MemoryWatch
from autotrain_mem.types.report import MemoryReading, Shortage


def train(request: Request, send: SendEvent, device_of: DeviceOf = real_device) -> dict[str, Any]:
    """Trains once; returns the ``end`` event."""
    with device_of(request) as device:
        trainer = build(request, device.placed)
        keep_order(trainer)
        checkpointing.drop_logs_without_room(trainer, send)
        world = World(trainer.args)
        progress = ProgressCallback(send, device.read, world)
        for callback in (progress, Moves(), ResumedRun(trainer)):
            trainer.add_callback(callback)
        checkpointing.follow_saving(trainer, send, request.run, world)
        save_in_place(trainer, request)
        started = time.perf_counter()
        _run(trainer, device, request, send, world)
        device.end_faults()
        seconds = time.perf_counter() - started
        reading = device.read()
        if not progress.interrupted:  # while the ranks are still connected: each may hold only a part of the model
            checkpointing.save_trained(trainer, request.output_dir)
            if trainer.args.push_to_hub:
                Moves.count = 0  # an upload makes no progress that is counted, and can take an hour
                trainer.push_to_hub(dataset_name=load.dataset_name(request.job))
    return {
        "event": "end",
        "interrupted": progress.interrupted,
        "steps": trainer.state.global_step,
        "memory": None if reading is None else codec.to_json(reading),
        "seconds": seconds,
    }


def _run(trainer: Any, device: Device, request: Request, send: SendEvent, world: World) -> None:
    """Trains to the end. If the device runs out of memory, the error reports what held it."""
    safeguards = Safeguards(trainer, request, device, send) if request.guarded else None
    trainer.add_callback(FiniteValues(trainer, send, world))  # outermost: it must not see the longest rows' loss
    resume = request.job.arguments.get("resume_from_checkpoint")
    if resume and not trainer.args.ignore_data_skip:
        check_order(Path(resume), trainer.autofit_order)
    read_other_forms(trainer, resume, request.knobs, send)
    for name in ("_prepare_for_training", *(name for name in dir(trainer) if name.startswith("_load_"))):
        setattr(trainer, name, checkpointing.without_code(Path(resume or ""))(getattr(trainer, name)))
    try:
        device.train(trainer, resume_from_checkpoint=resume)
    except Exception as error:
        if kind_of(error) in (None, HOST):
            raise
        where = "" if device.phase is None else f" during {device.phase}"
        shortage = None if safeguards is None else safeguards.shortage(error)
        raise GpuOutOfMemoryError(
            f"Out of memory{where}, after step {trainer.state.global_step}: {error}",
            hint=SMALLER,
            details=None if shortage is None else codec.to_json(shortage),
        ) from error


class Safeguards:
    """Attaches the guard, the run of the longest rows, and the watch to one trainer; all three send events."""

    def __init__(self, trainer: Any, request: Request, device: Device, send: SendEvent) -> None:
        self._trainer, self._device = trainer, device
        self._shortage: Shortage | None = None

        attach_guard(
            trainer,
            learned=request.learned,
            on_incident=lambda incident, learned: send(
                {"event": "incident", "incident": codec.to_json(incident), "learned": codec.to_json(learned)}
            ),
            on_notice=lambda message: send({"event": "note", "message": message}),
        )
        attach_longest_batch(
            trainer, lambda batch: send({"event": "worst_batch", **codec.to_json(batch)}), self._keep_shortage
        )
        watch = MemoryWatch(
            read=device.read,
            phases=device.phase_peaks,
            predicted=request.predicted,
            planned={"predicted_peak_reserved": request.predicted_reserved_bytes, "budget": request.budget_bytes},
            total_bytes=request.hardware.total_bytes,
            on_sign=lambda sign: send({"event": "sign", "kind": sign.kind, "step": sign.step, "message": sign.message}),
        )
        trainer.add_callback(watch)

    def shortage(self, error: BaseException) -> Shortage | None:
        """Returns the memory figures at an error; None if they cannot be read. If the longest rows' run failed, they
        include its stand-ins for optimizer state and accumulated gradients, which have been freed since."""
        if self._shortage is None:
            self._keep_shortage(error)
        return self._shortage

    def _keep_shortage(self, error: BaseException) -> None:
        try:
            self._shortage = shortage_of(error, self._trainer, self._device)
        except Exception:  # goes to the log, while the training raises the original error
            traceback.print_exc()


def save_in_place(trainer: Any, request: Request) -> None:
    """Makes a trainer check before each save that its folder has not been replaced (``run_folder.check_in_place``)."""

    def saves(save: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(save)
        def checked(*args: Any, **options: Any) -> None:
            check_in_place(request.output_dir, request.folder)
            save(*args, **options)

        return checked

    trainer._save_checkpoint, trainer.save_model = saves(trainer._save_checkpoint), saves(trainer.save_model)


def keep_order(trainer: Any) -> None:
    """Makes each epoch's row order depend only on the seed and the epoch, as it does with shuffling.

    With ``train_sampling_strategy group_by_length`` transformers draws the order from the global random state
    (``transformers/trainer_pt_utils.py: LengthGroupedSampler``): a run resumed in a later epoch would repeat some rows
    and skip others.
    """
    get_sampler = trainer._get_train_sampler

    def get_ordered_sampler(*args: Any, **kwargs: Any) -> Any:
        sampler, arguments = get_sampler(*args, **kwargs), trainer.args
        if isinstance(sampler, LengthGroupedSampler):
            seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
            sampler.generator = torch.Generator().manual_seed(seed)
            sampler.set_epoch = lambda epoch: sampler.generator.manual_seed(seed + epoch)
        return sampler

    trainer._get_train_sampler = get_ordered_sampler


class ProgressCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Sends ``start``, ``step`` and ``log`` events. Stops all ranks after the same step once Ctrl-C reaches one, but
    after the last step lets them save the model."""

    def __init__(self, send: SendEvent, read: Callable[[], MemoryReading | None], world: World) -> None:
        self._send, self._read, self._world = send, read, world
        self.interrupted = self._is_asked = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes later interrupts wait for the end of the current step, so that no file is left half written."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            self._is_asked = True

        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, interrupt)
        self._send({"event": "start", "step": state.global_step, "total_steps": state.max_steps})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reading = self._read()
        memory = None if reading is None else codec.to_json(reading)
        self._send({"event": "step", "step": state.global_step, "memory": memory})
        if self._world.poll(self._is_asked) and state.global_step < state.max_steps:  # the last step: the run is done
            self.interrupted = True
            control.should_training_stop = True
            # The run can then be resumed from here, unless checkpoints are turned off.
            control.should_save = args.save_strategy != "no"

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        self._send({"event": "log", "step": state.global_step, "logs": numbers})


class ResumedRun(TrainerCallback):  # type: ignore[misc]
    """Makes a resumed run end at its last step, and continue the ``num_tokens`` that TRL logs.

    transformers checks only after a step whether training is done (``trainer.py: _run_epoch``), so a run that died
    between its last checkpoint and saving the model would train one step too many. TRL counts tokens from 0 again
    (``sft_trainer.py: __init__``); ``trainer_state.json`` keeps the count.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Acts at this point, since no other lies between the reading of the checkpoint and the first step."""
        if 0 < state.max_steps <= state.global_step:
            self._trainer._run_epoch = lambda **_: None
            control.should_training_stop = True
        if state.global_step and (kept := state.stateful_callbacks.get("autofit_tokens")):
            self._trainer._total_train_tokens = kept["attributes"]["tokens"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (tokens := getattr(self._trainer, "_total_train_tokens", None)) is not None:
            state.stateful_callbacks["autofit_tokens"] = {"args": {}, "attributes": {"tokens": tokens}}
