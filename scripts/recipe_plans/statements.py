"""What a recipe's header says of its plan, and what a golden file keeps of it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotrain_mem.cookbook import Recipe
from autotrain_mem.report import wording
from autotrain_mem.spec import Knobs, Plan
from autotrain_mem.units import MIB, format_bytes

VERSIONED = ("torch", "transformers", "trl", "peft", "bitsandbytes")
WIDTH = 120
_LABEL = 10
"""Columns of ``settings  ``, the longest label, and of the space behind it."""


def header(recipe: Recipe, plan: Plan, versions: Mapping[str, str]) -> list[str]:
    """The lines from ``# card`` on, which only a plan can tell.

    Args:
        versions: Of every package in :data:`VERSIONED`.
    """
    kept = plan.estimate.reserved
    allocated, needed, budget = map(
        format_bytes, (kept.peak_allocated_bytes, plan.estimate.required_bytes, plan.estimate.budget_bytes)
    )
    return [
        *_labelled("card", recipe.card),
        *_labelled("versions", ", ".join(f"{name} {versions[name]}" for name in VERSIONED)),
        *_labelled("peak", f"{allocated} allocated; it needs {needed} of a budget of {budget}"),
        *_labelled("level", plan.level),
        *_labelled("settings", wording.settings(plan.knobs)),
        *_labelled("speed", wording.speed(plan.estimate.time)),
        *(line for said in why(plan) for line in _labelled("why", said)),
    ]


def why(plan: Plan) -> Iterator[str]:
    """Each lever with its reason, and what the levels below would need."""
    for lever in plan.levers:
        before, after = wording.value(lever.before), wording.value(lever.after)
        yield f"{lever.name} {before} -> {after}: {lever.why}"
    if not plan.levers:
        yield "it fits as it stands: nothing is changed"
    for other in plan.alternatives:
        if not other.fits:
            needed = format_bytes(other.required_bytes)
            yield f"{other.level} would need {needed}: {wording.settings(other.knobs)}"


def _labelled(label: str, said: str) -> list[str]:
    first, then = f"# {label:{_LABEL}}", f"# {'':{_LABEL}}"
    return textwrap.wrap(said, WIDTH, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)


def written_by_hand(text: str) -> tuple[list[str], list[str]]:
    """(what stands above ``# card``, what stands below the header): the lines that are nobody's but the author's."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("# card "))
    last = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return lines[:first], lines[last:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """What a golden file keeps of one plan."""

    level: str
    required_mib: int
    budget_mib: int
    knobs: Knobs
    levers: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan) -> Golden:
        moved = (f"{lever.name} {wording.value(lever.before)} -> {wording.value(lever.after)}" for lever in plan.levers)
        return cls(
            level=plan.level,
            required_mib=round(plan.estimate.required_bytes / MIB),
            budget_mib=round(plan.estimate.budget_bytes / MIB),
            knobs=plan.knobs,
            levers=tuple(moved),
        )

    @classmethod
    def read(cls, text: str) -> Golden:
        """Raises ValueError for what :meth:`__str__` did not write."""
        level, needs, knobs, *levers = (line.partition(" ")[2] for line in text.splitlines())
        required, _, _, budget, _ = needs.split()
        return cls(
            level=level,
            required_mib=int(required),
            budget_mib=int(budget),
            knobs=Knobs.from_json(json.loads(knobs)),
            levers=tuple(levers),
        )

    def __str__(self) -> str:
        lines = [
            f"level {self.level}",
            f"needs {self.required_mib} MiB of {self.budget_mib} MiB",
            f"knobs {json.dumps(self.knobs.to_json(), sort_keys=True)}",
            *(f"lever {lever}" for lever in self.levers),
        ]
        return "\n".join(lines) + "\n"
