"""The training process: ``python -m autotrain_mem.train_process`` reads one request, trains for real, tells and ends.

With a simulated card it trains on the CPU under a recorder, so that the card is full when a real one would be.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotrain_mem.allocator.settings import AllocatorSettings, settings_of
from autotrain_mem.errors import (
    AutofitError,
    GpuOutOfMemoryError,
    InterruptedByUser,
    ModelNotFoundError,
    OutputFolderError,
    TrainingError,
)
from autotrain_mem.machine.simulated import SimulatedGpu
from autotrain_mem.processes import Channel
from autotrain_mem.rehearsal import dataset
from autotrain_mem.rehearsal.configs import on_cpu, on_host
from autotrain_mem.rehearsal.methods.method import method_of
from autotrain_mem.rehearsal.rehearse import build_trainer
from autotrain_mem.spec import Hardware, Job, Knobs
from autotrain_mem.spec.hardware import ASSUMED_CAPABILITY
from autotrain_mem.spec.report import MemoryReading
from autotrain_mem.units import MIB, format_bytes

if TYPE_CHECKING:
    from autotrain_mem.rehearsal.stage import Watch

Placing = Callable[[Mapping[str, Any]], dict[str, Any]]

FULL_DISK_BYTES = MIB
"""Less than this free, and it was the disk, whatever the library says: safetensors and torch each raise their own."""

_SMALLER = "Run autofit without the flags that you pinned, or with more --headroom."

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


def main() -> None:
    """Train once, and answer with an ``end`` event or an error."""
    channel = Channel(ignore_interrupt=False)
    request = channel.receive()
    try:
        channel.send(_train(request, channel))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes twice: from the terminal and from the parent
        interrupted = InterruptedByUser(
            "Interrupted before training began; no step was trained.", hint="Run the command again when you like."
        )
        channel.send(interrupted.to_json())
    except Exception as error:  # whatever the user's trainer raises is the user's to read, in one line and a log
        channel.send(_failure(error, request["output_dir"]).to_json())
        with contextlib.suppress(OSError):  # the log is on the disk that may be full
            traceback.print_exc()


def _failure(error: Exception, output_dir: str) -> AutofitError:
    """What an exception of the libraries means to the user."""
    if isinstance(error, AutofitError):
        return error
    reason = " ".join(str(error).split())
    free_bytes = shutil.disk_usage(output_dir).free
    if free_bytes < FULL_DISK_BYTES or getattr(error, "errno", None) in _UNWRITABLE:
        return OutputFolderError(
            f"The run could not be written to {output_dir}, whose disk has {format_bytes(free_bytes)} free: {reason}",
            hint="Free some space, or give --output_dir a folder on another disk. Of what is in the folder, the file "
            "written last may be cut short; older checkpoints are whole.",
        )
    return TrainingError(
        f"The trainer raised {type(error).__name__}: {reason}",
        hint="Change the flag that it names, if it names one.",
    )


def _train(request: dict[str, Any], channel: Channel) -> dict[str, Any]:
    from autotrain_mem.training.callback import Narrator

    job, knobs = Job.from_json(request["job"]), Knobs.from_json(request["knobs"])
    hardware = Hardware.from_json(request["hardware"])
    simulated = SimulatedGpu(hardware, _allocator_settings(job, knobs)) if request["simulate"] else None
    with contextlib.ExitStack() as stack:
        watch = None if simulated is None else stack.enter_context(_watched(simulated, hardware))
        trainer = _build(job, knobs, request["output_dir"], _placing(simulated, hardware))
        narrator = Narrator(channel.send, _meter(simulated, hardware))
        trainer.add_callback(narrator)
        started = time.perf_counter()
        _run(trainer, watch, job)
    seconds = time.perf_counter() - started
    reading = _meter(simulated, hardware)()
    interrupted = narrator.interrupted
    if not interrupted:
        trainer.save_model(request["output_dir"])
        if trainer.args.push_to_hub:
            trainer.push_to_hub(dataset_name=dataset.dataset_name(job))
    return {
        "event": "end",
        "interrupted": interrupted,
        "steps": trainer.state.global_step,
        "losses": narrator.losses,
        "rewards": narrator.rewards,
        "memory": None if reading is None else reading.to_json(),
        "seconds": seconds,
    }


def _placing(simulated: SimulatedGpu | None, hardware: Hardware) -> Placing:
    """What TRL's arguments must say beside the job's, for the device that the training runs on."""
    if simulated is not None:
        return on_cpu
    return on_host if hardware.origin == "cpu" else dict


def _build(job: Job, knobs: Knobs, output_dir: str, placed: Placing) -> Any:
    """The trainer exactly as TRL's script builds it, with the plan's knobs in its config."""
    import torch

    arguments = {**job.arguments, **knobs.to_json(), "output_dir": output_dir, "disable_tqdm": True}
    method = method_of(job.method)
    filled = method.configs(placed(arguments))
    splits = dataset.load(job, filled)
    evaluated = splits[filled.script.dataset_test_split] if filled.is_evaluated else None
    try:
        return build_trainer(job, knobs, filled, splits[filled.script.dataset_train_split], evaluated)
    except torch.OutOfMemoryError as error:
        raise GpuOutOfMemoryError(
            f"Out of memory while the models were loaded: {error}",
            hint=_SMALLER,
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise  # the operating system's word, not the hub's
        raise ModelNotFoundError(
            f"The weights or the tokenizer of {job.model} cannot be loaded: {' '.join(str(error).split())}",
            hint="A plan needs config.json only; training needs the whole model. Download it, or give another --model.",
        ) from error


def _allocator_settings(job: Job, knobs: Knobs) -> AllocatorSettings:
    """What the training process of a real card would be given."""
    settings = settings_of({**os.environ, **job.environment})
    return replace(settings, expandable_segments=knobs.expandable_segments)


def _meter(simulated: SimulatedGpu | None, hardware: Hardware) -> Callable[[], MemoryReading | None]:
    """Reads the allocator of the card, real or simulated."""
    if simulated is not None:
        return simulated.reading
    if hardware.origin == "cpu":
        return lambda: None
    import torch

    return lambda: MemoryReading.from_stats(torch.cuda.memory_stats())


@contextlib.contextmanager
def _watched(simulated: SimulatedGpu, hardware: Hardware) -> Iterator[Watch]:
    """Inside, CPU tensors are treated as the simulated card would treat its own."""
    from autotrain_mem.rehearsal.stage import Watch

    watch = Watch(simulated, hardware.compute_capability or ASSUMED_CAPABILITY)
    with watch.curtain():
        yield watch


def _run(trainer: Any, watch: Watch | None, job: Job) -> None:
    import torch

    resume = job.arguments.get("resume_from_checkpoint")
    train = trainer.train if watch is None else functools.partial(watch.train, trainer)
    try:
        train(resume_from_checkpoint=resume)
    except torch.OutOfMemoryError as error:
        where = f" during {watch.phase.value}" if watch is not None else ""
        raise GpuOutOfMemoryError(
            f"Out of memory{where}, after step {trainer.state.global_step}: {error}",
            hint=_SMALLER,
        ) from error


if __name__ == "__main__":
    main()
