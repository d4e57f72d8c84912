"""The levers, in one table: what may be given up, in the order of the harm it does, and what each one excludes.

A lever moves one way: it takes bytes away and mostly costs something. Forbidding it forbids that direction only, so
``--forbid gradient_checkpointing`` plans without recomputation and ``--forbid micro_batch`` never shrinks the
micro-batch. A knob that the user gave is pinned: no lever on it is pulled, whether allowed or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from autotrain_mem.errors import UsageError
from autotrain_mem.methods.table import METHODS, methods_where
from autotrain_mem.planner.division import EVALUATED_ROWS, ROWS, STEPS
from autotrain_mem.planner.precision import half_of
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Fit, Harm, Knobs


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

HALF_WEIGHTS = "bf16_weights"
"""Its weights are float16 where the card has no bfloat16 (``precision.half_of``)."""

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
        methods=methods_where(
            lambda method: not method.is_online
        ),  # elsewhere a batch of evaluation holds whole groups, or writes a few samples
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
        methods=methods_where(lambda method: "local_rollout_forward_batch_size" in method.knobs),
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
        methods=methods_where(lambda method: method.has_activation_offload),
        reason="what the backward pass needs waits in host memory: the same gradients, with copies both ways",
    ),
    LadderRow(
        name="optimizer_offload",
        harm=Harm.TIME,
        knobs=("optimizer_offload",),
        moves_from=(False,),
        to=True,
        methods=methods_where(lambda method: not method.makes_optimizer_early),
        needs={"optim": ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"), "fp16": (False,)},
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
        needs={"optimizer_offload": (False,)},  # bitsandbytes' kernels are the device's
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
        methods=methods_where(lambda method: not method.is_online),  # TRL truncates no prompt
        reason="rows are truncated to fewer tokens",
    ),
)

LEVERS = {row.name: row for row in LADDER}

FURTHEST: dict[Fit, Harm] = {"lossless": Harm.TIME, "rounding": Harm.ROUNDING, "all": Harm.DATA}
"""The last harm level that each ``--fit`` allows."""

MICRO_BATCH = "micro_batch"
BATCHES = ("eval_batch", MICRO_BATCH, "rollout_batch")
"""Levers that move over a range. They and checkpointing are free at every level."""
FREE = (*BATCHES, "gradient_checkpointing")
OFFLOADING = ("activation_offloading", "optimizer_offload")
ROUNDING = ("bf16_weights", "8bit_optimizer")
TRAINED = ("lora", "8bit_base", "4bit_base")


def lever_name(row: LadderRow) -> str:
    """As a plan calls it: by its knob, and by itself where it moves several (``micro_batch``)."""
    return row.name if row.name == MICRO_BATCH else row.knobs[0]


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


def pull_all(space: Space, names: Iterable[str]) -> Knobs:
    """The knobs asked for with these levers pulled, and with those that come along where they may."""
    knobs = space.base
    for row in (LEVERS[name] for name in names):
        for name in row.along:
            if allowed(LEVERS[name], space):
                knobs = _pull(LEVERS[name], knobs, space.pinned)
        knobs = _pull(row, knobs, space.pinned)
    return knobs


def moves(name: str, space: Space) -> bool:
    """Whether a lever may be pulled and would change anything."""
    return allowed(LEVERS[name], space) and _pull(LEVERS[name], space.base, space.pinned) != space.base


def _is_pulled(row: LadderRow, space: Space) -> bool:
    """Whether the lever is pulled already, or may be."""
    return _pull(row, space.base, space.pinned) == space.base or allowed(row, space)


def _pull(row: LadderRow, knobs: Knobs, pinned: frozenset[str]) -> Knobs:
    to: Any = half_of(knobs) if row.name == HALF_WEIGHTS else row.to
    moved = {name: to for name in row.knobs if getattr(knobs, name) in row.moves_from}
    if not moved:
        return knobs
    return replace(knobs, **{name: value for name, value in row.also.items() if name not in pinned}, **moved)
