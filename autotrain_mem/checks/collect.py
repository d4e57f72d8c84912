"""Runs checks over what they look at, and collects all problems, so that one error names them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from autotrain_mem.support.errors import AutofitError
from autotrain_mem.types.preflight import Finding, settle

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
