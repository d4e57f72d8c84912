"""Watches the memory of any transformers Trainer's run, and reports each problem in one line."""

import contextlib
import functools
import inspect
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.utils import logging

from autotrain_mem.allocator.settings import environment_settings
from autotrain_mem.support import codec
from autotrain_mem.support.errors import described
from autotrain_mem.support.files import JsonLines
from autotrain_mem.support.host import HostMemory, host_memory
from autotrain_mem.support.units import GIB
from autotrain_mem.training.watch.diagnose import Sample, Sign, SignDetector
from autotrain_mem.types import MemoryReading, Phase, PhasePeak
from autotrain_mem.types.experience import RECORD_NAME

logger = logging.get_logger("transformers.memory_watch")  # so that it follows transformers' verbosity and handlers

HOST_EVERY_SECONDS = 5.0
"""Seconds between two readings of host memory, which take 0.4 ms each (on a CPU in a container, 2026-11-21); the rest
of a log takes 0.06 ms. Host memory runs out within minutes, not seconds."""
FRAMES = 10
"""The most stack frames searched for the trainer's callback handler. It is two frames up, or more in a subclass."""

Event = Callable[..., None]


def _harmless(event: Event) -> Event:
    """Wraps a method of the watch, so that its exceptions are logged once and never stop the training."""

    @functools.wraps(event)
    def watched(self: "MemoryWatch", *args: Any, **kwargs: Any) -> None:
        try:
            event(self, *args, **kwargs)
        except Exception as error:
            self._excuse(error)

    return watched


