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
    """Describes one problem, or one fact that the user should know."""

    kind: Literal["error", "warning"]
    """Whether training would fail, or only differ from what the user expects."""
    message: str
    cure: str
    """The cure, with the exact flag."""
    error: str = "UsageError"
    """The class in ``errors`` that is raised for it, which sets the exit code."""

    def __str__(self) -> str:
        """Joins the message and its cure, as a plan stores it."""
        return f"{self.message} {self.cure}".strip()

    @classmethod
    def of(cls, error: AutofitError) -> Finding:
        """Makes a finding from an error that a check raised."""
        return cls(kind="error", message=error.message, cure=error.hint, error=type(error).__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Download:
    """Describes the download that training needs first."""

    size_bytes: int
    folder: str
    """The folder that it goes to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """Holds the findings about model, tokenizer and data."""

    findings: tuple[Finding, ...]
    parameters: int | None
    """Parameters of the model; None if neither local files nor the hub give the number."""
    download: Download | None = None
    """The download of its weights; None if they are on disk, or not checked as nothing is trained here."""


def settle(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns the warnings, and raises all errors as one.

    Raises:
        AutofitError: one of the first error's class; for several errors the hint lists every message with its cure.
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
"""What a check yields: a message and its cure, for a UsageError; or a finding of another kind."""

Subject = TypeVar("Subject")
Check = Callable[[Subject], Problems | None]
"""Yields problems, or raises the one error that it looks for."""


def collect(
    checks: Sequence[Check[Subject]], subject: Subject, pass_over: tuple[type[Exception], ...] = ()
) -> tuple[Finding, ...]:
    """Returns all findings in the order of the checks. ``pass_over``: exceptions that skip the check that raised."""
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
        AutofitError: one of the first problem's class; for several problems the hint lists each message with its cure.
    """
    settle(collect(checks, subject))


class Soundness(StrEnum):
    """Names the state of something that was checked."""

    OK = "ok"
    NOTE = "note"
    """Missing but not needed, or unusual but harmless."""
    BROKEN = "broken"
    """Should work, but does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """Describes the state of one thing, and how to fix it."""

    area: str
    """``GPU``, ``torch``, ``packages``, ``hub``, ``disk``, ``system``."""
    name: str
    """``driver``, ``rtx4090``, ``bitsandbytes``."""
    state: Soundness
    text: str
    fix: str = ""
    """A command or a sentence; empty if nothing needs fixing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Holds all findings on one machine."""

    json_form: ClassVar = Form(schema="autofit.doctor/1", derived={"trains": "trains", "broken": "broken"})

    findings: tuple[Condition, ...]
    has_gpu: bool
    """Whether there is a card that torch can use."""

    @property
    def broken(self) -> int:
        """Counts what does not work."""
        return sum(finding.state is Soundness.BROKEN for finding in self.findings)

    @property
    def trains(self) -> bool:
        """Returns whether training can run here: on a GPU, with nothing broken."""
        return self.has_gpu and not self.broken
