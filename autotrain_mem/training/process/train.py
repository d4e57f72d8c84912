"""The training itself: builds the trainer, trains, saves, and tells how it went."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from autotrain_mem.data import load
from autotrain_mem.errors import GpuOutOfMemoryError
from autotrain_mem.training.out_of_memory import HOST, kind_of
from autotrain_mem.training.process.build import SMALLER, Device, built, device_of
from autotrain_mem.training.process.checkpointing import save_trained, watch_saving
from autotrain_mem.training.process.oom_report import phase_of
from autotrain_mem.training.process.order import keep_order
from autotrain_mem.training.request import Request

Send = Callable[[Mapping[str, Any]], None]


def train(request: Request, send: Send) -> dict[str, Any]:
    """Train once; returns the ``end`` event."""
    from autotrain_mem.training.process.progress_callback import Narrator, NothingLeft

    with device_of(request) as device:
        trainer = built(request, device.placed)
        keep_order(trainer)
        narrator = Narrator(send, device.read)
        trainer.add_callback(narrator)
        trainer.add_callback(NothingLeft(trainer))
        watch_saving(trainer, send)
        started = time.perf_counter()
        _run(trainer, device, request, send)
    seconds = time.perf_counter() - started
    reading = device.read()
    interrupted = narrator.interrupted
    if not interrupted:
        save_trained(trainer, request.output_dir)
        if trainer.args.push_to_hub:
            trainer.push_to_hub(dataset_name=load.dataset_name(request.job))
    return {
        "event": "end",
        "interrupted": interrupted,
        "steps": trainer.state.global_step,
        "losses": narrator.losses,
        "rewards": narrator.rewards,
        "memory": None if reading is None else reading.to_json(),
        "seconds": seconds,
    }


def _run(trainer: Any, device: Device, request: Request, send: Send) -> None:
    """To the end, or to an error that says what was held when the device was full."""
    from autotrain_mem.training.process.alive import Alive

    alive = Alive(trainer, request, device, send) if request.guarded else None
    resume = request.job.arguments.get("resume_from_checkpoint")
    try:
        device.train(trainer, resume_from_checkpoint=resume)
    except Exception as error:
        if kind_of(error) in (None, HOST):
            raise
        phase = phase_of(error)
        where = f" during {phase.value}" if phase is not None else ""
        shortage = None if alive is None else alive.shortage(error)
        raise GpuOutOfMemoryError(
            f"Out of memory{where}, after step {trainer.state.global_step}: {error}",
            hint=SMALLER,
            details=None if shortage is None else shortage.to_json(),
        ) from error
