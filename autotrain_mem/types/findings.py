"""Defines the findings of the checks before a rehearsal, each with its cure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal, Self, TypeVar

from autotrain_mem.support.codec import Form
from autotrain_mem.support.errors import AutofitError, from_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Describes one problem, or one fact that the user should know."""

    kind: Literal["error", "warning"]
    """``error``: training would fail. ``warning``: it would only differ from what the user expects."""
    message: str
    cure: str
    """How to fix the problem, with the exact flag."""
    error: str = "UsageError"
    """The name of the class in ``support.errors`` that is raised for the finding. The class sets the exit code."""

    def __str__(self) -> str:
        """Joins the message and its cure, as a plan stores them."""
        return f"{self.message} {self.cure}".strip()

    @classmethod
    def of(cls, error: AutofitError) -> Self:
        """Makes a finding from an error that a check raised."""
        return cls(kind="error", message=error.message, cure=error.hint, error=type(error).__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Download:
    """Describes the download that training needs before it begins."""

    size_bytes: int
    folder: str
    """The folder to which the files are downloaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """Holds the results of the worker's checks of model, tokenizer and data."""

    findings: tuple[Finding, ...]
    parameters: int | None
    """The model's number of parameters; None if neither local files nor the hub give it."""
    rows: int | None = None
    """The number of rows to train on; None if they were not read."""
    download: Download | None = None
    """The download of the weights; None if they are on disk, or if nothing is trained here, so that none is needed."""


def settle(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns the warnings, and raises all errors as one AutofitError of the first error's class. For several errors
    the hint lists every message with its cure."""
    findings = tuple(dict.fromkeys(findings))
    if not (errors := [finding for finding in findings if finding.kind == "error"]):
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
"""The results of a check: each is a message and its cure, for a UsageError, or a finding of another kind."""
Subject = TypeVar("Subject")
Check = Callable[[Subject], Problems | None]
"""A function that yields the problems of a subject, or raises an error for the one problem that it looks for."""


def collect(
    checks: Sequence[Check[Subject]], subject: Subject, pass_over: tuple[type[Exception], ...] = ()
) -> tuple[Finding, ...]:
    """Returns all findings in the order of the checks. ``pass_over``: exceptions that end a check silently."""
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
    """Runs the checks and raises all their errors as one (:func:`settle`)."""
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
    """The section of the list: ``GPU``, ``torch``, ``packages``, ``hub``, ``disk`` or ``system``."""
    name: str
    """The name of the thing, such as ``driver``, ``rtx4090`` or ``bitsandbytes``."""
    state: Soundness
    text: str
    fix: str = ""
    """The command or sentence that tells how to fix it; empty if nothing needs fixing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Holds all findings on one machine."""

    json_form: ClassVar = Form(schema="autofit.doctor/1", derived={"trains": "trains", "broken": "broken"})

    findings: tuple[Condition, ...]
    has_gpu: bool
    """Whether the machine has a card that torch can use."""

    @property
    def broken(self) -> int:
        """Counts the findings whose state is ``BROKEN``."""
        return sum(finding.state is Soundness.BROKEN for finding in self.findings)

    @property
    def trains(self) -> bool:
        """Returns whether training can run here: on a GPU, with nothing broken."""
        return self.has_gpu and not self.broken
