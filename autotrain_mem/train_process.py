"""The training process: ``python -m autotrain_mem.train_process`` reads one request, trains for real, tells and ends.

With a simulated card it trains on the CPU under a recorder, so that the card is full when a real one would be.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

from autotrain_mem.allocator.allocated import AllocatedBytes
from autotrain_mem.errors import AutofitError, GpuOutOfMemoryError, InterruptedByUser, OutputFolderError, TrainingError
from autotrain_mem.machine.simulated import SimulatedGpu
from autotrain_mem.processes import Channel
from autotrain_mem.rehearsal import dataset
from autotrain_mem.rehearsal.methods import sft
from autotrain_mem.spec import Hardware, Job, Knobs, Phase


def main() -> None:
    """Train once, and answer with an ``end`` event or an error."""
    channel = Channel(ignore_interrupt=False)
    try:
        request = channel.receive()
        channel.send(_train(request, channel))
    except KeyboardInterrupt:
        channel.send(InterruptedByUser("Interrupted before training began; nothing was written.").to_json())
    except AutofitError as error:
        channel.send(error.to_json())
    except OSError as error:
        traceback.print_exc()
        failure = OutputFolderError(
            f"A file could not be written: {error}", hint="Is the disk of --output_dir full? Checkpoints are kept."
        )
        channel.send(failure.to_json())
    except Exception as error:  # whatever the user's trainer raises is the user's to read, in one line and a log
        traceback.print_exc()
        channel.send(TrainingError(f"The trainer raised {type(error).__name__}: {error}").to_json())


def _train(request: dict[str, Any], channel: Channel) -> dict[str, Any]:
    from autotrain_mem.training.callback import Narrator

    job, knobs = Job.from_json(request["job"]), Knobs.from_json(request["knobs"])
    hardware = Hardware.from_json(request["hardware"])
    simulated = SimulatedGpu(hardware, AllocatedBytes()) if request["simulate"] else None
    trainer = _build(job, knobs, request["output_dir"], on_cpu=simulated is not None or hardware.origin == "cpu")
    narrator = Narrator(channel.send, _meter(simulated, hardware))
    trainer.add_callback(narrator)
    started = time.perf_counter()
    _run(trainer, simulated, job)
    seconds = time.perf_counter() - started
    peak = _meter(simulated, hardware)()[1]
    if not narrator.interrupted:
        trainer.save_model(request["output_dir"])
        if trainer.args.push_to_hub:
            trainer.push_to_hub(dataset_name=dataset.dataset_name(job))
    return {
        "event": "end",
        "interrupted": narrator.interrupted,
        "steps": trainer.state.global_step,
        "losses": narrator.losses,
        "peak_allocated_bytes": peak,
        "seconds": seconds,
    }


def _build(job: Job, knobs: Knobs, output_dir: str, *, on_cpu: bool) -> Any:
    """The trainer exactly as ``trl sft`` builds it, with the plan's knobs in its config."""
    arguments = {**job.arguments, **knobs.to_json(), "output_dir": output_dir, "disable_tqdm": True}
    if on_cpu:
        arguments |= {"use_cpu": True, "dataloader_num_workers": 0}
    filled = sft.configs(arguments)
    return sft.build_real_trainer(filled, job.model, dataset.load(job, filled))


def _meter(simulated: SimulatedGpu | None, hardware: Hardware) -> Callable[[], tuple[int | None, int | None]]:
    """Reads (allocated now, allocated at most) from the card, real or simulated."""
    if simulated is not None:
        return lambda: (simulated.allocated_bytes, simulated.peak_bytes)
    if hardware.origin == "cpu":
        return lambda: (None, None)
    import torch

    return lambda: (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())


def _run(trainer: Any, simulated: SimulatedGpu | None, job: Job) -> None:
    import torch

    resume = job.arguments.get("resume_from_checkpoint")
    phase: Phase | None = None
    try:
        if simulated is None:
            trainer.train(resume_from_checkpoint=resume)
        else:
            from autotrain_mem.rehearsal.stage import Watch

            watch = Watch(simulated)
            try:
                watch.train(trainer, resume_from_checkpoint=resume)
            finally:
                phase = watch.phase
    except torch.OutOfMemoryError as error:
        where = f" during {phase.value}" if phase is not None else ""
        raise GpuOutOfMemoryError(
            f"Out of memory{where}, after step {trainer.state.global_step}: {error}",
            hint="Run autofit without the flags that you pinned, or with more --headroom.",
        ) from error


if __name__ == "__main__":
    main()
