"""A trainer's memory as a few straight lines, for searching in microseconds; and the brute force to compare with."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from nouns import TRL_DEFAULTS

from autotrain_mem.planner.points import relative_cost
from autotrain_mem.planner.space import Space, make_space
from autotrain_mem.spec import Estimate, Hardware, Harm, Job, Knobs, MemoryEstimate, Owner, Phase
from autotrain_mem.units import GIB, MIB

TRL = TRL_DEFAULTS


def space_of(
    *, longest: int | None = None, context_length: int | None = None, defaults: Knobs = TRL, **words: object
) -> Space:
    """``space_of(per_device_train_batch_size=4, fit="lossless")``: a job in the user's words, made a space."""
    limits = {name: words.pop(name) for name in ("effective_batch_size", "fit", "forbid") if name in words}
    job = Job(method="sft", model="toy-1B", dataset=None, arguments=words, **limits)  # type: ignore[arg-type]
    return make_space(defaults, job, context_length=context_length, longest=longest)


@dataclass
class LinearMemory:
    """Predicts like a 1B-parameter model on a card with this budget, and keeps the calls.

    ``noise`` is the largest share by which a point's bytes stray from the line, the same each time it is asked.
    """

    budget_bytes: int
    parameters: int = 1_000_000_000
    activation_bytes: int = 600_000
    """Per token, without checkpointing; a sixth with it."""
    loss_bytes: int = 200_000
    """Per token, in the backward pass."""
    noise: float = 0.0
    longest: int | None = None
    calls: list[Knobs] = field(default_factory=list)

    def __call__(self, knobs: Knobs) -> Estimate:
        self.calls.append(knobs)
        return self.estimate(knobs)

    def estimate(self, knobs: Knobs) -> Estimate:
        owners = self._owners(knobs)
        static = sum(owners[owner] for owner in (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE))
        foreach = owners[Owner.GRADIENTS]
        backward = static + owners[Owner.ACTIVATIONS] + owners[Owner.TEMPORARY]
        phases = {Phase.LOAD: owners[Owner.WEIGHTS], Phase.BACKWARD: backward, Phase.OPTIMIZER_STEP: static + foreach}
        if static + foreach > backward:
            owners |= {Owner.ACTIVATIONS: 0, Owner.TEMPORARY: foreach}
        peak_phase = max(phases, key=phases.__getitem__)
        memory = MemoryEstimate(
            peak_allocated_bytes=phases[peak_phase],
            peak_phase=peak_phase,
            phases=phases,
            owners_at_peak=owners,
            modules_at_peak=(),
            reserve_allowance_bytes=int(phases[peak_phase] * (0.03 + self.noise * self._stray(knobs))),
            not_counted=(),
            rehearsal_seconds=1.0,
        )
        return Estimate(knobs=knobs, hardware=self._hardware(), memory=memory, budget_bytes=self.budget_bytes)

    def _owners(self, knobs: Knobs) -> dict[Owner, int]:
        width = 2 if knobs.dtype == "bfloat16" else 4
        trained = self.parameters // 100 if knobs.use_peft else self.parameters
        lengths = [length for length in (knobs.max_length, self.longest) if length is not None]
        tokens = knobs.per_device_train_batch_size * min(lengths, default=4096)
        activation = self.activation_bytes // (6 if knobs.gradient_checkpointing else 1)
        return {
            Owner.WEIGHTS: self.parameters * width,
            Owner.GRADIENTS: trained * width,
            Owner.OPTIMIZER_STATE: trained * (2 if "8bit" in knobs.optim else 2 * width),
            Owner.ACTIVATIONS: tokens * activation,
            Owner.TEMPORARY: tokens * self.loss_bytes,
        }

    def _hardware(self) -> Hardware:
        total = self.budget_bytes + 1 * GIB
        return Hardware(
            name="toy12", origin="named", total_bytes=total, free_bytes=total - 256 * MIB, non_torch_bytes=300 * MIB
        )

    def _stray(self, knobs: Knobs) -> float:
        return zlib.crc32(repr(knobs).encode()) / 2**32


def brute_force(space: Space, model: LinearMemory) -> tuple[Harm, float] | None:
    """Least harm at which anything fits, and the least cost there, by asking for every point. Lengths left out."""
    fitting = [(harm, relative_cost(space, knobs)) for harm, knobs in every_point(space) if model.estimate(knobs).fits]
    return min(fitting, default=None)


def every_point(space: Space) -> Iterator[tuple[Harm, Knobs]]:
    """Every allowed point at the length asked for, written out independently of the ladder's table."""
    free = {name for name in ("dtype", "optim", "use_peft") if name not in space.pinned}
    rounding = space.fit != "lossless"
    bf16 = rounding and "dtype" in free and "bf16_weights" not in space.forbid
    eight_bit = rounding and "optim" in free and "8bit_optimizer" not in space.forbid
    lora = space.fit == "all" and "use_peft" in free and "lora" not in space.forbid
    for dtype, optim in product(_either(bf16, space.base.dtype, "bfloat16"), _either(eight_bit, space.base.optim, "8")):
        setting = replace(space.base, dtype=dtype, optim="adamw_8bit" if optim == "8" else optim)
        harm = Harm.TIME if setting == space.base else Harm.ROUNDING
        yield from ((harm, knobs) for knobs in _time_points(space, setting))
    if lora and not space.base.use_peft:
        setting = replace(space.base, use_peft=True, dtype="bfloat16" if bf16 else space.base.dtype)
        yield from ((Harm.WHAT_IS_TRAINED, knobs) for knobs in _time_points(space, setting))


def _either(may_move: bool, base: str, other: str) -> tuple[str, ...]:
    return (base, other) if may_move else (base,)


def _time_points(space: Space, setting: Knobs) -> Iterator[Knobs]:
    checkpointing = {False, True}
    if "gradient_checkpointing" in space.pinned:
        checkpointing = {setting.gradient_checkpointing}
    elif "gradient_checkpointing" in space.forbid:
        checkpointing = {False}
    whole = space.effective_batch_size
    rows = {each for each in range(1, whole + 1) if whole % each == 0}
    if space.pinned & {"per_device_train_batch_size", "gradient_accumulation_steps"}:
        rows = {setting.per_device_train_batch_size}
    elif "micro_batch" in space.forbid:
        rows = {each for each in rows if each >= setting.per_device_train_batch_size}
    for recompute, each in product(checkpointing, rows):
        yield replace(
            setting,
            gradient_checkpointing=recompute,
            per_device_train_batch_size=each,
            gradient_accumulation_steps=whole // each,
        )
