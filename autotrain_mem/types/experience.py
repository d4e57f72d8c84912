"""Defines what runs add to a plan: probes, batches that ran out of memory, and restarts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autotrain_mem.settings.knobs import Knobs
from autotrain_mem.types.report import MemoryReading
from autotrain_mem.types.work import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedLimits:
    """Holds the sizes above which a guard splits a batch; a resumed run starts with them."""

    train_tokens: int | None = None
    """The most tokens, with padding, of a part of a micro-batch; None if none was too large."""
    evaluate_tokens: int | None = None
    generate_rows: int | None = None
    """The most prompts that are answered at once."""
    score_rows: int | None = None
    """The most completions that are scored at once."""
    activations_on_host: bool = False
    """Whether activations for the backward pass are offloaded to host, since a micro-batch of one row was too large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Records an out-of-memory error that the run survived."""

    step: int
    """Optimizer steps completed before."""
    phase: Phase
    rows: int | None = None
    """Rows of the batch that was too large; None if it was not a batch (optimizer step, saving)."""
    tokens: int | None = None
    """Tokens of that batch, padding included."""
    remedy: str
    """The remedy, in a few words: ``split into 4 + 4 rows``, ``repeated with activations offloaded to the host``."""
    message: str
    """The first line of the library's error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePeak:
    """Holds the peaks of one phase, in bytes."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherProcess:
    """Describes another process on the GPU."""

    pid: int
    name: str
    """Empty if unknown."""
    used_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Holds the measurements of a few real steps on the longest rows, in a process that ended before training began.

    Its steps: two optimizer steps, one evaluation step if the job evaluates, one save.

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
    """Memory at the end; None if it cannot be measured (plain CPU)."""
    phases: Mapping[Phase, PhasePeak]
    """Peaks of the phases that were reached."""
    row_tokens: int | None = None
    """Tokens of the longest row, or of the longest prompt if completions are sampled; None if unknown."""
    non_torch_bytes: int | None = None
    """Device memory of the process outside torch's allocator; None if unknown."""
    others: tuple[OtherProcess, ...] = ()
    """Other processes on the GPU at that time."""
    step_seconds: float | None = None
    """Seconds of the last optimizer step; None if it was not reached."""
    seconds: float = 0.0
    """Seconds of the whole probe, from the start of its process."""
    refused: str = ""
    """The first line of the out-of-memory error that ended it; empty for none."""
    refused_in: Phase | None = None

    @property
    def required_bytes(self) -> int | None:
        """Returns the device memory that it took: reserved bytes, plus those outside torch's allocator if known."""
        return None if self.measured is None else self.measured.peak_reserved_bytes + (self.non_torch_bytes or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Records that the training process failed and another one resumed."""

    step: int
    """The last optimizer step that the process reported."""
    resumed_at: int
    """The step of the checkpoint that the next process resumed from; 0 without one."""
    cause: str
    """One of ``training.exit_causes.CAUSES``."""
    why: str
    """The cause, in one line."""
    change: str
    """The changes of the plan, as flags; empty for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """Holds the results of probes and runs, in order. The plan stores them, so that a resumed run starts with them.

    >>> from autotrain_mem import Experience, Restart
    >>> killed = Restart(step=40, resumed_at=30, cause="killed", why="signal 9", change="")
    >>> [restart.step for restart in Experience().with_restart(killed).restarts]
    [40]
    """

    learned: LearnedLimits = field(default_factory=LearnedLimits)
    probes: tuple[Probe, ...] = ()
    incidents: tuple[Incident, ...] = ()
    restarts: tuple[Restart, ...] = ()

    def with_incident(self, incident: Incident) -> Experience:
        return replace(self, incidents=(*self.incidents, incident))

    def with_restart(self, restart: Restart) -> Experience:
        return replace(self, restarts=(*self.restarts, restart))

    def with_learned(self, learned: LearnedLimits) -> Experience:
        return replace(self, learned=learned)


RECORD_NAME = "memory.jsonl"
"""The file in the output folder that ``training.watch`` writes; rank 1 writes ``memory.rank1.jsonl``."""
EVENTS_NAME = "events.jsonl"
"""The file in the output folder with the run's events: starts, checkpoints, incidents, restarts, its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReading:
    """Holds the measurements and logs of one step of one process."""

    seconds: float
    """Seconds since the run's first event."""
    step: int
    device: MemoryReading | None
    tokens_per_second: float | None
    logs: Mapping[str, float]
    """What the trainer logged, under its own names: ``loss``, ``learning_rate``, ``grad_norm``, ``reward``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMarker:
    """Marks a moment of a run at which something happened."""

    seconds: float
    step: int
    kind: str
    """``start``, ``checkpoint``, ``out of memory``, ``restart``, ``warning`` or ``end``."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """Holds a run from its first event to its last, or to now."""

    began: float
    """Seconds since the epoch of the first event."""
    last: float
    """Seconds since the epoch of the last event."""
    total_steps: int | None
    """Planned optimizer steps of the training; None if not recorded."""
    total_bytes: int | None
    """The device's memory."""
    predicted_bytes: Mapping[Phase, int]
    """Predicted peak of allocated memory by phase."""
    phases: Mapping[Phase, PhasePeak]
    """Peaks of each phase so far, measured in the first process."""
    ranks: tuple[tuple[StepReading, ...], ...]
    """The readings of each process, in order of time; at least those of the first process."""
    happenings: tuple[RunMarker, ...]
    """Events in order of time."""
    ending: str
    """How the run ended: ``finished``, ``interrupted``, ``failed``; empty while no end is recorded."""

    @property
    def moments(self) -> tuple[StepReading, ...]:
        """Returns the readings of the first process."""
        return self.ranks[0]
