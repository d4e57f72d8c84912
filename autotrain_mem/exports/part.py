"""A file in the making: keys, the names of TRL's that they answer, and what could not be said."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotrain_mem.exports.case import NO_LIMIT_TOKENS, Case
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support.units import format_bytes, one_line, printable

OF_DATA = frozenset(
    {
        *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"),
        *(MAX_LENGTH, "packing", "assistant_only_loss", "completion_only_loss"),
    }
)
"""TRL's names of where the rows come from, and of what is made of them."""


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
    notes_head: str = ""
    """What the notes are, where they are not what the tool cannot say."""


def renamed(case: Case, names: Mapping[str, str]) -> Part:
    """Settings that another tool has under another name, or the same, with the same values."""
    given = [name for name in names if case.settings.get(name) is not None]
    return Part(keys={names[name]: case.settings[name] for name in given}, answered=frozenset(names))


def unsaid(case: Case, tool: Tool, parts: Sequence[Part]) -> Iterable[str]:
    """Says every setting that no part speaks for: nothing that the user said is lost without a word."""
    answered = frozenset().union(*(part.answered for part in parts))
    for name, value in case.settings.items():
        if name not in answered:
            text = json.dumps(value, ensure_ascii=False, default=str)
            yield f"{name} {text}: {tool.name} has no key for it here"
    yield from (f"{name}: perhaps a secret, which is not written here: set it where you train" for name in case.hidden)


def document(case: Case, tool: Tool, parts: Sequence[Part], environment: Mapping[str, str]) -> str:
    """The file: comments, then YAML; the variables of ``environment`` stand before the command."""
    import yaml

    keys: dict[str, Any] = {}
    for part in parts:
        keys |= part.keys
    comments = heading(case, tool, parts, environment)

    def dump(*, allow_unicode: bool) -> str:
        return str(yaml.dump(keys, Dumper=_dumper(), sort_keys=False, allow_unicode=allow_unicode, width=10_000))

    text = dump(allow_unicode=True)
    if printable(text) != text:  # such as what turns the direction of writing, which YAML can spell out as well
        text = dump(allow_unicode=False)
    return comments + text


_NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?")
"""What YAML 1.2 reads as a number: also ``2e-05``, which is text by YAML 1.1, and so to PyYAML."""


def _dumper() -> Any:
    """Makes the class that writes texts which every reader of YAML takes for texts, and lines as lines."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def represent(dumper: Any, text: str) -> Any:
        style = "|" if text.endswith("\n") and printable(text) == text else None
        style = "'" if _NUMBER.fullmatch(text) else style
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    return Dumper


def heading(case: Case, tool: Tool, parts: Sequence[Part], environment: Mapping[str, str]) -> str:
    """The comments that a file begins with."""
    notes = [*(note for part in parts for note in part.notes), *unsaid(case, tool, parts)]
    return "".join(f"# {one_line(line)}\n" for line in _head(case, tool, notes, environment))


def _head(case: Case, tool: Tool, notes: Sequence[str], environment: Mapping[str, str]) -> Iterable[str]:
    plan, estimate = case.plan, case.plan.estimate
    yield f"Made by autofit for {tool.name}: {plan.method} of {plan.model}."
    topology, name = estimate.hardware.topology, estimate.hardware.name
    machines = f" on each of {topology.nodes} machines" if topology.nodes > 1 else ""
    cards = f"one {name}" if topology.processes == 1 else f"{topology.devices} x {name}{machines}"
    yield f"Planned for {cards}, level of harm: {plan.level}."
    needs = f"{format_bytes(estimate.required_bytes)} of a budget of {format_bytes(estimate.budget_bytes)}"
    each = " on each" if topology.processes > 1 else ""
    yield f"Predicted peak: {needs}{each}{'' if tool.trains_with_trl else ', with TRL as the trainer'}."
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    yield f"Run: {' '.join([*variables, tool.command])}"
    if notes:
        yield tool.notes_head or f"What {tool.name} cannot say of this plan, or does otherwise:"
    yield from (f"- {note}" for note in notes)


# -- what several tools have in common that they cannot say ----------------------------------------------------------


def host_optimizer(case: Case, instead: str) -> Part:
    """Optimizer state on the host is autofit's own."""
    if not case.knobs.optimizer_offload:
        return Part()
    why = "optimizer_offload true: optimizer state and step on the host are autofit's own, and without them"
    return Part(notes=(f"{why} the run needs more than is predicted; {instead}",))


def allocator(case: Case) -> Part:
    """A variable is no key."""
    if not case.knobs.expandable_segments:
        return Part()
    return Part(notes=("expandable_segments true: a variable of the process, which the command above sets",))


def environment(case: Case) -> Part:
    """The job's own variables."""
    given = case.job.environment
    if not given:
        return Part()
    return Part(notes=(f"env {' '.join(given)}: variables of the process, which the command above sets",))


def whole_logits(case: Case, tool: str, batch: str) -> Part:
    """TRL goes over the tokens in chunks (``trl/trainer/sft_trainer.py``, loss_type None or chunked_nll)."""
    has_chunks = case.method_facts.has_chunked_loss and case.settings.get("loss_type") != "nll"
    if not has_chunks or case.settings.get("use_liger_kernel"):
        return Part()
    why = f"the loss: TRL makes logits for some tokens at a time, {tool} for all of a micro-batch at once, which takes"
    rows = case.knobs.per_device_train_batch_size
    tokens = "longest row" if case.length == NO_LIMIT_TOKENS else case.length
    return Part(notes=(f"{why} at least {rows} x {tokens} x vocabulary x 4 bytes more: lower {batch} if full",))


def no_limit(case: Case, key: str) -> Part:
    """A tool that takes a number only."""
    if case.job.is_online or case.job.row_limit(case.knobs) is not None:
        return Part()
    return Part(notes=(f"max_length none: {key} takes a number only, so it is that of the longest row or larger",))
