"""Defines the findings of the checks before a rehearsal, each with its cure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal, TypeVar

from autotrain_mem.support.codec import Form
from autotrain_mem.support.errors import AutofitError, from_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Describes one thing that is wrong, or that the user should know."""

    kind: Literal["error", "warning"]
    """Whether training would end with it, or only be other than the user thinks."""
    message: str
    cure: str
    """The cure, with the exact flag."""
    error: str = "UsageError"
    """The class in ``errors`` that an error of this kind is, and so its exit code."""

    def __str__(self) -> str:
        """Joins the message with its cure, as a plan keeps it."""
        return f"{self.message} {self.cure}".strip()

    @classmethod
    def of(cls, error: AutofitError) -> Finding:
        """Makes a finding of an error that was met while looking."""
        return cls(kind="error", message=error.message, cure=error.hint, error=type(error).__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Download:
    """Describes the download that a training needs first."""

    size_bytes: int
    folder: str
    """Where it will lie."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """Holds the findings about model, tokenizer and data."""

    findings: tuple[Finding, ...]
    parameters: int | None
    """Parameters of the model; None where neither files on this disk nor the hub say."""
    download: Download | None = None
    """The download of its weights; None where they are here, or nobody asked since nothing is trained here."""


def settle(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns the warnings, and raises all errors as one.

    Raises:
        AutofitError: of the class of the first error; the hint of several holds every message with its cure.
    """
    findings = tuple(dict.fromkeys(findings))
    errors = [finding for finding in findings if finding.kind == "error"]
    if not errors:
        return findings
    message, hint = errors[0].message, errors[0].cure
    if len(errors) > 1:
        message, lines = f"{len(errors)} problems:", []
        for number, finding in enumerate(errors, 1):
            mark = f"{number}. "
            lines.append(mark + f"{finding.message}\n{finding.cure}".replace("\n", "\n" + " " * len(mark)))
        hint = "\n".join(lines)
    raise from_json({"error": errors[0].error, "message": message, "hint": hint})


Problems = Iterator[tuple[str, str] | Finding]
"""What a check yields: a message and what to do about it, for a UsageError; or a finding of another kind."""

Subject = TypeVar("Subject")
Check = Callable[[Subject], Problems | None]
"""Yields what is wrong, or raises the one error that it looks for."""


def collect(
    checks: Sequence[Check[Subject]], subject: Subject, pass_over: tuple[type[Exception], ...] = ()
) -> tuple[Finding, ...]:
    """Returns every finding, errors and warnings, in the order of the checks.

    Args:
        pass_over: What a check may raise without a finding: what it could not find out is not said.
    """
    findings: list[Finding] = []
    for check in checks:
        try:
            for problem in check(subject) or ():
                if not isinstance(problem, Finding):
                    message, cure = problem
                    problem = Finding(kind="error", message=message, cure=cure)
                findings.append(problem)
        except AutofitError as error:
            findings.append(Finding.of(error))
        except pass_over:
            continue
    return tuple(findings)


def refuse(checks: Sequence[Check[Subject]], subject: Subject) -> None:
    """Raises all errors as one.

    Raises:
        AutofitError: of the class of the first problem; the hint of several holds each message with its cure.
    """
    settle(collect(checks, subject))


class Soundness(StrEnum):
    """Describes how something is."""

    OK = "ok"
    NOTE = "note"
    """Not there, and not needed; or odd, and harmless by itself."""
    BROKEN = "broken"
    """It was meant to work and does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """Describes how one thing is, and what mends it."""

    area: str
    """``GPU``, ``torch``, ``packages``, ``hub``, ``disk``, ``system``."""
    name: str
    """``driver``, ``rtx4090``, ``bitsandbytes``."""
    state: Soundness
    text: str
    fix: str = ""
    """A command, or a sentence; empty where there is nothing to mend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Holds all findings on one machine."""

    json_form: ClassVar = Form(schema="autofit.doctor/1", derived={"trains": "trains", "broken": "broken"})

    findings: tuple[Condition, ...]
    has_gpu: bool
    """Whether a card is here that torch can use."""

    @property
    def broken(self) -> int:
        """Counts what does not work."""
        return sum(finding.state is Soundness.BROKEN for finding in self.findings)

    @property
    def trains(self) -> bool:
        """Returns whether a training can run here, on a GPU and with nothing broken."""
        return self.has_gpu and not self.broken