class MemoryWatch(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Logs a run's device and host memory, and warns before it runs out.

    Use it as ``Trainer(..., callbacks=[MemoryWatch()])``, with any Trainer of transformers or TRL. Every log of the
    run gets ``memory/...`` figures, in the trackers of ``report_to``, in ``state.log_history`` and on the console;
    a JSONL file in the output folder has them in bytes. A one-line warning reports fragmentation, a GPU without free
    memory, a leak, or low host memory. The watch never resets the allocator's peaks, and its own errors never stop the
    training.

    Args:
        read: Reads the device's allocator; returns None if it cannot be measured. By default, CUDA's current device.
        predicted: Peak allocated bytes of each phase, as in a plan's ``estimate.memory.phases``.
        planned: Other byte figures to log: ``memory/NAME_gib`` for each that is not None.
        total_bytes: The memory of the device; by default, of CUDA's current device.
        phases: Returns the measured peak of each phase so far. Measuring them resets the allocator's peaks, so ``read``
            must then include those of earlier phases (``training.process.build: PhasePeaks``).
        file: The record, relative to ``output_dir``; rank 1 writes ``memory.rank1.jsonl``.
        on_sign: Called with each sign; by default transformers' logger warns. Each rank reports the signs of its own
            device, and only rank 0 those of the host.
        host: Reads the host's memory.
    """

    def __init__(
        self,
        *,
        read: Callable[[], MemoryReading | None] | None = None,
        predicted: Mapping[Phase, int] | None = None,
        planned: Mapping[str, int | None] | None = None,
        total_bytes: int | None = None,
        phases: Callable[[], Mapping[Phase, PhasePeak]] | None = None,
        file: str | pathlib.Path = RECORD_NAME,
        on_sign: Callable[[Sign], None] | None = None,
        host: Callable[[], HostMemory] = host_memory,
    ) -> None:
        self._read, self._host, self._total_bytes = read or cuda_reading, host, total_bytes
        self._predicted, self._planned, self._phases = predicted or {}, planned or {}, phases or dict
        self._file = file
        self._on_sign = on_sign or self._warn
        self._rank = 0
        self._host_memory: HostMemory | None = None
        self._host_read_at = 0.0
        self._began = 0.0
        self._rows = Rows()
        self._clock = _Clock()
        self._detector = SignDetector()
        self._record: JsonLines | None = None
        self._logged_step = -1
        self._excused: set[str] = set()

    @_harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Moves this callback before the trackers, and follows the model's embedding.

        The trackers of ``report_to`` get ``logs`` before the user's callbacks (``transformers/trainer.py:
        Trainer.__init__``). A callback gets no reference to the trainer, so the list of callbacks is found through
        the caller, which is the callback handler. Moving to the front during iteration neither skips nor repeats any.
        """
        callbacks: list[Any] = []
        frame = inspect.currentframe()
        for _depth in range(FRAMES):
            frame = frame and frame.f_back
            caller: Any = frame.f_locals.get("self") if frame else None
            if isinstance(caller, CallbackHandler):
                callbacks = caller.callbacks
                break
        if self in callbacks:
            flow = [number for number, each in enumerate(callbacks) if isinstance(each, DefaultFlowCallback)]
            first = max(flow, default=-1) + 1
            if callbacks.index(self) > first:
                callbacks.remove(self)
                callbacks.insert(first, self)
        self._clock = _Clock()
        self._began = time.perf_counter()
        self._logged_step = -1
        if not args.torch_compile:  # a hook would be compiled with the model and cause a graph break
            self._rows.follow(model)
        path = pathlib.Path(args.output_dir) / self._file
        self._rank = args.process_index
        rank = f".rank{self._rank}" if self._rank else ""
        self._record = JsonLines(path.with_name(f"{path.stem}{rank}{path.suffix}"))
        if not self._total_bytes and torch.cuda.is_initialized():
            self._total_bytes = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        self._detector = SignDetector(environment_settings({}).grows)
        self._write(
            "start",
            step=state.global_step,
            total_bytes=self._total_bytes,
            predicted_bytes=codec.to_json(self._predicted),
        )

    @_harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Marks the end of a step. The time from here to the end of an evaluation or a save is not training time."""
        self._clock.mark()

    @_harmless
    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Excludes an evaluation or a save from the training time."""
        self._clock.leave_out()

    on_save = on_evaluate

    @_harmless
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        # Trackers use the same prefixes (``transformers/integrations/integration_utils.py: rewrite_logs``).
        is_evaluation = any(name.startswith(("eval_", "test_")) for name in logs or ())
        if logs is None or is_evaluation or state.global_step <= self._logged_step:
            return
        self._logged_step = state.global_step
        sample, peaks = self._sample(state.global_step), self._phases()
        figures = dict(self._figures(sample, peaks))
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)  # it has a copy of logs from before the callbacks
        self._write("sample", **codec.to_json(sample), phases=codec.to_json(peaks))
        for sign in self._detector.see(sample):
            self._write("sign", **codec.to_json(sign))
            if state.is_world_process_zero or sign.kind != "host":
                self._on_sign(sign)

    @_harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Removes the model's hook; records the peaks of the last evaluation and save."""
        self._rows.leave()
        self._write("end", step=state.global_step, phases=codec.to_json(self._phases()))

    def _sample(self, step: int) -> Sample:
        batches, seconds, now = self._rows.take(), self._clock.take(), time.perf_counter()
        if self._host_memory is None or now - self._host_read_at >= HOST_EVERY_SECONDS:
            self._host_memory, self._host_read_at = self._host(), now
        host = self._host_memory
        return Sample(
            step=step,
            seconds=round(now - self._began, 3),
            device=self._read(),
            total_bytes=self._total_bytes,
            rows=None if batches is None else batches.rows,
            tokens=None if batches is None else batches.tokens,
            tokens_per_second=batches.all_tokens / seconds if batches and seconds > 0 else None,
            host_available_bytes=host.available_bytes,
            host_total_bytes=host.total_bytes,
        )

    def _figures(self, sample: Sample, peaks: Mapping[Phase, PhasePeak]) -> Iterator[tuple[str, float]]:
        """Yields the known figures in the form in which they are logged, sizes in GiB."""
        if (device := sample.device) is not None:
            yield "memory/allocated_gib", _gib(device.allocated_bytes)
            yield "memory/peak_allocated_gib", _gib(device.peak_allocated_bytes)
            yield "memory/peak_reserved_gib", _gib(device.peak_reserved_bytes)
            yield "memory/slack_share", round(sample.slack or 0.0, 4)
            yield "memory/retries", device.num_alloc_retries
        if device is not None and self._predicted:
            yield "memory/predicted_peak_gib", _gib(max(self._predicted.values()))
        for name, size_bytes in self._planned.items() if device is not None else ():
            if size_bytes is not None:
                yield f"memory/{name}_gib", _gib(size_bytes)
        for phase, peak in peaks.items():
            yield f"memory/{phase}_gib", _gib(peak.allocated_bytes)
            if phase in self._predicted:
                yield f"memory/{phase}_predicted_gib", _gib(self._predicted[phase])
        if sample.rows is not None and sample.tokens is not None:
            yield "memory/longest_row_tokens", sample.tokens
            yield "memory/longest_batch_tokens", sample.rows * sample.tokens
        if sample.tokens_per_second is not None:
            yield "memory/tokens_per_second", round(sample.tokens_per_second, 1)
        if sample.host_available_bytes is not None:
            yield "memory/host_available_gib", _gib(sample.host_available_bytes)

    def _warn(self, sign: Sign) -> None:
        logger.warning(f"rank {self._rank}: {sign.message}" if self._rank else sign.message)

    def _write(self, event: str, **fields: Any) -> None:
        if self._record is None:
            return
        try:
            self._record.write({"event": event, "time": round(time.time(), 3), **fields})
        except OSError as error:
            self._excuse(error, f"{self._record.path} cannot be written; figures are logged all the same")

    def _excuse(self, error: Exception, what: str = "the memory watch failed; training continues") -> None:
        if what not in self._excused:
            self._excused.add(what)
            logger.warning(f"{what}: {described(error)}")


