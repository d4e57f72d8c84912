"""The levers, in one table, and the rungs that they make: what may be given up, in the order of the harm it does.

A lever moves one way: it takes bytes away and costs something. Forbidding it forbids that direction only, so
``--forbid gradient_checkpointing`` plans without recomputation and ``--forbid micro_batch`` never shrinks the
micro-batch. A knob that the user gave is pinned: no lever on it is pulled, whether allowed or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import combinations
from typing import Any

from autotrain_mem.errors import UsageError
from autotrain_mem.planner.space import ROWS, STEPS, Space
from autotrain_mem.spec import Fit, Harm, Knobs


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderRow:
    """One lever. ``moves_from`` and ``to`` are values of its knob; both stay empty where it moves over a range."""

    name: str
    harm: Harm
    knobs: tuple[str, ...]
    moves_from: tuple[Any, ...] = ()
    to: Any = None
    along: tuple[str, ...] = ()
    """Levers of less harm that are pulled with this one where they are allowed."""
    methods: frozenset[str] = frozenset({"sft"})
    reason: str
    """One line for the user."""


LADDER = (
    LadderRow(
        name="micro_batch",
        harm=Harm.TIME,
        knobs=(ROWS, STEPS),
        reason="fewer rows at once with more accumulation: the same optimizer steps in less memory",
    ),
    LadderRow(
        name="gradient_checkpointing",
        harm=Harm.TIME,
        knobs=("gradient_checkpointing",),
        moves_from=(False,),
        to=True,
        reason="activations are recomputed in the backward pass instead of kept: the same gradients, more time",
    ),
    LadderRow(
        name="bf16_weights",
        harm=Harm.ROUNDING,
        knobs=("dtype",),
        moves_from=("float32",),
        to="bfloat16",
        reason="weights, gradients and optimizer state take half the bytes and are rounded to bfloat16",
    ),
    LadderRow(
        name="8bit_optimizer",
        harm=Harm.ROUNDING,
        knobs=("optim",),
        moves_from=("adamw_torch", "adamw_torch_fused"),
        to="adamw_8bit",
        reason="AdamW's two moments take one byte each per parameter, quantized block by block",
    ),
    LadderRow(
        name="lora",
        harm=Harm.WHAT_IS_TRAINED,
        knobs=("use_peft",),
        moves_from=(False,),
        to=True,
        along=("bf16_weights",),  # a frozen base has no update that rounding could swallow
        reason="a LoRA adapter is trained and the base model stays frozen",
    ),
    LadderRow(
        name="max_length",
        harm=Harm.DATA,
        knobs=("max_length",),
        reason="rows are truncated to fewer tokens",
    ),
)

LEVERS = {row.name: row for row in LADDER}

FURTHEST: dict[Fit, Harm] = {"lossless": Harm.TIME, "rounding": Harm.ROUNDING, "all": Harm.DATA}
"""The last harm level that each ``--fit`` allows."""

SHORTEST = 64
FINE_GRID = 16
COARSE_GRID = 64
COARSE_FROM = 256
"""Lengths tried, in tokens: 64, 80, ... 256, 320, 384 and so on. Attention kernels work on tiles of 64 or 128 tokens,
so that a finer grid buys little; below 256 a step of 64 would cut too much of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One harm level of the ladder for one job.

    ``settings`` holds what the level's levers make of the base knobs: all of them pulled first, then every smaller
    set of them, fewest levers first. Micro-batch and checkpointing stay free on each. ``lengths`` is empty on every
    rung but the one that shortens rows.
    """

    harm: Harm
    settings: tuple[Knobs, ...]
    lengths: tuple[int, ...] = ()

    @property
    def strongest(self) -> Knobs:
        """The settings that need least."""
        return self.settings[0]


def check_forbid(names: Iterable[str]) -> frozenset[str]:
    """The names, if each is a lever: ``check_forbid(["lora"])``.

    Raises:
        UsageError: with the lever that was probably meant, for every unknown name at once.
    """
    names = frozenset(names)
    unknown = sorted(names - LEVERS.keys())
    if not unknown:
        return names
    guesses = [f"--forbid {guess} instead of {name}" for name in unknown if (guess := _meant(name))]
    did_you_mean = f"did you mean {', '.join(guesses)}?\n" if guesses else ""
    raise UsageError(
        f"--forbid knows no lever named {', '.join(unknown)}",
        hint=f"{did_you_mean}the levers are {', '.join(LEVERS)}",
    )


def _meant(name: str) -> str | None:
    """The lever that moves the knob of this name, or else the one that is spelt most like it."""
    of_knob = [row.name for row in LADDER if name in row.knobs]
    return next(iter(of_knob or get_close_matches(name, LEVERS, n=1, cutoff=0.5)), None)


def allowed(row: LadderRow, space: Space) -> bool:
    """Whether this job's method, pins and limits let the lever be pulled."""
    return (
        space.method in row.methods
        and row.name not in space.forbid
        and row.harm <= FURTHEST[space.fit]
        and space.pinned.isdisjoint(row.knobs)
    )


def rungs(space: Space) -> tuple[Rung, ...]:
    """The ladder for one job, least harm first. The first rung is the job as asked for.

    Levels NONE and TIME share it: neither changes what is computed, so only speed chooses there.
    """
    check_forbid(space.forbid)
    climbed = [Rung(harm=Harm.TIME, settings=(space.base,))]
    above = {harm: _settings(space, harm) for harm in (Harm.ROUNDING, Harm.WHAT_IS_TRAINED)}
    climbed += [Rung(harm=harm, settings=settings) for harm, settings in above.items() if settings]
    if lengths := _lengths(space):
        climbed.append(Rung(harm=Harm.DATA, settings=(climbed[-1].strongest,), lengths=lengths))
    return tuple(climbed)


def _settings(space: Space, harm: Harm) -> tuple[Knobs, ...]:
    """What this level's levers make of the base: every set of them, the whole set first, then the smallest."""
    rows = [row for row in LADDER if row.harm == harm and allowed(row, space) and _pull(row, space.base) != space.base]
    sizes = [len(rows), *range(1, len(rows))] if rows else []
    return tuple(_pull_all(space, chosen) for size in sizes for chosen in combinations(rows, size))


def _pull_all(space: Space, rows: Iterable[LadderRow]) -> Knobs:
    knobs = space.base
    for row in rows:
        for name in row.along:
            if allowed(LEVERS[name], space):
                knobs = _pull(LEVERS[name], knobs)
        knobs = _pull(row, knobs)
    return knobs


def _pull(row: LadderRow, knobs: Knobs) -> Knobs:
    (name,) = row.knobs
    return replace(knobs, **{name: row.to}) if getattr(knobs, name) in row.moves_from else knobs


def _lengths(space: Space) -> tuple[int, ...]:
    """Lengths that would cut a row, shortest first; none where ``max_length`` may not move."""
    if not allowed(LEVERS["max_length"], space):
        return ()
    longest = space.row_tokens(space.base.max_length)
    fine = range(SHORTEST, min(COARSE_FROM, longest), FINE_GRID)
    return (*fine, *range(COARSE_FROM, longest, COARSE_GRID))
