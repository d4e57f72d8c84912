"""Workers that rehearse in no time, by a table of what settings need."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.support.errors import ModelNotFoundError, RehearsalError, UsageError
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Block, DataProfile, Fingerprint, Hardware, Job, Knobs, Owner, Phase, Trace, Workload
from autotrain_mem.types.findings import Preflight
from autotrain_mem.types.model import ModelFacts
from autotrain_mem.types.work import Kind, Work


class Rehearsed(NamedTuple):
    """What a worker was asked to rehearse."""

    job: Job
    knobs: Knobs
    length: int
    kernels: tuple[int, int]


def billion(job: Job, knobs: Knobs) -> list[int]:
    """Weights of a model of 1B parameters, and all else: each row takes 1 GiB, a fourth of that where recomputed."""
    width = 2 if knobs.dtype == "bfloat16" else 4
    weights = 10**9 // 2 if knobs.load_in_4bit else 10**9 if knobs.load_in_8bit else 10**9 * width
    moments = 0 if knobs.optimizer_offload else 2 if knobs.optim == "adamw_8bit" else 2 * width
    trained = 0 if knobs.use_peft else 10**9 * (width + moments)
    return [weights, trained + GIB * knobs.per_device_train_batch_size // (4 if knobs.gradient_checkpointing else 1)]


@dataclass
class FakeWorker:
    """Rehearses in no time; recomputation is twice the work."""

    sizes: Callable[[Job, Knobs], Sequence[int]] = billion
    """Bytes of the weights, and of the blocks that are held at the end of backward."""
    context_length: int | None = None
    failing: frozenset[str] = frozenset()
    """Methods whose rehearsal raises."""
    refusing: frozenset[tuple[int, int]] = frozenset()
    """Cards' capabilities that refuse the job."""
    longest: int = 512
    parameters: int | None = None
    uncounted_rows: int | None = None
    """Of data whose tokens cannot be counted."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of models, by their names."""
    asked: list[Rehearsed] = field(default_factory=list)

    def describe(self, job: Job, compute_capability: tuple[int, int]) -> ModelFacts:
        if compute_capability in self.refusing:
            raise UsageError(f"{compute_capability} has no such kernel.")
        digest = self.digests.get(job.model, "")
        facts = {"context_length": self.context_length, "parameters": self.parameters}
        return ModelFacts(is_quantized=False, digest=digest, **facts)

    def preflight(self, job: Job, compute_capability: tuple[int, int], **facts: bool) -> Preflight:
        return Preflight(findings=(), parameters=None, rows=self.uncounted_rows)

    def fingerprint(self, job: Job) -> Fingerprint:
        return Fingerprint(digest=str(self.longest), names_files=False)

    def profile(self, job: Job, on_counting: object) -> DataProfile:
        if self.uncounted_rows is not None:
            raise ModelNotFoundError("m has no tokenizer.")
        return DataProfile(rows_by_length={100: 9, self.longest: 1})

    def rehearse(self, job: Job, knobs: Knobs, length: int, kernels: tuple[int, int], **copies: None) -> Trace:
        self.asked.append(Rehearsed(job, knobs, length, kernels))
        if job.method in self.failing:
            raise RehearsalError("It raised.")
        weights, *others = self.sizes(job, knobs)
        held = [(Owner.WEIGHTS, weights), *((Owner.ACTIVATIONS, size) for size in others)]
        blocks = tuple(Block(size_bytes=size, owner=owner, module="") for owner, size in held)
        return Trace(
            blocks=blocks,
            events=array("q", range(1, len(blocks) + 1)),
            phase_starts=((0, Phase.LOAD), (1, Phase.BACKWARD)),
            operators=1,
            pinned_host_bytes=8 * GIB if knobs.optimizer_offload else 0,
            seconds=0.0,
            work=work_of(knobs),
        )


def work_of(knobs: Knobs) -> Workload:
    flops = (2 if knobs.gradient_checkpointing else 1) * knobs.per_device_train_batch_size * 10**12
    kind = {"phase": Phase.BACKWARD, "kind": Kind.MATMUL, "dtype": "bfloat16"}
    work = Work(flops=flops, bytes=0, fixed_bytes=0, launches=1, count=1, **kind)
    return Workload(work=(work,), micro_steps=1, optimizer_steps=1)


def rehearsals(worker: Any, job: Job, card: Hardware, defaults: Knobs = TRL_DEFAULTS, **more: Any) -> api.Rehearsals:
    return api.Rehearsals(workers=api.Workers(started=[worker]), job=job, defaults=defaults, hardware=card, **more)


def toy(gib: float, name: str = "toy", **more: Any) -> Hardware:
    size = int(gib * GIB)
    sizes = {"total_bytes": size, "free_bytes": size, "non_torch_bytes": 0}
    return Hardware(name=name, **{"origin": "imagined", **sizes, **more})
