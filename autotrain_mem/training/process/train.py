"""Trains: builds the trainer, guards it, trains, saves, and reports how it went."""

from __future__ import annotations

import time
import traceback
from typing import Any

from autotrain_mem.data import load
from autotrain_mem.errors import GpuOutOfMemoryError
from autotrain_mem.spec import Incident, Learned, codec
from autotrain_mem.spec.shortage import Shortage
from autotrain_mem.training.longest_batch.rows import LongestBatch
from autotrain_mem.training.out_of_memory import HOST, kind_of
from autotrain_mem.training.process.build import SMALLER, Device, build, device_of
from autotrain_mem.training.process.checkpointing import follow_saving, save_trained
from autotrain_mem.training.process.oom_report import phase_of, shortage_of
from autotrain_mem.training.request import Request, SendEvent
from autotrain_mem.training.watch.diagnose import Sign


def train(request: Request, send: SendEvent) -> dict[str, Any]:
    """Train once; returns the ``end`` event."""
    from autotrain_mem.training.process.progress_callback import NoStepAfterTheLast, ProgressCallback

    with device_of(request) as device:
        trainer = build(request, device.placed)
        keep_order(trainer)
        progress = ProgressCallback(send, device.read)
        trainer.add_callback(progress)
        trainer.add_callback(NoStepAfterTheLast(trainer))
        follow_saving(trainer, send)
        started = time.perf_counter()
        _run(trainer, device, request, send)
    seconds = time.perf_counter() - started
    reading = device.read()
    if not progress.interrupted:
        save_trained(trainer, request.output_dir)
        if trainer.args.push_to_hub:
            trainer.push_to_hub(dataset_name=load.dataset_name(request.job))
    return {
        "event": "end",
        "interrupted": progress.interrupted,
        "steps": trainer.state.global_step,
        "losses": progress.losses,
        "rewards": progress.rewards,
        "memory": None if reading is None else codec.to_json(reading),
        "seconds": seconds,
    }


def _run(trainer: Any, device: Device, request: Request, send: SendEvent) -> None:
    """Train to the end, or to an error that says what was held when the device was full."""
    safeguards = Safeguards(trainer, request, device, send) if request.guarded else None
    resume = request.job.arguments.get("resume_from_checkpoint")
    try:
        device.train(trainer, resume_from_checkpoint=resume)
    except Exception as error:
        if kind_of(error) in (None, HOST):
            raise
        phase = phase_of(error)
        where = f" during {phase.value}" if phase is not None else ""
        shortage = None if safeguards is None else safeguards.shortage(error)
        raise GpuOutOfMemoryError(
            f"Out of memory{where}, after step {trainer.state.global_step}: {error}",
            hint=SMALLER,
            details=None if shortage is None else codec.to_json(shortage),
        ) from error


class Safeguards:
    """Puts the guard, the longest rows before the first step, and the watch around one trainer; their news are events.

    The guard is innermost: it splits the longest rows as it splits every other batch.
    """

    def __init__(self, trainer: Any, request: Request, device: Device, send: SendEvent) -> None:
        from autotrain_mem.training.guard.attach import attach_guard
        from autotrain_mem.training.longest_batch.run import attach_longest_batch
        from autotrain_mem.training.watch.callback import MemoryWatch

        self._trainer, self._device, self._send = trainer, device, send
        self._shortage: Shortage | None = None
        attach_guard(trainer, learned=request.learned, on_incident=self._on_incident)
        attach_longest_batch(trainer, self._on_longest_batch, on_error=self._keep_shortage)
        watch = MemoryWatch(
            read=device.read,
            phases=device.phase_peaks,
            predicted=request.predicted,
            total_bytes=request.hardware.total_bytes,
            on_sign=self._on_sign,
        )
        trainer.add_callback(watch)

    def shortage(self, error: BaseException) -> Shortage | None:
        """Report the device as it was when the error came; of the longest rows that was noted before all was put back.

        None where it could not be read, which is no reason to lose the error itself: it decides what comes next.
        """
        if self._shortage is None:
            self._keep_shortage(error)
        return self._shortage

    def _keep_shortage(self, error: BaseException) -> None:
        try:
            self._shortage = shortage_of(error, self._trainer, self._device)
        except Exception:  # the log has it; what ends the training is the other one
            traceback.print_exc()

    def _on_incident(self, incident: Incident, learned: Learned) -> None:
        self._send({"event": "incident", "incident": codec.to_json(incident), "learned": codec.to_json(learned)})

    def _on_longest_batch(self, batch: LongestBatch) -> None:
        self._send({"event": "worst_batch", **codec.to_json(batch)})

    def _on_sign(self, sign: Sign) -> None:
        self._send({"event": "sign", "message": sign.message})


def keep_order(trainer: Any) -> None:
    """Let each epoch's order depend on the seed and the epoch alone, as it does where rows are shuffled.

    With ``train_sampling_strategy group_by_length`` transformers draws it from what random numbers are next
    (``transformers/trainer_pt_utils.py: LengthGroupedSampler``): a run that goes on in a later epoch would meet some of
    its rows twice and others never.
    """
    get_sampler = trainer._get_train_sampler

    def get_ordered_sampler(*args: Any, **kwargs: Any) -> Any:
        import torch
        from transformers.trainer_pt_utils import LengthGroupedSampler

        sampler, arguments = get_sampler(*args, **kwargs), trainer.args
        if isinstance(sampler, LengthGroupedSampler):
            seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
            sampler.generator = torch.Generator().manual_seed(seed)
            sampler.set_epoch = lambda epoch: sampler.generator.manual_seed(seed + epoch)
        return sampler

    trainer._get_train_sampler = get_ordered_sampler
