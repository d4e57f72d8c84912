"""Carries what a small job is asked for to its process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Task = Literal["chat", "merge", "push", "columns"]
Send = Callable[[Mapping[str, Any]], None]
Receive = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """Asks for one small job, in one line of JSON; what a job does not need keeps its default."""

    task: Task
    folder: str = ""
    """Of the run."""
    base: str | None = None
    """The model that an adapter belongs to; None where the folder holds the whole model."""
    revision: str | None = None
    """Of the base model, on the hub."""
    gives_score: bool = False
    """The model is a classifier of one score: a reward model."""
    base_bits: int | None = None
    """The base was quantized to so many bits while it was trained."""
    use_cpu: bool = False
    trust_remote_code: bool = False
    max_new_tokens: int = 0
    plain: bool = False
    """Continue the text as it is, without the chat template."""
    to: str = ""
    """Where the result goes: a new folder, or ``ORG/NAME`` on the hub."""
    public: bool = False
    update: bool = False
    """Push to a repository that holds files already."""
    dataset: str = ""
