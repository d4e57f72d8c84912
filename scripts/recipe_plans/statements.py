"""Writes the generated lines of a recipe's header, and the contents of its golden files, from a plan."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from autotrain_mem.report import formatting
from autotrain_mem.support import codec
from autotrain_mem.support.units import MIB, format_bytes, rate
from autotrain_mem.support.yaml_files import Recipe
from autotrain_mem.types import Knobs, Plan

VERSIONED = ("torch", "transformers", "trl", "peft", "bitsandbytes")
WIDTH = 120
_LABEL = 10
"""The width of the column of labels: the longest is ``settings``, followed by two spaces."""


def header(recipe: Recipe, plan: Plan, versions: Mapping[str, str]) -> list[str]:
    """Returns the lines of a header from ``# card`` on, which are derived from the plan. ``versions``: the versions of
    all packages in :data:`VERSIONED`."""
    kept = plan.estimate.reserved
    allocated, needed, budget = map(
        format_bytes, (kept.peak_allocated_bytes, plan.estimate.required_bytes, plan.estimate.budget_bytes)
    )
    return [
        *_labelled("card", recipe.card),
        *(_labelled("gpus", str(recipe.gpus)) if recipe.gpus > 1 else ()),
        *_labelled("versions", ", ".join(f"{name} {versions[name]}" for name in VERSIONED)),
        *_labelled("peak", f"{allocated} allocated; it needs {needed} of a budget of {budget}"),
        *_labelled("level", plan.level),
        *_labelled("settings", formatting.settings(plan.knobs)),
        *_labelled("speed", formatting.speed(plan.estimate.time)),
        *(line for said in why(plan) for line in _labelled("why", said)),
    ]


def why(plan: Plan) -> Iterator[str]:
    """Yields the owners of memory at the peak, each lever with its reason, and alternatives to the plan.

    Owners with at least a tenth of the peak are listed: ``at the peak, in the backward phase: weights 1.84 GiB, ...``.
    """
    memory = plan.estimate.memory
    held = sorted(memory.owners_at_peak.items(), key=lambda each: -each[1])
    owners = [
        f"{formatting.OWNERS[owner]} {format_bytes(size_bytes)}"
        for owner, size_bytes in held
        if size_bytes >= 0.1 * memory.peak_allocated_bytes
    ]
    yield f"at the peak, in the {formatting.PHASES[memory.peak_phase]} phase: {', '.join(owners)}"
    for lever in plan.levers:
        before, after = formatting.value(lever.before), formatting.value(lever.after)
        yield f"{lever.name} {before} -> {after}: {lever.why}"
    yield from _other_points(plan)
    for other in filter(lambda level: level.fits, plan.alternatives):
        faster = "" if other.ratio is None else f", at {other.ratio:.1f} x the speed"
        yield f"{other.level} would fit too{faster}"


def _other_points(plan: Plan) -> Iterator[str]:
    """Yields the outcome of the next larger micro-batch and of the plan without checkpointing, if the search tried them
    and no lever's reason states it."""
    chosen, told = plan.knobs, " ".join(lever.why for lever in plan.levers)
    met = {each.knobs: each for each in plan.attempts if format_bytes(each.required_bytes) not in told}
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "local_rollout_forward_batch_size")
    larger = [
        knobs
        for knobs in met
        if knobs.per_device_train_batch_size > chosen.per_device_train_batch_size
        and knobs == replace(chosen, **{name: getattr(knobs, name) for name in names})
    ]
    larger.sort(key=lambda knobs: knobs.per_device_train_batch_size)
    kept = replace(chosen, gradient_checkpointing=False)
    for knobs in [*larger[:1], *([kept] if kept != chosen else [])]:
        if knobs in met:
            without = "" if knobs.gradient_checkpointing == chosen.gradient_checkpointing else " without checkpointing"
            outcome = f"would need {format_bytes(met[knobs].required_bytes)}"
            if met[knobs].fits:
                outcome = f"would fit too, at {rate(met[knobs].tokens_per_second or 0.0)} tokens/s"
            yield f"{formatting.batch(knobs)}{without} {outcome}"


def _labelled(label: str, said: str) -> list[str]:
    first, then = f"# {label:{_LABEL}}", f"# {'':{_LABEL}}"
    return textwrap.wrap(said, WIDTH, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)


def written_by_hand(text: str) -> tuple[list[str], list[str]]:
    """Returns the lines above ``# card`` and those below the header, which are never generated."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("# card "))
    last = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return lines[:first], lines[last:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """The contents of a golden file: the facts of one plan that are compared."""

    level: str
    required_mib: int
    budget_mib: int
    knobs: Knobs
    levers: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan) -> Self:
        moved = (
            f"{lever.name} {formatting.value(lever.before)} -> {formatting.value(lever.after)}" for lever in plan.levers
        )
        return cls(
            level=plan.level,
            required_mib=round(plan.estimate.required_bytes / MIB),
            budget_mib=round(plan.estimate.budget_bytes / MIB),
            knobs=plan.knobs,
            levers=tuple(moved),
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """Parses the text that :meth:`__str__` returns. Raises ValueError for any other text."""
        level, needs, knobs, *levers = (line.partition(" ")[2] for line in text.splitlines())
        required, _, _, budget, _ = needs.split()
        return cls(
            level=level,
            required_mib=int(required),
            budget_mib=int(budget),
            knobs=codec.from_json(Knobs, json.loads(knobs)),
            levers=tuple(levers),
        )

    def __str__(self) -> str:
        lines = [
            f"level {self.level}",
            f"needs {self.required_mib} MiB of {self.budget_mib} MiB",
            f"knobs {json.dumps(codec.to_json(self.knobs), sort_keys=True)}",
            *(f"lever {lever}" for lever in self.levers),
        ]
        return "\n".join(lines) + "\n"
