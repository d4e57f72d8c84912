"""The levers, in one table, and the rungs that they make: what may be given up, in the order of the harm it does.

A lever moves one way: it takes bytes away and mostly costs something. Forbidding it forbids that direction only, so
``--forbid gradient_checkpointing`` plans without recomputation and ``--forbid micro_batch`` never shrinks the
micro-batch. A knob that the user gave is pinned: no lever on it is pulled, whether allowed or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import combinations
from typing import Any

from autotrain_mem.errors import UsageError
from autotrain_mem.planner.division import EVALUATED_ROWS, ROWS, STEPS
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Fit, Harm, Knobs
from autotrain_mem.spec.job import METHODS, ONLINE_METHODS


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderRow:
    """One lever. ``moves_from`` and ``to`` are values of its knob; both stay empty where it moves over a range."""

    name: str
    harm: Harm
    knobs: tuple[str, ...]
    moves_from: tuple[Any, ...] = ()
    to: Any = None
    also: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that only matter once this one has moved, and what they are set to where the user did not say."""
    along: tuple[str, ...] = ()
    """Levers pulled with this one: those of less harm where they are allowed, those of the same harm always."""
    instead_of: tuple[str, ...] = ()
    """Levers that this one makes pointless or impossible."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that other knobs must have."""
    methods: frozenset[str] = frozenset(METHODS)
    quantizes: bool = False
    """Quantizes the checkpoint's weights, which works once."""
    reason: str
    """One line for the user."""


EXPANDABLE = "expandable_segments"
"""The lever that is on no rung: any point may have it, at no cost (``Memo``)."""

_OFFLINE = frozenset(METHODS) - frozenset(ONLINE_METHODS)

