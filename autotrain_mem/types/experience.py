"""Experience holds what a run taught beyond its plan: probes, batches that were too large, and restarts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autotrain_mem.settings.knobs import Knobs
from autotrain_mem.types.report import MemoryReading
from autotrain_mem.types.work import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedLimits:
    """Limits how large a batch may be before it is split. A guard goes by it, and a resumed run starts with it."""

    train_tokens: int | None = None
    """Tokens, with padding, that a part of a micro-batch may have; None where none was ever too large."""
    evaluate_tokens: int | None = None
    generate_rows: int | None = None
    """Prompts that are answered at once."""
    score_rows: int | None = None
    """Completions that are judged at once."""
    activations_on_host: bool = False
    """A micro-batch of one row was too large: what its backward needs waits in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Records that the device was full, and the run went on."""

    step: int
    """Optimizer steps that were done before."""
    phase: Phase
    rows: int | None = None
    """Rows of the batch that was too large; None where it was no batch (the optimizer step, saving)."""
    tokens: int | None = None
    """Tokens of that batch, with padding."""
    remedy: str
    """In a few words: ``split into 4 + 4 rows``, ``repeated after the cache was emptied``."""
    message: str
    """The first line of what the library raised."""


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
    """Holds what a few real steps on the longest rows measured, in a process that ended before the training began.

    Two optimizer steps, one evaluation step where the job evaluates, one save.

    >>> from autotrain_mem import AutoFit, MemoryReading, Probe, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> measured = MemoryReading.from_stats({"reserved_bytes.all.peak": 2097152})
    >>> Probe(knobs=chosen.knobs, fits=True, measured=measured, phases={}, non_torch_bytes=1048576).required_bytes
    3145728
    """

    knobs: Knobs
    fits: bool
    """No request failed, the cache was never released to continue, and the peak is within the budget."""
    measured: MemoryReading | None
    """Memory at the end; None if it cannot be measured (plain CPU)."""
    phases: Mapping[Phase, PhasePeak]
    """The peaks of the phases that were reached."""
    row_tokens: int | None = None
    """Tokens of the longest row, or of the longest prompt where completions are sampled; None if the probe failed
    before."""
    non_torch_bytes: int | None = None
    """Device memory of the process outside torch's allocator; None if unknown."""
    others: tuple[OtherProcess, ...] = ()
    """Other processes on the GPU at that time."""
    step_seconds: float | None = None
    """Seconds of the last optimizer step; None where it was not reached."""
    seconds: float = 0.0
    """Seconds of the whole probe, from the start of its process."""
    refused: str = ""
    """The first line of the out-of-memory error that ended it; empty where none did."""
    refused_in: Phase | None = None

    @property
    def required_bytes(self) -> int | None:
        """Returns the device memory that it took: reserved, plus outside torch's allocator if known."""
        return None if self.measured is None else self.measured.peak_reserved_bytes + (self.non_torch_bytes or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Records that the training process failed and another one resumed."""

    step: int
    """The last optimizer step that the process reported."""
    resumed_at: int
    """The step of the checkpoint that the next process resumed from; 0 without one."""
    cause: str
    """One of ``training.causes.CAUSES``."""
    why: str
    """The cause, in one line."""
    change: str
    """The changes of the plan, as flags; empty for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """Holds what probes and runs taught, in order. The plan carries it, so that a resumed run starts with it.

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
"""The file in the output folder that the watch writes (``training.watch``); ``memory.rank1.jsonl`` is rank 1's."""
EVENTS_NAME = "events.jsonl"
"""The file in the output folder with the run's events: starts, checkpoints, incidents, restarts, its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReading:
    """Holds what was measured and logged at one step of one process."""

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
    """The readings of each process, at least the first one's, in the order of time."""
    happenings: tuple[RunMarker, ...]
    """In the order of time."""
    ending: str
    """How the run ended: ``finished``, ``interrupted``, ``failed``; empty while no end is recorded."""

    @property
    def moments(self) -> tuple[StepReading, ...]:
        """Returns the readings of the first process."""
        return self.ranks[0]
