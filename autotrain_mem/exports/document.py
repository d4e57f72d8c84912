"""Writes a draft as text: comments, then YAML; and the notes that several tools share."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.exports.draft import NO_LIMIT_TOKENS, Draft
from autotrain_mem.support.units import format_bytes, one_line, printable


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


def document(draft: Draft, tool: Tool, environment: Mapping[str, str]) -> str:
    """The file: comments, then YAML; the variables of ``environment`` stand before the command."""
    import yaml

    comments = heading(draft, tool, environment)

    def dump(*, allow_unicode: bool) -> str:
        return str(yaml.dump(draft.keys, Dumper=_dumper(), sort_keys=False, allow_unicode=allow_unicode, width=10_000))

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


def heading(draft: Draft, tool: Tool, environment: Mapping[str, str]) -> str:
    """The comments that a file begins with; the last ones name every setting that no key answers."""
    return "".join(f"# {one_line(line)}\n" for line in _head(draft, tool, environment))


def _head(draft: Draft, tool: Tool, environment: Mapping[str, str]) -> Iterable[str]:
    plan, estimate = draft.plan, draft.plan.estimate
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
    lost = {name: value for name, value in draft.settings.items() if name not in draft.answered}
    texts = {name: json.dumps(value, ensure_ascii=False, default=str) for name, value in lost.items()}
    notes = [
        *draft.notes,
        *(f"{name} {text}: {tool.name} has no key for it here" for name, text in texts.items()),
        *(f"{name}: perhaps a secret, which is not written here: set it where you train" for name in draft.hidden),
    ]
    if notes:
        yield tool.notes_head or f"What {tool.name} cannot say of this plan, or does otherwise:"
    yield from (f"- {note}" for note in notes)


# -- what several tools have in common that they cannot say ----------------------------------------------------------


def note_host_optimizer(draft: Draft, instead: str) -> None:
    """Optimizer state on the host is autofit's own."""
    if draft.knobs.optimizer_offload:
        why = "optimizer_offload true: optimizer state and step on the host are autofit's own, and without them"
        draft.notes.append(f"{why} the run needs more than is predicted; {instead}")


def note_allocator(draft: Draft) -> None:
    """A variable is no key."""
    if draft.knobs.expandable_segments:
        draft.notes.append("expandable_segments true: a variable of the process, which the command above sets")


def note_environment(draft: Draft) -> None:
    """The job's own variables."""
    if draft.job.environment:
        names = " ".join(draft.job.environment)
        draft.notes.append(f"env {names}: variables of the process, which the command above sets")


def note_whole_logits(draft: Draft, tool: str, batch: str) -> None:
    """TRL goes over the tokens in chunks (``trl/trainer/sft_trainer.py``, loss_type None or chunked_nll)."""
    has_chunks = draft.method_facts.has_chunked_loss and draft.settings.get("loss_type") != "nll"
    if not has_chunks or draft.settings.get("use_liger_kernel"):
        return
    why = f"the loss: TRL makes logits for some tokens at a time, {tool} for all of a micro-batch at once, which takes"
    rows = draft.knobs.per_device_train_batch_size
    tokens = "longest row" if draft.length == NO_LIMIT_TOKENS else draft.length
    draft.notes.append(f"{why} at least {rows} x {tokens} x vocabulary x 4 bytes more: lower {batch} if full")


def note_no_limit(draft: Draft, key: str) -> None:
    """A tool that takes a number only."""
    if not draft.job.is_online and draft.job.row_limit(draft.knobs) is None:
        draft.notes.append(f"max_length none: {key} takes a number only, so it is that of the longest row or larger")