class _Clock:
    """Counts the seconds of training since the last :meth:`take`, without evaluations and saves."""

    def __init__(self) -> None:
        self._since = self._marked = time.perf_counter()
        self._left_out = 0.0

    def mark(self) -> None:
        self._marked = time.perf_counter()

    def leave_out(self) -> None:
        before, self._marked = self._marked, time.perf_counter()
        self._left_out += self._marked - before

    def take(self) -> float:
        now = time.perf_counter()
        seconds = now - self._since - self._left_out
        self._since, self._marked, self._left_out = now, now, 0.0
        return seconds


def cuda_reading() -> MemoryReading | None:
    """Reads the current device; None without a CUDA context. ``torch.cuda.memory_stats`` would also sort all names,
    which takes longer than the reading itself."""
    if not torch.cuda.is_initialized():
        return None
    stats = torch.cuda.memory_stats_as_nested_dict()
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return MemoryReading(
        allocated_bytes=allocated["current"],
        peak_allocated_bytes=allocated["peak"],
        reserved_bytes=reserved["current"],
        peak_reserved_bytes=reserved["peak"],
        num_alloc_retries=stats["num_alloc_retries"],
    )


def _gib(size_bytes: int) -> float:
    return round(size_bytes / GIB, 4)


class Batches(NamedTuple):
    """Tokens per row (with padding) and rows of the batch with the longest rows, and the tokens of all batches."""

    tokens: int
    rows: int
    all_tokens: int


class Rows:
    """Records the shapes of a model's embedding inputs while gradients are enabled; takes microseconds per micro-batch.

    The embedding is hooked because a loss may call the model's body without the model itself (Liger's do). Evaluation,
    generation and reference models run without gradients.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._seen = Batches(0, 0, 0)

    def follow(self, model: torch.nn.Module) -> None:
        """Follows this model instead of the previous one."""
        self.leave()
        if (module := embedding_of(model)) is not None:
            self._hooks.append(module.register_forward_pre_hook(self._see, with_kwargs=True))

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take(self) -> Batches | None:
        """Returns what was recorded since the last call; None if nothing was."""
        seen, self._seen = self._seen, Batches(0, 0, 0)
        return seen if seen.all_tokens else None

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # a changing count would cause a recompilation at every step
            return
        with contextlib.suppress(Exception):  # the watch must not end the training
            if not torch.is_grad_enabled():
                return
            ids = args[0] if args else kwargs.get("input")
            if isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.dtype.is_floating_point:
                rows, tokens = ids.shape
                longest = max(self._seen[:2], (tokens, rows))
                self._seen = Batches(*longest, self._seen.all_tokens + rows * tokens)


def embedding_of(model: Any) -> torch.nn.Module | None:
    """Returns the embedding of the trained model; None if the model does not read tokens. For PPO, that is the
    embedding of the policy, not of the value model (``trl/experimental/ppo/ppo_trainer.py: PolicyAndValueWrapper``)."""
    for candidate in (model, getattr(model, "policy", None)):
        with contextlib.suppress(Exception):  # NotImplementedError, and errors of other kinds of models
            embedding: Any = candidate.get_input_embeddings()  # type: ignore[union-attr]  # None raises too
            if isinstance(embedding, torch.nn.Module):
                return embedding
    return None
