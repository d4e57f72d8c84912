"""Defines the records of probes and runs that a plan collects: out-of-memory errors, restarts and readings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from autotrain_mem.settings.knobs import Knobs
from autotrain_mem.types.report import MemoryReading
from autotrain_mem.types.work import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedLimits:
    """Holds the sizes above which the guard splits a batch. A resumed run starts with them."""

    train_tokens: int | None = None
    """The most tokens, padding included, in a part of a training micro-batch; None if no micro-batch was too large."""
    evaluate_tokens: int | None = None
    """The most tokens, padding included, in a part of an evaluation batch; None if no batch was too large."""
    generate_rows: int | None = None
    """The most prompts that are answered at once; None if no generation was too large."""
    score_rows: int | None = None
    """The most completions that are scored at once; None if no scoring was too large."""
    activations_on_host: bool = False
    """Whether activations are offloaded to the host until the backward pass, since even one row was too large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Records an out-of-memory error that the run survived."""

    step: int
    """The number of optimizer steps completed before the error."""
    phase: Phase
    rows: int | None = None
    """The rows of the batch that was too large; None if no batch was involved (optimizer step, saving)."""
    tokens: int | None = None
    """The tokens of the batch that was too large, padding included; None if unknown."""
    remedy: str
    """What the guard did: ``split into 4 + 4 rows``, ``repeated with activations offloaded to the host``."""
    message: str
    """The first line of the out-of-memory error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePeak:
    """Holds the peaks of allocated and of reserved memory in one phase, in bytes."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherProcess:
    """Describes another process on the GPU, with its device memory in bytes."""

    pid: int
    name: str
    """The name of its program; empty if unknown."""
    used_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Holds the measurements of a few real steps on the longest rows, in a process that ended before training began.

    A probe runs two optimizer steps, one evaluation step if the job evaluates, and one save.

    >>> from autotrain_mem import AutoFit, MemoryReading, Probe, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> measured = MemoryReading.from_stats({"reserved_bytes.all.peak": 2097152})
    >>> Probe(knobs=chosen.knobs, fits=True, measured=measured, phases={}, non_torch_bytes=1048576).required_bytes
    3145728
    """

    knobs: Knobs
    fits: bool
    """Whether no request failed, the cache was never released to continue, and the peak is within the budget."""
    measured: MemoryReading | None
    """The allocator's figures at the end of the probe; None if they cannot be measured (plain CPU)."""
    phases: Mapping[Phase, PhasePeak]
    """The peaks of each phase that was reached."""
    row_tokens: int | None = None
    """The tokens of the longest row, or of the longest prompt if completions are sampled; None if unknown."""
    non_torch_bytes: int | None = None
    """The device memory of the process outside torch's allocator; None if unknown."""
    others: tuple[OtherProcess, ...] = ()
    """The other processes on the GPU before the probe."""
    step_seconds: float | None = None
    """The duration of the last optimizer step; None if it was not reached."""
    seconds: float = 0.0
    """The duration of the whole probe, from the start of its process."""
    refused: str = ""
    """The first line of the out-of-memory error that ended the probe; empty if there was none."""
    refused_in: Phase | None = None
    """The phase in which the probe ran out of memory; None if it did not."""

    @property
    def required_bytes(self) -> int | None:
        """Returns the device memory that the probe took: reserved bytes, plus those outside the allocator if known."""
        return None if self.measured is None else self.measured.peak_reserved_bytes + (self.non_torch_bytes or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Records that the training process failed and another one resumed."""

    step: int
    """The last optimizer step that the process reported."""
    resumed_at: int
    """The step of the checkpoint that the next process resumed from; 0 without one."""
    cause: str
    """The kind of failure: one of ``training.exit_causes.CAUSES``."""
    why: str
    """A one-line description of the failure."""
    change: str
    """The changes of the plan for the next process, as flags; empty if there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """Holds the results of probes and runs, in order. The plan stores them for a resumed run.

    >>> from autotrain_mem import Experience, Restart
    >>> killed = Restart(step=40, resumed_at=30, cause="killed", why="signal 9", change="")
    >>> [restart.step for restart in Experience().with_restart(killed).restarts]
    [40]
    """

    learned: LearnedLimits = field(default_factory=LearnedLimits)
    probes: tuple[Probe, ...] = ()
    incidents: tuple[Incident, ...] = ()
    restarts: tuple[Restart, ...] = ()

    def with_incident(self, incident: Incident) -> Self:
        return replace(self, incidents=(*self.incidents, incident))

    def with_restart(self, restart: Restart) -> Self:
        return replace(self, restarts=(*self.restarts, restart))

    def with_learned(self, learned: LearnedLimits) -> Self:
        return replace(self, learned=learned)


RECORD_NAME = "memory.jsonl"
"""The file in the output folder to which ``training.watch`` writes memory; rank 1 writes ``memory.rank1.jsonl``."""
EVENTS_NAME = "events.jsonl"
"""The file in the output folder that lists the run's events: starts, checkpoints, incidents, restarts, its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReading:
    """Holds the measurements and logs of one step of one process."""

    seconds: float
    """Seconds since the run's first event."""
    step: int
    """The number of completed optimizer steps."""
    device: MemoryReading | None
    """The allocator's figures; None if they were not measured."""
    tokens_per_second: float | None
    logs: Mapping[str, float]
    """The values that the trainer logged, by its own names: ``loss``, ``learning_rate``, ``grad_norm``, ``reward``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMarker:
    """Marks an event of a run, for its report."""

    seconds: float
    """Seconds since the run's first event."""
    step: int
    kind: str
    """The kind of event: ``start``, ``checkpoint``, ``out of memory``, ``restart``, ``warning`` or ``end``."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """Holds a run from its first event to its last, or to now."""

    began: float
    """The time of the first event, in seconds since the epoch."""
    last: float
    """The time of the last event, in seconds since the epoch."""
    total_steps: int | None
    """The planned number of optimizer steps; None if not recorded."""
    total_bytes: int | None
    """The device's total memory; None if not recorded."""
    predicted_bytes: Mapping[Phase, int]
    """The predicted peak of allocated bytes by phase."""
    phases: Mapping[Phase, PhasePeak]
    """The measured peaks of each phase so far, in the first process."""
    ranks: tuple[tuple[StepReading, ...], ...]
    """The readings of each process in order of time. The first process is always included."""
    happenings: tuple[RunMarker, ...]
    """The events in order of time."""
    ending: str
    """How the run ended: ``finished``, ``interrupted``, ``failed``; empty while no end is recorded."""

    @property
    def moments(self) -> tuple[StepReading, ...]:
        """Returns the readings of the first process."""
        return self.ranks[0]
