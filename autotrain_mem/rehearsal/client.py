"""The parent's side of the worker: asks, waits within a limit, restarts what died, and rebuilds what is told."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotrain_mem import errors
from autotrain_mem.errors import WorkerDiedError, WorkerTimeoutError
from autotrain_mem.processes import Child, ChildDied, ChildTimeout
from autotrain_mem.spec import DataProfile, Job, Knobs, Trace
from autotrain_mem.spec.model import ModelFacts

HIDDEN_CUDA = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "OMP_NUM_THREADS": "1",
}
"""The worker's environment: no GPU, so that a rehearsal is the same on every machine and takes no card's memory."""

TIME_LIMIT_SECONDS = 600.0
"""For one question. A rehearsal takes seconds, counting the tokens of a large dataset minutes."""


class Worker:
    """A worker process, started at once so that it imports TRL while the parent does other things.

    Use it as a context manager. A worker that died or hung is replaced at the next question.
    """

    def __init__(self, time_limit_seconds: float = TIME_LIMIT_SECONDS) -> None:
        self._time_limit_seconds = time_limit_seconds
        # Ours, not the worker's: a process that is killed tidies nothing up.
        self._scratch = tempfile.TemporaryDirectory(prefix="autofit-", ignore_cleanup_errors=True)
        self._child = self._start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()  # it holds nothing that needs saving
        self._child.stop()
        self._scratch.cleanup()

    @property
    def pid(self) -> int:
        """The process id, for those who watch its memory."""
        return self._child.pid

    def parse(
        self,
        method: str,
        argv: Sequence[str],
        config: Mapping[str, Any],
        environment: Mapping[str, str],
        also_known: Iterable[str],
        switches: Iterable[str] = (),
    ) -> tuple[dict[str, Any], Knobs]:
        """(arguments that the user gave, TRL's defaults). Raises UsageError."""
        answer = self._ask(
            "parse",
            method=method,
            argv=list(argv),
            config=dict(config),
            environment=dict(environment),
            also_known=list(also_known),
            switches=list(switches),
        )
        return answer["given"], Knobs.from_json(answer["defaults"])

    def help_text(self, method: str) -> str:
        """TRL's help for the method's flags."""
        text: str = self._ask("help", method=method)["help"]
        return text

    def describe(self, job: Job, compute_capability: tuple[int, int]) -> ModelFacts:
        """What the model's config says.

        Raises:
            ModelError: there is no such model, or the method cannot train it.
            UsageError: what is asked for does not work with this model or on this card.
        """
        answer = self._ask(
            "describe", job=job.to_json(), compute_capability=compute_capability, options=_config_options(job)
        )
        return ModelFacts(context_length=answer["context_length"], is_quantized=answer["is_quantized"])

    def check_can_train(self, job: Job) -> None:
        """Raises UsageError when the job lacks something without which nothing can be trained."""
        self._ask("check", job=job.to_json())

    def profile(self, job: Job) -> DataProfile:
        """Token lengths of the job's dataset. Raises DatasetError."""
        answer = self._ask("profile", job=job.to_json())
        return DataProfile(rows_by_length=dict(answer["rows_by_length"]), longest_evaluated=answer["longest_evaluated"])

    def rehearse(self, job: Job, knobs: Knobs, length: int, compute_capability: tuple[int, int]) -> Trace:
        """Rehearse one configuration with rows (or prompts) of ``length`` tokens. Raises RehearsalError."""
        answer = self._ask(
            "rehearse",
            job=job.to_json(),
            knobs=knobs.to_json(),
            length=length,
            compute_capability=compute_capability,
            options=_config_options(job),
        )
        return Trace.from_json(answer["trace"])

    def _start(self) -> Child:
        return Child("autotrain_mem.rehearsal.worker", {**HIDDEN_CUDA, "TMPDIR": self._scratch.name})

    def _ask(self, operation: str, **fields: Any) -> dict[str, Any]:
        if not self._child.alive:
            self._child.stop()
            self._child = self._start()
        try:
            self._child.send({"operation": operation, **fields})
            answer = self._child.receive(self._time_limit_seconds)
        except ChildDied as death:
            raise _died(operation, death) from death
        except ChildTimeout as timeout:
            self._child.kill()
            raise WorkerTimeoutError(
                f"The {operation} step took longer than {self._time_limit_seconds:.0f} s.",
                hint="A very large dataset or model can: give --max_length N to skip counting tokens.",
            ) from timeout
        if "error" in answer:
            error = errors.from_json(answer)
            error.__cause__ = RuntimeError(answer["traceback"])
            raise error
        ok: dict[str, Any] = answer["ok"]
        return ok


def _config_options(job: Job) -> dict[str, Any]:
    options = {"trust_remote_code": job.arguments.get("trust_remote_code", False)}
    revision = job.arguments.get("model_revision")
    return options | ({"revision": revision} if revision else {})


def _died(operation: str, death: ChildDied) -> WorkerDiedError:
    killed = death.code is not None and death.code < 0
    cause = f"it was killed by signal {-death.code}" if killed and death.code else f"exit status {death.code}"
    return WorkerDiedError(
        f"The rehearsal's process ended during the {operation} step: {cause}.",
        hint=(death.log_tail[-600:] or "It printed nothing.")
        + "\nNothing was lost: run the command again. Signal 9 is often the host running out of memory.",
    )
