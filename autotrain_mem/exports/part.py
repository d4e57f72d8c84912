"""A file in the making: keys, the names of TRL's that they answer, and what could not be said."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotrain_mem.exports.case import Case
from autotrain_mem.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Some keys of a tool's file."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    answered: frozenset[str] = frozenset()
    """TRL's names that these keys, or these notes, speak for."""
    notes: tuple[str, ...] = ()
    """What the tool cannot say, or does otherwise; one line each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """Says how the head of a file speaks of the tool that reads it."""

    name: str
    """As its authors write it: ``LLaMA-Factory``."""
    command: str
    """What runs the file: ``axolotl train FILE``."""
    trains_with_trl: bool
    """Whether the predicted peak is this tool's own."""


def renamed(case: Case, names: Mapping[str, str]) -> Part:
    """Settings that another tool has under another name, or the same, with the same values."""
    given = [name for name in names if case.settings.get(name) is not None]
    return Part(keys={names[name]: case.settings[name] for name in given}, answered=frozenset(names))


def unsaid(case: Case, tool: Tool, parts: Sequence[Part]) -> Part:
    """A note for every setting that no part speaks for: nothing that the user said is lost without a word."""
    answered = frozenset().union(*(part.answered for part in parts))
    left = [(name, value) for name, value in case.settings.items() if name not in answered]
    keyless = [f"{said(name, value)}: {tool.name} has no key for it here" for name, value in left]
    return Part(notes=(*keyless, *(f"{name}: a secret, which is not written here" for name in case.hidden)))


def said(name: str, value: Any) -> str:
    """``optim_args "a=1"``, on one line whatever the value holds."""
    return f"{name} {json.dumps(value, ensure_ascii=False, default=str)}"


def document(case: Case, tool: Tool, parts: Sequence[Part], environment: Mapping[str, str]) -> str:
    """The file: comments, then YAML.

    Args:
        environment: Variables that stand before the command.
    """
    import yaml

    whole = [*parts, unsaid(case, tool, parts)]
    keys: dict[str, Any] = {}
    for part in whole:
        keys |= part.keys
    notes = [note for part in whole for note in part.notes]
    comments = "".join(f"# {line}\n" for line in _head(case, tool, notes, environment))
    return comments + yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=10_000)


def _head(case: Case, tool: Tool, notes: Sequence[str], environment: Mapping[str, str]) -> Iterable[str]:
    plan, estimate = case.plan, case.plan.estimate
    yield f"Made by autofit for {tool.name}: {plan.method} of {_one_line(plan.model)}."
    yield f"Planned for one {_one_line(estimate.hardware.name)}, level of harm: {plan.level}."
    needs = f"{format_bytes(estimate.required_bytes)} of a budget of {format_bytes(estimate.budget_bytes)}"
    yield f"Predicted peak: {needs}{'' if tool.trains_with_trl else ', with TRL as the trainer'}."
    yield f"Run: {_one_line(command_line(tool.command, environment))}"
    if notes:
        yield f"What {tool.name} cannot say of this plan, or does otherwise:"
    yield from (f"- {_one_line(note)}" for note in notes)


def command_line(command: str, environment: Mapping[str, str]) -> str:
    """``PYTORCH_ALLOC_CONF=expandable_segments:True axolotl train FILE``, as a shell takes it."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), command])


def _one_line(text: str) -> str:
    """A line break would end the comment."""
    return " ".join(text.split())
