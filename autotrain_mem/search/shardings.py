"""Says how several processes may share a model, and what of it each one then holds."""

from __future__ import annotations

from dataclasses import replace

from autotrain_mem.search.space import Space
from autotrain_mem.settings.levers import LEVERS, SHARDING, pulled
from autotrain_mem.settings.optimizer_verdicts import OPTIMIZERS_OF_BITSANDBYTES
from autotrain_mem.settings.own import Sharding
from autotrain_mem.types import Knobs
from autotrain_mem.types.methods_table import METHODS

FASTEST_FIRST: tuple[Sharding, ...] = ("ddp", "fsdp2-no-reshard", "fsdp2", "hsdp")
"""What a search tries, in the order in which of equals the first is taken. FSDP's first version and DeepSpeed are
the user's to ask for."""

WITH_SHARED_TOKENS: tuple[Sharding, ...] = ("fsdp2-no-reshard", "fsdp2")
"""What goes with context parallelism: torch has it in FSDP2 only, and copies of shards beside it are not rehearsed."""

LEAST_FIRST: tuple[Sharding | None, ...] = (
    *("fsdp2", "fsdp1", "zero3", "hsdp", "fsdp2-no-reshard", "zero2", "zero1", "ddp", None),
)
"""By what a process holds."""

SAVES: dict[Sharding | None, frozenset[str]] = {
    "fsdp2-no-reshard": frozenset({"shards", "all nodes"}),
    "hsdp": frozenset({"shards", "reshards"}),
    "fsdp2": frozenset({"shards", "reshards", "all nodes"}),
    "fsdp1": frozenset({"shards", "reshards", "all nodes"}),
}
"""What of a device's bytes each saves by; whatever is a subset of another needs more."""


def shardings(space: Space) -> tuple[Sharding | None, ...]:
    """The ways that this job's processes may share its model, the fastest first of equals."""
    row = LEVERS[SHARDING]
    suits = row.suits(METHODS[space.method])
    is_fixed = not space.pinned.isdisjoint(row.knobs) or row.name in space.forbid or not suits
    if space.base.processes == 1 or is_fixed or not space.may_shard:
        return (space.base.sharding,)
    if space.base.sp_size > 1:
        return (space.base.sharding,)
    if space.base.cp_size > 1:
        return WITH_SHARED_TOKENS
    return tuple(each for each in FASTEST_FIRST if each != "hsdp" or space.nodes > 1)


def shared(space: Space, setting: Knobs) -> tuple[Knobs, ...]:
    """The setting in every way of sharing that goes with it; empty where none does."""
    if not space.base.has_group:
        return (setting,)
    ways = (replace(setting, sharding=each, dp_replicate_size=_groups(space, each)) for each in shardings(space))
    return tuple(way for way in ways if way == space.base or _goes_together(space, way))


def least_shared(space: Space, setting: Knobs) -> Knobs:
    """The way of sharing in which a process needs least."""
    return min(shared(space, setting), key=lambda way: LEAST_FIRST.index(way.sharding))


def _groups(space: Space, sharding: Sharding | None) -> int | None:
    """A whole set of shards on each node; what the user said where that is pinned."""
    return (space.base.dp_replicate_size or space.nodes) if sharding == "hsdp" else None


def _goes_together(space: Space, knobs: Knobs) -> bool:
    """Whether every lever that these knobs have goes with the others.

    Half the weights of what is trained is none under FSDP: with mixed precision accelerate makes trained parameters
    float32 again (``accelerate/utils/fsdp_utils.py: fsdp2_prepare_model`` and, for FSDP1, ``accelerator.py:
    prepare_model``).
    """
    is_cast = knobs.is_sharded and not knobs.zero_stage
    if is_cast and not knobs.use_peft and knobs.dtype != space.base.dtype:
        return False
    if knobs.is_sharded and OPTIMIZERS_OF_BITSANDBYTES.search(knobs.optim):
        return False
    moved = [row for row in pulled(knobs) if row.needs]
    return all(getattr(knobs, name) in values for row in moved for name, values in row.needs.items())
