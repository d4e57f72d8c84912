"""What a Python script hands to a trainer that no JSON can say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Handed:
    """A file with a call of a trainer, for the process that rehearses it (``rehearsal.python_call.capture``)."""

    path: str
    holds_model: bool
    """Whether the model is an object, whose structure is rehearsed; else it is loaded by its name."""
    holds_rows: bool
    """Whether the training data can be counted: a stream's cannot."""
    processes: int = 1
    """How many train together: more than one hold their gradients a second time, in DDP's buckets."""
    digest: str
    """Of all in it that a rehearsal depends on; empty where that cannot be known, and nothing may be kept of it: code
    or a model of the user's own."""
