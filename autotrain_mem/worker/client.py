"""Sends the parent's requests to a worker: applies a time limit, replaces a dead worker, and rebuilds its errors."""

import builtins
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from autotrain_mem.settings.trl_parser import TrlFlags
from autotrain_mem.support import codec, errors
from autotrain_mem.support.errors import WorkerDiedError, WorkerTimeoutError
from autotrain_mem.support.processes import Child, ChildDied, ChildTimeout
from autotrain_mem.trainers.template_limits import stopped
from autotrain_mem.types import Capability, Counting, DataProfile, Fingerprint, Job, Knobs, Preflight, Trace
from autotrain_mem.types.model import ModelFacts

HIDDEN_CUDA = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "OMP_NUM_THREADS": "1",
}
"""The worker's environment: no GPU, so that a rehearsal is the same on every machine and takes no GPU memory. HIP
treats an empty value as unset (ROCm's ``clr``, ``rocclr/device/rocm/rocdevice.cpp: Device::init``)."""

PREFIX = "autofit-"
"""Prefix of our temporary folders."""
SCRATCH = "AUTOFIT_SCRATCH"
"""The variable with the path of the worker's own folder: TMPDIR may be shared."""

TIME_LIMIT_SECONDS = 600.0
"""Time limit of one answer, or between two progress reports: counting the tokens of a large dataset takes minutes."""


