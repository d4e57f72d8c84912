"""Probes a plan: two real optimizer steps on the longest rows, an evaluation and a save, in a process that then exits.

Nothing is pushed to a hub or reported to a tracker. The user's reward functions are called."""

import os
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler
from transformers import TrainerCallback

from autotrain_mem.data.longest_rows import longest_of, repeated, samples_completions
from autotrain_mem.machine.detect import as_now
from autotrain_mem.machine.nvml import PLAUSIBLE_BYTES, held_by
from autotrain_mem.methods import online
from autotrain_mem.methods.configs import EVALUATED_BATCHES, REHEARSED_ACCUMULATION, REHEARSED_STEPS, Configs
from autotrain_mem.methods.interface import method_of
from autotrain_mem.support import codec
from autotrain_mem.support.errors import GpuOutOfMemoryError
from autotrain_mem.training.cuda_oom import is_out_of_memory
from autotrain_mem.training.process.build import Device, DeviceOf, PhasePeaks, build, real_device
from autotrain_mem.training.process.checkpointing import write_shards
from autotrain_mem.training.process.world import Moves
from autotrain_mem.training.task import Request, SendEvent
from autotrain_mem.types import Job, Knobs, MemoryReading, Phase, Probe


def probe(request: Request, send: SendEvent, device_of: DeviceOf = real_device) -> dict[str, Any]:
    """Tries a plan's settings; returns the ``probe`` event, even if memory ran out. The parent checks the budget."""
    with device_of(request) as device:
        peaks, progress = device.peaks, _Progress()
        assert peaks is not None, "a probe needs a device that reports its memory (is_probed)"
        refused = ""
        try:
            _run(request, device, peaks, progress)
        except Exception as error:
            is_known = isinstance(error, GpuOutOfMemoryError)
            if not is_known and not is_out_of_memory(error):
                raise
            cause = (is_known and error.__cause__) or error
            refused = (str(cause) or type(cause).__name__).splitlines()[0]
        refused_in, reading = peaks.phase, peaks.reading()
        answer = Probe(
            knobs=request.knobs,
            fits=not refused and reading.num_alloc_retries == 0,
            measured=reading,
            phases=peaks.peaks(),
            row_tokens=progress.row_tokens,
            non_torch_bytes=_non_torch_bytes(device, reading),
            step_seconds=progress.step_seconds,
            refused=refused,
            refused_in=refused_in if refused else None,
        )
    return {"event": "probe", "probe": codec.to_json(answer)}


def probe_changes(job: Job, knobs: Knobs) -> dict[str, Any]:
    """Returns the arguments that a probe changes: few steps, then an evaluation and a save, and no hub or tracker."""
    saves = str(job.arguments.get("save_strategy", "steps")) != "no"
    return {
        "gradient_accumulation_steps": min(REHEARSED_ACCUMULATION, knobs.gradient_accumulation_steps),
        **method_of(job.method).rehearsal_changes(dict(job.arguments), knobs),
        "max_steps": REHEARSED_STEPS,
        "eval_strategy": "steps" if job.is_evaluated else "no",
        "eval_steps": REHEARSED_STEPS,
        "eval_on_start": False,
        "eval_delay": 0,
        "save_strategy": "steps" if saves else "no",
        "save_steps": REHEARSED_STEPS,
        "load_best_model_at_end": False,
        "resume_from_checkpoint": None,
        "report_to": "none",
        "push_to_hub": False,
        "log_completions": False,
    }


def _run(request: Request, device: Device, peaks: PhasePeaks, progress: "_Progress") -> None:
    """Runs a whole probe, from loading the model to saving it."""
    job, knobs = request.job, request.knobs
    changes = probe_changes(job, knobs)
    with method_of(job.method).without_precomputing():
        trainer = build(request, device.placed, changes)
    progress.row_tokens = take_longest(trainer, knobs.gradient_accumulation_steps)
    if samples_completions(trainer):
        # Make completions of GRPO and RLOO reach their full length. A vLLM engine has its own name for this option
        # (``vllm.SamplingParams: min_tokens``).
        options, name = trainer, "min_new_tokens"
        if (engine := getattr(trainer, "vllm_generation", None)) is not None:
            options, name = engine, "min_tokens"
        else:
            trainer.generation_config.min_new_tokens = knobs.completion_length
        if hasattr(options, "generation_kwargs"):
            options.generation_kwargs = {**options.generation_kwargs, name: knobs.completion_length}
    trainer.add_callback(progress)
    trainer.add_callback(Moves())
    filled = Configs(script=None, training=trainer.args, model=None, dataset=None)
    write_shards(trainer, whole=False)
    with method_of(job.method).training_patches(trainer, filled, knobs):
        device.train(trainer)
    if changes["save_strategy"] == "no":  # as a training without checkpoints does at its end
        peaks.enter_phase(Phase.SAVE)
        write_shards(trainer, whole=True)
        trainer.save_model(request.output_dir)


