"""Health says what of a machine works, what is missing, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from autotrain_mem.support.codec import Form


class State(StrEnum):
    """Says how something is."""

    OK = "ok"
    NOTE = "note"
    """Not there, and not needed; or odd, and harmless by itself."""
    BROKEN = "broken"
    """Something that was meant to work does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Says how one thing is, and what mends it."""

    area: str
    """``GPU``, ``torch``, ``packages``, ``hub``, ``disk``, ``system``."""
    name: str
    """``driver``, ``rtx4090``, ``bitsandbytes``."""
    state: State
    text: str
    fix: str = ""
    """A command, or a sentence; empty where there is nothing to mend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Holds all findings on one machine."""

    json_form: ClassVar = Form(schema="autofit.doctor/1", derived={"trains": "trains", "broken": "broken"})

    findings: tuple[Finding, ...]
    has_gpu: bool
    """Whether a card is here that torch can use."""

    @property
    def broken(self) -> int:
        """Counts what does not work."""
        return sum(finding.state is State.BROKEN for finding in self.findings)

    @property
    def trains(self) -> bool:
        """Tells whether a training can run here, on a GPU and with nothing broken."""
        return self.has_gpu and not self.broken
