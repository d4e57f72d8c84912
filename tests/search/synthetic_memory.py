"""A trainer's memory as a few straight lines, for searching in microseconds; and the brute force to compare with."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

from nouns import TRL_DEFAULTS, memory_of, reserved

from autotrain_mem.search.levels import levels
from autotrain_mem.search.memo import Memo, OnAttempt
from autotrain_mem.search.search import Limits, SearchResult, find, no_plan
from autotrain_mem.search.space import Space, make_space
from autotrain_mem.settings.knobs import EXPERTS
from autotrain_mem.settings.levers import EXPANDABLE, SLOWING
from autotrain_mem.settings.own import OF_DEEPSPEED
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Hardware, Job, Knobs, Owner, Phase, StepTime, Trained
from autotrain_mem.types.estimate import Estimate, MemoryEstimate, ReservedByMode, ReservedEstimate
from autotrain_mem.types.model import ModelFacts

TRL = TRL_DEFAULTS
SLOWED = {"gradient_checkpointing": 4 / 3, "activation_offloading": 1.2}
SLOWED |= {"optimizer_offload": 1.5, "fsdp_offload_params": 3.0}
ONLINE = replace(TRL, max_length=None, max_completion_length=64, num_generations=8)
EIGHT = replace(TRL, processes=8, sharding="ddp")
PPO = replace(TRL, max_length=None, response_length=53, local_rollout_forward_batch_size=64)


def space_of(
    *, longest: int | None = None, context_length: int | None = None, defaults: Knobs = TRL, **words: Any
) -> Space:
    """``space_of(per_device_train_batch_size=4, fit="lossless")``: a job in the user's words, made a space."""
    of_job = ("method", "effective_batch_size", "fit", "forbid", "max_slowdown")
    limits = {"method": "sft"} | {name: words.pop(name) for name in of_job if name in words}
    job = Job(model="toy-1B", dataset=None, arguments=words, **limits)
    return make_space(defaults, job, ModelFacts(context_length=context_length, is_quantized=False), longest=longest)


GROWING = (Owner.GATHERED_WEIGHTS, Owner.ACTIVATIONS, Owner.TEMPORARY)