LADDER = (
    LadderRow(
        name=EXPANDABLE,
        harm=Harm.NONE,
        knobs=(EXPANDABLE,),
        moves_from=(False,),
        to=True,
        reason="segments that grow page by page leave fewer gaps between tensors: the same training",
    ),
    LadderRow(
        name="eval_batch",
        harm=Harm.NONE,
        knobs=(EVALUATED_ROWS,),
        methods=_OFFLINE,  # elsewhere a batch of evaluation holds whole groups, or writes a few samples
        reason="evaluation takes no more rows at once than training does: the same results, in more batches",
    ),
    LadderRow(
        name="micro_batch",
        harm=Harm.TIME,
        knobs=(ROWS, STEPS),
        reason="fewer rows at once with more accumulation: the same optimizer steps in less memory",
    ),
    LadderRow(
        name="rollout_batch",
        harm=Harm.TIME,
        knobs=("local_rollout_forward_batch_size",),
        methods=frozenset({"ppo"}),
        reason="completions are generated and scored a few rows at a time",
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
        name="activation_offloading",
        harm=Harm.TIME,
        knobs=("activation_offloading",),
        moves_from=(False,),
        to=True,
        methods=_OFFLINE,  # the only TRL configs that have it
        reason="what the backward pass needs waits in host memory: the same gradients, with copies both ways",
    ),
    LadderRow(
        name="optimizer_offload",
        harm=Harm.TIME,
        knobs=("optimizer_offload",),
        moves_from=(False,),
        to=True,
        methods=frozenset(METHODS) - {"ppo"},  # its optimizer is made with the trainer, and holds two models
        needs={"optim": ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")},
        instead_of=("8bit_optimizer",),
        reason="optimizer state and step are the host's: the same updates, with copies of gradients and weights",
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
        name="8bit_base",
        harm=Harm.WHAT_IS_TRAINED,
        knobs=("load_in_8bit",),
        moves_from=(False,),
        to=True,
        along=("bf16_weights", "lora"),
        needs={"load_in_4bit": (False,)},
        quantizes=True,
        reason="the frozen base model's linear weights take one byte each",
    ),
    LadderRow(
        name="4bit_base",
        harm=Harm.WHAT_IS_TRAINED,
        knobs=("load_in_4bit",),
        moves_from=(False,),
        to=True,
        also={"use_bnb_nested_quant": True},
        along=("bf16_weights", "lora"),
        needs={"load_in_8bit": (False,)},
        quantizes=True,
        reason="the frozen base model's linear weights take half a byte each (nf4, with scales quantized too)",
    ),
    LadderRow(
        name="max_length",
        harm=Harm.DATA,
        knobs=("max_length",),
        methods=_OFFLINE,  # TRL truncates no prompt
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
    """One step of the ladder for one job.

    ``settings`` holds what the rung's levers make of the base knobs: all of them pulled first, then every smaller set
    of them that no rung before has pulled, fewest levers first. Batches and checkpointing stay free on each.
    ``lengths`` is empty on every rung but the one that shortens rows.
    """

    harm: Harm
    settings: tuple[Knobs, ...]
    lengths: tuple[int, ...] = ()

    @property
    def strongest(self) -> Knobs:
        """The settings that need least."""
        return self.settings[0]


FREE_ON_A_RUNG = ("eval_batch", "micro_batch", "rollout_batch", "gradient_checkpointing")
"""Levers that every rung may pull as far as it needs to."""

OFFLOADING = ("activation_offloading", "optimizer_offload")
ROUNDING = ("bf16_weights", "8bit_optimizer")
TRAINED = ("lora", "8bit_base", "4bit_base")


def _together(space: Space) -> tuple[tuple[str, ...], ...]:
    """Levers that share a rung, the rungs in the order of climbing; lengths come after them.

    What is trained is given up one step at a time: a bfloat16 base is both faster and closer to full fine-tuning than a
    quantized one. Before a level of more harm, offloading is tried once more with all that the level before gave up:
    time is the lesser price.
    """
    trained = [name for name in TRAINED if allowed(LEVERS[name], space)]
    last = [(name, "activation_offloading") for name in trained[-1:]]  # an adapter's optimizer state is small
    return (OFFLOADING, ROUNDING, (*ROUNDING, *OFFLOADING), *((name,) for name in trained), *last)


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
        and all(getattr(space.base, name) in values for name, values in row.needs.items())
        and all(_is_pulled(LEVERS[name], space) for name in row.along if LEVERS[name].harm == row.harm)
        and row.name not in space.forbid
        and not (space.is_quantized and row.quantizes)
        and row.harm <= FURTHEST[space.fit]
        and space.pinned.isdisjoint(row.knobs)
    )


def rungs(space: Space) -> tuple[Rung, ...]:
    """The ladder for one job, least harm first. The first rung is the job as asked for."""
    check_forbid(space.forbid)
    climbed = [Rung(harm=Harm.TIME, settings=(space.base,))]
    pulled: list[frozenset[str]] = [frozenset()]
    together = _together(space)
    for names in together:
        rows = _allowed_together(space, names)
        every = frozenset(row.name for row in rows)
        if any(every <= before for before in pulled):
            continue
        settings = tuple(_pull_all(space, chosen) for chosen in _sets(rows, pulled))
        climbed.append(Rung(harm=max(row.harm for row in rows), settings=settings))
        pulled.append(every)
    if lengths := _lengths(space):
        # Not the rung before: the last set of levers has none of its own where an earlier one held them all.
        least = _pull_all(space, _allowed_together(space, together[-1]))
        climbed.append(Rung(harm=Harm.DATA, settings=(least,), lengths=lengths))
    return tuple(climbed)


def _allowed_together(space: Space, names: Iterable[str]) -> list[LadderRow]:
    """Those of the levers that may be pulled and would move something, without those that another one replaces."""
    rows = [LEVERS[name] for name in names]
    rows = [row for row in rows if allowed(row, space) and _pull(row, space.base, space.pinned) != space.base]
    replaced = {name for row in rows for name in row.instead_of}
    return [row for row in rows if row.name not in replaced]


def _sets(rows: list[LadderRow], pulled: list[frozenset[str]]) -> Iterator[tuple[LadderRow, ...]]:
    """All levers, then every smaller set, fewest first; not the sets that a rung before, which did not fit, held."""
    yield tuple(rows)
    for size in range(1, len(rows)):
        for chosen in combinations(rows, size):
            names = frozenset(row.name for row in chosen)
            if not any(names <= before for before in pulled):
                yield chosen


def _is_pulled(row: LadderRow, space: Space) -> bool:
    """Whether the lever is pulled already, or may be."""
    return _pull(row, space.base, space.pinned) == space.base or allowed(row, space)


def _pull_all(space: Space, rows: Iterable[LadderRow]) -> Knobs:
    knobs = space.base
    for row in rows:
        for name in row.along:
            if allowed(LEVERS[name], space):
                knobs = _pull(LEVERS[name], knobs, space.pinned)
        knobs = _pull(row, knobs, space.pinned)
    return knobs


def _pull(row: LadderRow, knobs: Knobs, pinned: frozenset[str]) -> Knobs:
    moved = {name: row.to for name in row.knobs if getattr(knobs, name) in row.moves_from}
    if not moved:
        return knobs
    return replace(knobs, **{name: value for name, value in row.also.items() if name not in pinned}, **moved)


def _lengths(space: Space) -> tuple[int, ...]:
    """Lengths that would cut a row, shortest first; none where ``max_length`` may not move."""
    if not allowed(LEVERS["max_length"], space):
        return ()
    longest = space.row_tokens(space.base.max_length)
    fine = range(SHORTEST, min(COARSE_FROM, longest), FINE_GRID)
    lengths = (*fine, *range(COARSE_FROM, longest, COARSE_GRID))
    return tuple(length for length in lengths if length >= (space.shortest or 0))