def _non_torch_bytes(device: Device, reading: MemoryReading) -> int | None:
    """Returns the bytes that this process holds according to NVML, minus those torch reserved; None if implausible."""
    hardware = device.hardware
    if device.simulated is not None:
        return hardware.non_torch_bytes
    held_bytes = held_by(hardware, os.getpid())
    if held_bytes is None:  # in a container: the drop in free memory, unless others moved (``run.confirm``)
        held_bytes = hardware.free_bytes - as_now(hardware).free_bytes
    outside_bytes = held_bytes - reading.reserved_bytes
    return outside_bytes if outside_bytes in PLAUSIBLE_BYTES else None


class _Progress(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Holds a probe's progress; the seconds are those of the last optimizer step."""

    row_tokens: int | None = None
    step_seconds: float | None = None
    _began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a step is done when the GPU is, not when Python is
        self.step_seconds = time.perf_counter() - self._began


def take_longest(trainer: Any, accumulation: int | None = None) -> int:
    """Cuts a trainer's prepared data to its longest rows; returns the tokens of the longest.

    Each micro-batch consists of the longest rows, repeated if it needs more. The first one runs without accumulated
    gradients, the second with them, and those of the second step also with optimizer state. ``accumulation``: the
    plan's ``gradient_accumulation_steps``, if the trainer's value is lower.
    """
    is_ppo = hasattr(trainer, "value_model")
    if trainer.eval_dataset is not None and not is_ppo:  # PPO evaluates nothing
        # Two batches: the second runs with what the first left allocated.
        group = getattr(trainer, "num_generations_eval", None) or 1
        rows = max(1, trainer.args.per_device_eval_batch_size * EVALUATED_BATCHES // group)
        batch = max(1, rows // EVALUATED_BATCHES)
        evaluated = (repeated(longest_of(trainer, trainer.eval_dataset, batch)[0], batch) * EVALUATED_BATCHES)[:rows]
        trainer.eval_dataset = trainer.eval_dataset.select(evaluated * trainer.args.world_size)
    # Processes take turns with whole micro-batches (``accelerate/data_loader.py: BatchSamplerShard``); a generation's
    # rows are those of all processes.
    turns = trainer.args.world_size
    if is_ppo:
        count = int(trainer.local_dataloader_batch_size)
    elif samples_completions(trainer):
        count, turns = online.prompts_at_once(trainer, accumulation), 1
    else:
        count = int(trainer.args.per_device_train_batch_size)
    longest, tokens = longest_of(trainer, trainer.train_dataset, count)
    chosen = repeated(longest, count)
    if is_ppo:
        # All data form one batch, so that every rollout has all of these prompts. TRL makes the dataloader, which
        # shuffles, when the trainer is built (``trl/experimental/ppo/ppo_trainer.py: __init__``); this one is the same.
        rows = trainer.train_dataset.select(chosen * turns)
        loader = DataLoader(rows, batch_size=len(chosen), shuffle=True, collate_fn=trainer._collate, drop_last=True)
        trainer.train_dataset, trainer.dataloader = rows, trainer.accelerator.prepare(loader)
    else:  # the sampler keeps the order of the rows, whatever the config
        rows = trainer.train_dataset.select(chosen * (REHEARSED_ACCUMULATION * REHEARSED_STEPS * turns))
        trainer.train_dataset = rows
        if hasattr(trainer, "shuffle_dataset"):  # GRPO and RLOO have their own sampler, which repeats prompts
            trainer.shuffle_dataset = False
        else:
            trainer._get_train_sampler = lambda *_: SequentialSampler(rows)
    return tokens
