"""Checks what TRL, its dataclasses and the libraries around it say of a job's arguments, without a model or data."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

from autotrain_mem.checks.collect import Problems
from autotrain_mem.checks.flags import Flags
from autotrain_mem.errors import UsageError
from autotrain_mem.methods.configs import on_cpu, undivided
from autotrain_mem.methods.interface import method_of


def accepted_by_trl(flags: Flags) -> None:
    """Lets TRL's dataclasses refuse what they would refuse later; what depends on a GPU is not asked here.

    Nor how the batch divides into groups: that is the plan's to find, and to refuse with the next sum done.
    """
    try:
        filled = _filled(flags)
    except (ValueError, TypeError, ImportError, OSError) as error:
        reason = str(error).strip().rstrip(".")
        raise UsageError(
            f"TRL refuses these arguments: {reason}.",
            hint=f"See autofit {flags.method} --help for what each of them takes.",
        ) from error
    method_of(flags.method).check(filled, to_train=False)


def ready_to_train(flags: Flags) -> None:
    """Lets the method refuse what it plans for and cannot train with, such as rewards that are not there."""
    method_of(flags.method).check(_filled(flags), to_train=True)


def _filled(flags: Flags) -> Any:
    values = copy.deepcopy(undivided(flags.given))
    return method_of(flags.method).configs({**on_cpu(values), "report_to": "none"})


def trackers(flags: Flags) -> Problems:
    """A tracker that is not installed would end the run when it starts, after the plan was made."""
    from transformers.integrations import get_available_reporting_integrations

    report_to = flags.given.get("report_to") or []
    asked = [report_to] if isinstance(report_to, str) else report_to
    available = ["none", "all", *get_available_reporting_integrations()]
    missing = [name for name in asked if name not in available]
    if missing:
        yield (
            f"--report_to {' '.join(missing)} is not installed here.",
            f"Install it, or give --report_to one of {', '.join(available)}.",
        )


def checkpoint_to_resume(flags: Flags) -> Problems:
    """``true`` takes the last checkpoint of the output folder; none there would end the run after it was planned."""
    folder = flags.given.get("output_dir")
    resumes = flags.given.get("resume_from_checkpoint") is True
    if resumes and folder and not any(pathlib.Path(folder).glob("checkpoint-*")):
        yield (
            f"--resume_from_checkpoint: {folder} holds no checkpoint to go on from.",
            "Remove the flag to start from the beginning, or give it a checkpoint's folder.",
        )