class Worker:
    """Sends requests to one worker process, which starts with :meth:`start` or the first request. Use it as a context
    manager. A worker that died or hung is replaced at the next request."""

    def __init__(self) -> None:
        # Parent or worker, whichever survives, removes it: a killed process cleans up nothing.
        self._scratch = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self._lock = threading.Lock()
        self._asked = threading.Lock()
        """Held from a request until its answer, so that a second request waits."""
        self._over = False
        self._child: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._child is not None:
            self._child.stop()
        self._scratch.cleanup()

    def kill(self) -> None:
        """Kills the process, from any thread; a caller that waits for an answer gets an error."""
        with self._lock:
            self._over = True
            if self._child is not None:
                self._child.kill()  # it holds nothing that needs saving

    @property
    def scratch(self) -> str:
        """Returns a folder that exists until the worker ends, even if this process is killed."""
        return self._scratch.name

    @property
    def pid(self) -> int:
        """Returns the process id; starts the process if needed."""
        return (self._child or self._living()).pid

    def start(self) -> None:
        """Starts the process if needed, without waiting for it."""
        self._living()

    def parse(
        self,
        method: str,
        argv: Sequence[str],
        config: Mapping[str, Any],
        environment: Mapping[str, str],
        also_known: Iterable[str],
        pins: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Any], Knobs]:
        """Returns the user's arguments from flags and YAML keys, and TRL's defaults: :func:`checks.arguments.parse`."""
        words = {"argv": argv, "config": config, "environment": environment, "pins": pins or {}, "own": own or {}}
        given, defaults = self._ask("parse", method=method, **words, also_known=list(also_known))
        return given, codec.from_json(Knobs, defaults)

    def flags(self) -> dict[str, TrlFlags]:
        """Returns TRL's flags and help texts by method, which the worker also keeps on disk."""
        return {method: codec.from_json(TrlFlags, each) for method, each in self._ask("flags").items()}

    def describe(self, job: Job, compute_capability: Capability) -> ModelFacts:
        """Returns the model's facts. Raises ModelError for an unusable config, UsageError for unsuitable arguments."""
        return codec.from_json(ModelFacts, self._ask("describe", job=job, compute_capability=compute_capability))

    def layers_to_name(self, job: Job) -> tuple[str, ...]:
        """Returns the layers that accelerate's config must name for FSDP; none if accelerate finds them itself."""
        return codec.from_json(tuple[str, ...], self._ask("layers_to_name", job=job))

    def preflight(
        self, job: Job, compute_capability: Capability, *, to_train: bool, on_cpu: bool, reads_data: bool
    ) -> Preflight:
        """Runs :data:`checks.table.PREFLIGHT`, without a rehearsal. Raises ModelError if the config is unusable."""
        facts = {"to_train": to_train, "on_cpu": on_cpu, "reads_data": reads_data}
        answer = self._ask("preflight", job=job, compute_capability=compute_capability, **facts)
        return codec.from_json(Preflight, answer)

    def fingerprint(self, job: Job) -> Fingerprint:
        """Returns a digest of everything that :meth:`profile` depends on: :func:`data.fingerprint.fingerprint`."""
        return codec.from_json(Fingerprint, self._ask("fingerprint", job=job))

    def profile(self, job: Job, on_progress: Callable[[Counting], None] = lambda counting: None) -> DataProfile:
        """Counts the data's tokens; calls ``on_progress`` a few times a second. Raises DatasetError for bad data."""
        return codec.from_json(DataProfile, self._ask("profile", on_progress, job=job))

    def rehearse(
        self,
        job: Job,
        knobs: Knobs,
        length: int,
        compute_capability: Capability,
        layers: int | None = None,
        chunks: int | None = None,
    ) -> Trace:
        """Rehearses a configuration: :func:`rehearsal.rehearse.rehearse`. Raises RehearsalError if it fails."""
        point = {"length": length, "compute_capability": compute_capability, "layers": layers, "chunks": chunks}
        return codec.from_json(Trace, self._ask("rehearse", job=job, knobs=knobs, **point))

    def _living(self) -> Child:
        with self._lock:
            if self._child is None and self._over:
                raise WorkerDiedError("The rehearsal was cancelled before it began.", hint="Run it again.")
            if self._child is None or not (self._child.alive or self._over):
                if self._child is not None:
                    self._child.stop()
                environment = {**HIDDEN_CUDA, "TMPDIR": self.scratch, SCRATCH: self.scratch}
                # Its children count tokens.
                self._child = Child("autotrain_mem.worker.server", environment, has_children=True)
            return self._child

    def _ask(
        self, operation: str, on_progress: Callable[[Counting], None] = lambda counting: None, /, **fields: Any
    ) -> Any:
        with self._asked:
            child = self._living()
            try:
                child.send({"operation": operation, **codec.to_json(fields)})
                while "progress" in (answer := child.receive(TIME_LIMIT_SECONDS)):
                    on_progress(codec.from_json(Counting, answer["progress"]))
            except ChildDied as death:
                if death.code == -signal.SIGVTALRM:
                    raise stopped() from death
                code = death.code or 0
                cause = f"killed by signal {-code}" if code < 0 else f"exit status {death.code}"
                raise WorkerDiedError(
                    f"The rehearsal's process exited during the {operation} step: {cause}.",
                    hint=(death.log_tail[-600:] or "It printed nothing.")
                    + "\nNothing was lost: run the command again. Signal 9 often means that host memory ran out.",
                ) from death
            except ChildTimeout as timeout:
                child.stop(0)
                raise WorkerTimeoutError(
                    f"The {operation} step took longer than {TIME_LIMIT_SECONDS:.0f} s.",
                    hint="If the dataset is very large, give --max_length N to skip counting tokens.",
                ) from timeout
        if "error" in answer:
            error = errors.from_json(answer)
            error.__cause__ = _cause(answer)
            raise error
        return answer["ok"]


def _cause(answer: Mapping[str, Any]) -> Exception:
    """Rebuilds the worker's exception: as its nearest built-in class if ``passed_on`` gave one, else a RuntimeError."""
    where, raised = RuntimeError(answer["traceback"]), answer.get("raised")
    if not raised:
        return where
    cause: Exception = getattr(builtins, raised["kind"])(raised["text"])
    cause.__cause__ = where
    if raised["note"]:
        cause.add_note(raised["note"])
    return cause
