"""Builds the device and the trainer of a real run, and measures the peak memory of each phase."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol
from unittest import mock

from autotrain_mem.allocator.simulator import Refusal
from autotrain_mem.data import load
from autotrain_mem.data.image_sizes import has_images
from autotrain_mem.machine.detect import as_now
from autotrain_mem.machine.usable import check_usable
from autotrain_mem.methods.configs import on_host
from autotrain_mem.methods.interface import method_of
from autotrain_mem.parallel.config import sharding_arguments
from autotrain_mem.support import codec
from autotrain_mem.support.errors import GpuOutOfMemoryError, ModelNotFoundError
from autotrain_mem.trainers.finish import finished, keep_cache_in_evaluation
from autotrain_mem.trainers.model_support import quantized_to_host
from autotrain_mem.trainers.phases import PhaseRecorder, follow
from autotrain_mem.trainers.pretrained import load_processor, revision_of
from autotrain_mem.trainers.template_limits import limit_templates
from autotrain_mem.training.cuda_oom import is_out_of_memory
from autotrain_mem.training.process.checkpointing import order_of
from autotrain_mem.training.task import Request, largest
from autotrain_mem.types import Hardware, MemoryReading, Owner, Phase, PhasePeak

Placing = Callable[[Mapping[str, Any]], dict[str, Any]]

SMALLER = "Remove flags from the command, so that autofit may choose smaller values, or raise --headroom."


class PhasePeaks(PhaseRecorder):
    """Reads the allocator's peaks at the end of each phase, and resets them for the next phase. ``read``: reads the
    device's allocator. ``reset``: ``torch.cuda.reset_peak_memory_stats``, or the simulated card's."""

    phase = Phase.LOAD

    def __init__(self, read: Callable[[], MemoryReading], reset: Callable[[], None]) -> None:
        self._read, self._reset = read, reset
        self._peaks: dict[Phase, PhasePeak] = {}

    def enter_phase(self, phase: Phase) -> None:
        """Attributes all memory from here on to ``phase``. While an out-of-memory error propagates, the wrapped methods
        enter other phases (``trainers.phases: _watched``), but the phase stays the one that ran out of memory."""
        error = sys.exc_info()[1]
        if phase is not self.phase and not (error is not None and is_out_of_memory(error)):
            self._end_phase()
            self.phase = phase

    def listen(self, recorder: Any) -> None:
        """Follows the phases that a recorder enters (``rehearsal.trace.recorder: Recorder``)."""
        enter = recorder.enter_phase

        def entered(phase: Phase) -> None:
            self.enter_phase(phase)
            enter(phase)

        recorder.enter_phase = entered

    def peaks(self) -> Mapping[Phase, PhasePeak]:
        """Returns the peaks of all phases so far, in the order in which they were reached."""
        self._end_phase()
        return dict(self._peaks)

    def reading(self) -> MemoryReading:
        """Reads the memory in use now, with the peaks of the whole run."""
        peaks, now = self.peaks().values(), self._read()
        return replace(
            now,
            peak_allocated_bytes=max(peak.allocated_bytes for peak in peaks),
            peak_reserved_bytes=max(peak.reserved_bytes for peak in peaks),
        )

    def _end_phase(self) -> None:
        now = self._read()
        peak = PhasePeak(allocated_bytes=now.peak_allocated_bytes, reserved_bytes=now.peak_reserved_bytes)
        self._peaks[self.phase] = largest([self._peaks.get(self.phase, peak), peak])
        self._reset()


class Simulation(Protocol):
    """Reports on a run on a simulated card (``rehearsal.simulated_run``, which a real run does not import)."""

    def refusal(self, error: BaseException) -> Refusal | None:
        """Returns the card's refusal that caused this error; None for any other error."""

    def owned(self, named: Mapping[Owner, list[Any]], refusal: Refusal) -> dict[Owner, int]:
        """Returns the bytes by owner of all tensors alive when the card refused a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Represents the device on which a run computes, real or simulated."""

    hardware: Hardware
    peaks: PhasePeaks | None
    """None on a plain CPU, where memory is not measured."""
    placed: Placing
    """Adds the settings that this device needs to TRL's arguments."""
    train: Callable[..., None]
    """Calls ``trainer.train(**options)`` for a trainer and options, and follows its phases."""
    simulated: Simulation | None = None
    end_faults: Callable[[], None] = lambda: None
    """Ends the faults injected into a run on a simulated card, once training is done."""

    @property
    def phase(self) -> Phase | None:
        """The phase of the run, or the one that ran out of memory; None if memory is not measured."""
        return None if self.peaks is None else self.peaks.phase

    def read(self) -> MemoryReading | None:
        """Reads the device's allocator; None if memory is not measured."""
        return None if self.peaks is None else self.peaks.reading()

    def phase_peaks(self) -> Mapping[Phase, PhasePeak]:
        """Returns the peaks of each phase so far; empty if memory is not measured."""
        return {} if self.peaks is None else self.peaks.peaks()


