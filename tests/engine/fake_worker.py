"""Workers that rehearse in no time, by a table of what settings need."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotrain_mem.errors import RehearsalError
from autotrain_mem.spec import Block, DataProfile, Job, Knobs, Owner, Phase, Trace
from autotrain_mem.spec.model import ModelFacts
from autotrain_mem.spec.preflight import Preflight


@dataclass
class FakeWorker:
    """Rehearses in no time."""

    sizes: Callable[[Job, Knobs], Sequence[int]]
    """Bytes of the blocks that are held at the end of backward."""
    context_length: int | None = None
    failing: frozenset[str] = frozenset()
    """Methods whose rehearsal raises."""
    asked: list[tuple[Job, Knobs, int]] = field(default_factory=list)

    def describe(self, job: Job, compute_capability: tuple[int, int]) -> ModelFacts:
        return ModelFacts(context_length=self.context_length, is_quantized=False)

    def preflight(self, job: Job, compute_capability: tuple[int, int], **facts: bool) -> Preflight:
        return Preflight(findings=(), parameters=None)

    def fingerprint(self, job: Job) -> str:
        return "data"

    def profile(self, job: Job, on_counting: object) -> DataProfile:
        return DataProfile(rows_by_length={512: 100})

    def rehearse(self, job: Job, knobs: Knobs, length: int, kernels: tuple[int, int], **copies: None) -> Trace:
        if job.method in self.failing:
            raise RehearsalError("It raised.")
        self.asked.append((job, knobs, length))
        blocks = [Block(size_bytes=size, owner=Owner.ACTIVATIONS, module="") for size in self.sizes(job, knobs)]
        return Trace(
            blocks=tuple(blocks),
            events=array("q", range(1, len(blocks) + 1)),
            phase_starts=((0, Phase.BACKWARD),),
            operators=1,
            seconds=0.0,
        )