@dataclass
class LinearMemory:
    """Predicts like a 1B-parameter model on a card with this budget, and keeps the calls.

    ``noise`` is the largest share by which a point's bytes stray from the line, the same each time it is asked.
    """

    budget_bytes: int
    parameters: int = 1_000_000_000
    activation_bytes: int = 600_000
    """Per token, without checkpointing; a sixth with it."""
    counts_parameters: bool = False
    """Whether it tells what exceeds the card by that number alone."""
    loss_bytes: int = 200_000
    """Per token, in the backward pass; what follows per token evaluated, and per row generated at once."""
    evaluated_bytes: int = 0
    rollout_bytes: int = 0
    noise: float = 0.0
    unmapped: float = 0.0
    """Share of the peak that expandable segments save of what native ones reserve."""
    copied_layers: int | None = None
    """Layers of the copies that are rehearsed unless the whole model is asked for; None: always the whole."""
    amiss: float = 0.0
    """The share by which what is expanded from such a copy falls short of the whole model's bytes, at most; negative
    where it is too much. Differs by point like ``noise``, and is never less than half of that."""
    frees_gradients: bool = True
    """Whether gradients come as activations go, where none are accumulated."""
    longest: int | None = None
    slowed: Mapping[str, float] = field(default_factory=SLOWED.copy)
    gather_seconds: float = 0.1
    """How long it takes to gather all weights from several processes once, in half precision."""
    reduced: float = 4.0
    """How many times that DDP needs to reduce the gradients: less than once for an adapter's."""
    update_seconds: float = 0.1
    misjudged: float = 1.0
    """By which factor the speed of what shares the model otherwise is misjudged."""
    cards: tuple[str, ...] = ()
    calls: list[Knobs] = field(default_factory=list)
    whole_calls: list[Knobs] = field(default_factory=list)
    foreseen: list[Sequence[Knobs]] = field(default_factory=list)

    def rehearse(self, points: Sequence[Knobs], *, whole: bool) -> list[Estimate]:
        self.calls += points
        whole = whole or self.copied_layers is None
        self.whole_calls += points if whole else []
        return [self.estimate(knobs) if whole else self.expanded(knobs) for knobs in points]

    def tokens_per_second(self, known: Estimate, knobs: Knobs) -> float:
        """What a point's speed would be with the levers of time of a rehearsed one."""
        names = ("activation_offloading", "optimizer_offload", "fsdp_offload_params")
        kept = {name: getattr(known.knobs, name) for name in names}
        misjudged = 1.0 if known.knobs.sharding == knobs.sharding else self.misjudged
        return self.time(replace(knobs, **kept)).tokens_per_second * misjudged

    def over_steps(self, estimate: Estimate) -> Estimate:
        return estimate

    def exceeds(self, knobs: Knobs) -> bool:
        weights = self.parameters * (4 if knobs.dtype == "float32" else 2)
        return self.counts_parameters and not knobs.base_bits and weights * (2 - knobs.use_peft) > self.budget_bytes

    def foresee(self, points: Sequence[Knobs], *, whole: bool) -> None:
        self.foreseen += [] if whole else [points]

    def would_fit(self, estimate: Estimate, *, rehearsed: bool) -> Sequence[str]:
        return self.cards

    def estimate(self, knobs: Knobs) -> Estimate:
        parts = {"hardware": self._hardware(), "memory": self._memory(knobs), "time": self.time(knobs)}
        return Estimate(knobs=knobs, budget_bytes=self.budget_bytes, **parts)

    def expanded(self, knobs: Knobs) -> Estimate:
        """The same as a copy with few layers has it."""
        whole = self.estimate(knobs)
        share = 1 - self.amiss * (1 + self._stray(knobs)) / 2
        phases = {phase: int(peak * share) for phase, peak in whole.memory.phases.items()}
        memory = replace(
            whole.memory,
            peak_allocated_bytes=max(phases.values()),
            phases=phases,
            owners_at_peak={owner: int(size * share) for owner, size in whole.memory.owners_at_peak.items()},
            reserved=self._reserved(max(phases.values()), knobs),
            rehearsed_layers=self.copied_layers,
        )
        return replace(whole, memory=memory)

    def time(self, knobs: Knobs) -> StepTime:
        """Half of a micro-batch of 512 tokens is lost to an idle card, and each lever of time has its price.

        Shards are gathered and reduced beside what is computed, but for a tenth; DDP reduces float32 once, afterwards.
        """
        rows, length = knobs.per_device_train_batch_size, self._length(knobs)
        slowed = [self.slowed[name] for name in SLOWING if getattr(knobs, name)]
        each = (rows * length + 512) * prod(slowed, start=1e-4)
        if knobs.is_sharded:
            joined = self.gather_seconds * (2 if knobs.sharding == "fsdp2-no-reshard" else 3)
            each = max(each, 0.9 * joined) + 0.1 * joined
        seconds = knobs.gradient_accumulation_steps * each
        if knobs.processes > 1:
            reduced = 0.0 if knobs.is_sharded else self.reduced * self.gather_seconds
            seconds += self.update_seconds / knobs.shards + reduced
        return StepTime(tokens=float(knobs.effective_batch_size * length), phases={Phase.BACKWARD: seconds})

    def _memory(self, knobs: Knobs) -> MemoryEstimate:
        owners = self.owners(knobs)
        static = sum(owners[owner] for owner in (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE))
        foreach = 0 if knobs.optimizer_offload else owners[Owner.GRADIENTS]
        backward = static + sum(owners[owner] for owner in GROWING)
        if self.frees_gradients and knobs.gradient_accumulation_steps == 1:
            begun = backward - owners[Owner.GRADIENTS]
            owners |= {Owner.GRADIENTS: 0} if begun > static + foreach else {}
            backward = max(begun, static)
        peaks = {Phase.GENERATE: static + (knobs.local_rollout_forward_batch_size or 0) * self.rollout_bytes}
        peaks |= {Phase.BACKWARD: backward, Phase.OPTIMIZER_STEP: static + foreach}
        evaluated = (knobs.per_device_eval_batch_size or 0) * self._length(knobs) * self.evaluated_bytes
        peaks |= {Phase.EVALUATE: static + evaluated}
        peak_phase = max(peaks, key=peaks.__getitem__)
        if peak_phase is not Phase.BACKWARD:
            owners |= {**dict.fromkeys(GROWING, 0), Owner.TEMPORARY: peaks[peak_phase] - static}
        trained = self.parameters // (100 if knobs.use_peft else 1)
        dtype = "bfloat16" if knobs.dtype == "bfloat16" else "float32"
        return memory_of(
            peaks[peak_phase],
            peak_phase=peak_phase,
            phases={Phase.LOAD: owners[Owner.WEIGHTS]} | peaks,
            owners_at_peak=owners,
            reserved=self._reserved(peaks[peak_phase], knobs),
            trained=Trained(parameters=trained, of_parameters=self.parameters, dtype=dtype),
        )

    def _reserved(self, peak_bytes: int, knobs: Knobs) -> ReservedByMode:
        def mode(share: float) -> ReservedEstimate:
            slack = int(peak_bytes * share)
            retries = peak_bytes + slack + self._hardware().non_torch_bytes > self.budget_bytes
            return reserved(peak_bytes + slack, slack_bytes=slack, retries=retries)

        cached = 0.03 + self.noise * self._stray(knobs)
        return ReservedByMode(native=mode(cached), expandable_segments=mode(cached - self.unmapped))

    def owners(self, knobs: Knobs) -> dict[Owner, int]:
        width = 2 if knobs.dtype == "bfloat16" else 4
        trained = self.parameters // 100 if knobs.use_peft else self.parameters
        tokens = knobs.per_device_train_batch_size * self._length(knobs)
        activation = self.activation_bytes // (6 if knobs.gradient_checkpointing else 1)
        moments = (
            0 if knobs.optimizer_offload else 2 if "8bit" in knobs.optim else 2 * width + 2 * knobs.sums_up_rounding
        )
        half_bytes = 1 if knobs.load_in_4bit else 2 if knobs.load_in_8bit else 2 * width
        weights = self.parameters * half_bytes // 2
        gathered = weights // (2 if width == 4 else 1) if knobs.is_sharded else 0
        shards = 10**9 if knobs.fsdp_offload_params else knobs.shards
        return {
            Owner.WEIGHTS: weights // shards,
            Owner.GRADIENTS: trained * width // shards,
            Owner.OPTIMIZER_STATE: trained * moments // shards,
            Owner.GATHERED_WEIGHTS: gathered // (1 if knobs.sharding == "fsdp2-no-reshard" else 10),
            Owner.ACTIVATIONS: tokens * activation // (4 if knobs.activation_offloading else 1),
            Owner.TEMPORARY: tokens * self.loss_bytes,
        }

    def _length(self, knobs: Knobs) -> int:
        return min((length for length in (knobs.max_length, self.longest) if length is not None), default=4096)

    def _hardware(self) -> Hardware:
        total = self.budget_bytes + 1 * GIB
        return Hardware(
            name="toy12", origin="named", total_bytes=total, free_bytes=total - 256 * MIB, non_torch_bytes=300 * MIB
        )

    def _stray(self, knobs: Knobs) -> float:
        """The same for both kinds of segments, and for knobs that no search of a dense model moves; in any order."""
        knobs = replace(knobs, expandable_segments=False)
        names = sorted(each.name for each in fields(knobs) if each.name not in (*OF_DEEPSPEED, *EXPERTS))
        return zlib.crc32(", ".join(f"{name}={getattr(knobs, name)!r}" for name in names).encode()) / 2**32


def search(
    space: Space, model: LinearMemory, on_attempt: OnAttempt = lambda attempt: None, limits: Limits | None = None
) -> SearchResult:
    """Raises DoesNotFitError, and PlanError for limits."""
    memo = Memo(space, model, on_attempt)
    found = find(space, memo, limits)
    if found is None:
        raise no_plan(space, memo, limits)
    return found


def brute_force(space: Space, model: LinearMemory) -> tuple[str, float] | None:
    """The first level on which anything fits, and the most tokens per second there, by asking for every point.

    Lengths are left out.
    """
    allow_expandable = not {EXPANDABLE} & (space.pinned | space.forbid)
    for level in levels(space):
        points = [] if level.lengths else [knobs for line in level.lines for knobs in line]
        estimates = [model.estimate(knobs) for knobs in points]
        fitting = [each for each in estimates if each.fits or (allow_expandable and each.growing().fits)]
        if fitting:
            return level.name, max(each.tokens_per_second for each in fitting)
    return None
