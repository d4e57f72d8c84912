"""The training itself: builds the trainer, trains, saves, and tells how it went."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from autotrain_mem.errors import GpuOutOfMemoryError
from autotrain_mem.rehearsal import dataset
from autotrain_mem.run.stand import SMALLER, Device, built, device_of
from autotrain_mem.training.request import Request

Send = Callable[[Mapping[str, Any]], None]


def train(request: Request, send: Send) -> dict[str, Any]:
    """Train once; returns the ``end`` event."""
    from autotrain_mem.training.callback import Narrator

    with device_of(request) as device:
        trainer = built(request, device.placed)
        narrator = Narrator(send, device.read)
        trainer.add_callback(narrator)
        started = time.perf_counter()
        _run(trainer, device, request)
    seconds = time.perf_counter() - started
    reading = device.read()
    interrupted = narrator.interrupted
    if not interrupted:
        trainer.save_model(request.output_dir)
        if trainer.args.push_to_hub:
            trainer.push_to_hub(dataset_name=dataset.dataset_name(request.job))
    return {
        "event": "end",
        "interrupted": interrupted,
        "steps": trainer.state.global_step,
        "losses": narrator.losses,
        "rewards": narrator.rewards,
        "memory": None if reading is None else reading.to_json(),
        "seconds": seconds,
    }


def _run(trainer: Any, device: Device, request: Request) -> None:
    import torch

    watch = device.watch
    resume = request.job.arguments.get("resume_from_checkpoint")
    start = trainer.train if watch is None else functools.partial(watch.train, trainer)
    try:
        start(resume_from_checkpoint=resume)
    except torch.OutOfMemoryError as error:
        where = f" during {watch.phase.value}" if watch is not None else ""
        raise GpuOutOfMemoryError(
            f"Out of memory{where}, after step {trainer.state.global_step}: {error}",
            hint=SMALLER,
        ) from error