DeviceOf = Callable[[Request], contextlib.AbstractContextManager[Device]]
"""Returns a context in which a trainer is built and trained on a request's device."""


@contextlib.contextmanager
def real_device(request: Request) -> Iterator[Device]:
    """Yields this machine's GPU or CPU. Raises UnreadableGpuError if torch cannot use the GPU."""
    if request.hardware.origin == "cpu":
        yield Device(hardware=request.hardware, peaks=None, placed=on_host, train=_train)
        return
    hardware = as_now(request.hardware)  # before this process has a context; the request has the fullest card's bytes
    # The same device as accelerate chooses for a rank (accelerate/state.py: PartialState.set_device).
    check_usable(int(os.environ["LOCAL_RANK"]) if request.knobs.processes > 1 else 0)
    with cuda_peaks() as peaks:
        yield Device(hardware=hardware, peaks=peaks, placed=dict, train=functools.partial(_train, peaks=peaks))


@contextlib.contextmanager
def cuda_peaks() -> Iterator[PhasePeaks]:
    """Measures the phases of a run on the current device. Within the block, ``torch.cuda.max_memory_allocated`` and its
    like still report the peaks since the last reset by the user's own code, such as a callback."""
    import torch

    from autotrain_mem.training.watch.callback import cuda_reading

    memory: Any = torch.cuda.memory
    plain, reset, kept = memory.memory_stats_as_nested_dict, memory.reset_peak_memory_stats, dict[Any, int]()

    def stats(device: Any = None) -> Any:
        found, is_own = plain(device), memory._get_device_index(device, optional=True) == torch.cuda.current_device()
        for (name, pool), peak in kept.items() if is_own else ():
            found[name][pool]["peak"] = max(found[name][pool]["peak"], peak)
        return found

    def reset_unseen() -> None:
        tables = {name: pools for name, pools in stats().items() if isinstance(pools, dict) and "all" in pools}
        kept.update({(name, pool): pools[pool]["peak"] for name, pools in tables.items() for pool in pools})
        reset()

    def reset_by_user(device: Any = None) -> None:
        peaks.peaks()  # keeps the phase's peak so far
        kept.clear()
        reset(device)

    peaks = PhasePeaks(lambda: cuda_reading() or MemoryReading.from_stats({}), reset_unseen)
    with (
        mock.patch.multiple(memory, memory_stats_as_nested_dict=stats, reset_peak_memory_stats=reset_by_user),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats", reset_by_user),
    ):
        yield peaks


def _train(trainer: Any, peaks: PhasePeaks | None = None, **options: Any) -> None:
    if peaks is not None:
        follow(trainer, peaks)
    trainer.train(**options)


def build(request: Request, placed: Placing, changes: Mapping[str, Any] | None = None) -> Any:
    """Builds the trainer exactly as TRL's script does, with the plan's knobs in its config; ``changes`` override the
    job's arguments."""
    import torch
    from transformers import set_seed

    job, knobs = request.job, request.knobs
    arguments = {
        **sharding_arguments(knobs),
        **job.arguments,
        **codec.to_json(knobs),
        "output_dir": request.output_dir,
        "disable_tqdm": True,
    }
    filled = method_of(job.method).configs(placed({**arguments, **(changes or {})}))
    limit_templates(memory=False)
    # TRL initializes adapters and reward heads before transformers' Trainer sets the seed.
    set_seed(filled.training.seed)
    splits = load.load(job, filled)
    train_rows = splits[filled.script.dataset_train_split]
    if job.method_facts.reads_images and has_images(train_rows.column_names or ()):
        filled = replace(filled, processor=load_processor(job.model, knobs.max_pixels, **revision_of(job)))
    evaluated = splits[filled.script.dataset_test_split] if filled.is_evaluated else None
    try:
        with quantized_to_host():
            trainer = method_of(job.method).build_trainer(filled, job.model, train_rows, evaluated)
    except torch.OutOfMemoryError as error:
        raise GpuOutOfMemoryError(f"Out of memory while the models were loaded: {error}", hint=SMALLER) from error
    except OSError as error:
        if error.errno is not None:
            raise  # an error of the operating system, not of the hub
        raise ModelNotFoundError(
            f"The weights or the tokenizer of {job.model} cannot be loaded: {' '.join(str(error).split())}",
            hint="A plan needs config.json only; training needs the whole model. Download it, or give another --model.",
        ) from error
    finished(trainer, knobs)
    keep_cache_in_evaluation(trainer)
    trainer.autofit_order = order_of(filled.training, train_rows)
    return trainer
