"""The records of a run in its output folder: whole or not there, also when the disk fills up or the power goes."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
from pathlib import Path
from typing import Any

from autotrain_mem.errors import OutputFolderError
from autotrain_mem.spec.report import RUN_NAME

PLAN_NAME = "plan.json"

_FULL = ("the disk is full", "Free some space, or give --output_dir a folder on another disk.")
_FORBIDDEN = ("writing there is not permitted", "Give --output_dir a folder that you may write to.")
_NOT_A_FOLDER = ("its folder is not there or is a file", "Give --output_dir a folder.")
_REASONS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: ("the disk quota is used up", _FULL[1]),
    errno.EFBIG: ("it is larger than the largest file allowed", "Raise the limit that ulimit -f shows."),
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: ("the disk is read-only", _FORBIDDEN[1]),
    errno.ENOENT: _NOT_A_FOLDER,
    errno.ENOTDIR: _NOT_A_FOLDER,
    errno.EISDIR: ("a folder of that name is in the way", "Move it away, or give another --output_dir."),
}
"""What the operating system's refusals mean to the user, and what to do about them."""


def write_json(path: Path, payload: dict[str, Any]) -> None:
    """Replace ``path`` in one step; a write that fails leaves what was there.

    Loss may be NaN, which JSON has no number for: it is written as the text ``"nan"``, so that any reader can parse
    the file and none takes a diverged loss for one that was not measured (null).

    Raises:
        OutputFolderError: the file cannot be written; the hint says what to do.
    """
    text = json.dumps(_finite(payload), indent=2, allow_nan=False) + "\n"
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise _refusal(path, error) from error


def replace_file(path: Path, content: bytes) -> None:
    """Put a file in the place of another in one step; if that raises OSError, the other is still there."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_through(unfinished, content)
        os.replace(unfinished, path)
    finally:
        _remove(unfinished)


def write_run(
    folder: Path, *, plan_json: dict[str, Any] | None = None, report_json: dict[str, Any] | None = None
) -> None:
    """Write ``plan.json``, ``run.json`` or both: the plan is known before the run, the report after it."""
    if plan_json is not None:
        write_json(folder / PLAN_NAME, plan_json)
    if report_json is not None:
        write_json(folder / RUN_NAME, report_json)


def _write_through(path: Path, content: bytes) -> None:
    """Write and wait for the disk: without fsync the new name may outlive a power cut and its content not."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove(unfinished: Path) -> None:
    with contextlib.suppress(OSError):  # the error that matters is already on its way
        unfinished.unlink(missing_ok=True)


def _refusal(path: Path, error: OSError) -> OutputFolderError:
    unforeseen = (error.strerror or str(error), "Give --output_dir another folder.")
    reason, hint = _REASONS.get(error.errno or 0, unforeseen)
    return OutputFolderError(f"Cannot write {path}: {reason}.", hint=hint)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
