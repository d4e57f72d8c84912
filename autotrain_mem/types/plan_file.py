"""Reads the JSON of a plan's file. A file that this version did not write is rejected with the reason and the cure.

A damaged file is never repaired. Every value must have its field's type (``support.codec``), and the plan, written
again, must equal the file that was read.
"""

import json
import math
import os
import reprlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotrain_mem.support.errors import PlanFileError
from autotrain_mem.support.files import NOT_ORDINARY, check_replaceable, parse_object, read_start
from autotrain_mem.support.units import MIB, format_bytes

PLAN_SCHEMA = "autofit.plan/6"
"""The name and version of the file's JSON schema, which ``scripts/docs_pages/plan_schema.py`` generates."""
PLAN_NAME = "plan.json"
"""The name of the plan's file in an output folder."""
STDIN = "-"
LARGEST_BYTES = 8 * MIB
"""The largest size of a file that is read as a plan. A plan takes some 10 KiB, plus 1 KiB for each attempt and each
out-of-memory error. The worst JSON of this size, which has only empty objects, takes 192 MiB as Python objects
(measured with Python 3.11, x86-64)."""

_MAKES_ONE = (
    "autofit plan METHOD --model MODEL --gpu NAME --out plan.json  writes one;\n"
    f"training writes one too, as {PLAN_NAME} in its output folder."
)
_FROM_A_PIPE = "Write it to a file first; autofit explain - shows a plan from standard input."
_FIT = "autofit.fit/"
"""The schema of the output of ``autofit METHOD --json``, which holds the plan and the run."""
_FAMILY = PLAN_SCHEMA.partition("/")[0] + "/"
"""The prefix that the schemas of all versions share."""
PYTHON = "Plan.save a path"
"""The words in a hint that tell a script how to name another place for the plan."""


def check_place(path: str | Path, place: str = PYTHON) -> None:
    """Raises before planning the errors that ``Plan.save`` would raise, as far as they can be foreseen.

    Raises:
        PlanFileError: the path is empty, or names a file that is not a plan. An empty file, such as a shell's
            redirection creates, can be replaced.
        OutputFolderError: its folder does not exist or is not writable, or the path is a device or a pipe.
    """
    check_replaceable(file_of(path), place, "plan", _may_be_replaced, PlanFileError)


def file_of(path: str | Path) -> Path:
    """Returns the path of the file; for a folder, that of its ``plan.json``. Raises PlanFileError for an empty path."""
    if not str(path).strip():
        raise PlanFileError("The path of the plan is empty.", hint="Name a file, such as plan.json, or a folder.")
    return Path(path, PLAN_NAME) if os.path.isdir(path) else Path(path)


def _may_be_replaced(file: Path) -> bool:
    """Returns whether a file is empty, or a plan of any version. Raises OSError if it cannot be read."""
    if len(text := read_start(file, LARGEST_BYTES + 1)) > LARGEST_BYTES:
        return False
    try:
        values = json.loads(text) if text.strip() else {"schema": PLAN_SCHEMA}
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and str(values.get("schema")).startswith(_FAMILY)


def read_content(path: str | Path) -> tuple[bytes, str]:
    """Returns the content of a plan's file, or of ``plan.json`` in a folder, up to one byte more than the largest size,
    and the file's name. Raises PlanFileError if there is no such file, or if it is not an ordinary file."""
    file = file_of(path)
    try:
        content = read_start(file, LARGEST_BYTES + 1)
    except FileNotFoundError as error:
        missing = f"The folder {path} holds no {PLAN_NAME}" if os.path.isdir(path) else f"There is no plan at {path}"
        raise PlanFileError(f"{missing}.", hint=_MAKES_ONE) from error
    except OSError as error:
        hint = _FROM_A_PIPE if error.strerror == NOT_ORDINARY else _MAKES_ONE
        raise PlanFileError(f"Cannot read {file}: {error.strerror}.", hint=hint) from error
    return content, str(file)


def plan_values(content: bytes, name: str) -> dict[str, Any]:
    """Returns the JSON of a plan from a file's content in UTF-8. ``content``: the whole content, or at least its first
    :data:`LARGEST_BYTES` + 1 bytes. ``name``: the file's name, for errors. Raises PlanFileError if the content is not
    JSON, is too large, is not a plan, or is of another version."""
    reason = f"it is larger than {format_bytes(LARGEST_BYTES)}" if len(content) > LARGEST_BYTES else ""
    try:
        values: Any = {} if reason else parse_object(content.decode("utf-8"))
    except ValueError as error:
        reason = f"it is not JSON: {error}"
    if reason:
        raise PlanFileError(f"{name} is not a plan: {reason}.", hint=_MAKES_ONE)
    if str(values.get("schema")).startswith(_FIT):
        values = values.get("plan")
    schema = values.get("schema") if isinstance(values, dict) else None
    if isinstance(values, dict) and schema == PLAN_SCHEMA:
        return values
    if isinstance(schema, str) and schema.startswith(_FAMILY):
        message = f"{name} was made by another version of autofit: its schema is {schema}, and not {PLAN_SCHEMA}."
        raise PlanFileError(message, hint=_plan_again(values))
    holds = f"it holds {schema}" if isinstance(schema, str) else "it does not have a plan's schema"
    raise PlanFileError(f"{name} is not a plan: {holds}.", hint=_MAKES_ONE)


def _plan_again(values: Mapping[str, Any]) -> str:
    """Returns a hint with the command that plans again, with the method and model that the file states."""
    method, model = (value if isinstance(value := values.get(key), str) else "" for key in ("method", "model"))
    named = f" --model {shlex.quote(model)}" if model else " --model MODEL"
    return f"Plan again: autofit plan {method or 'METHOD'}{named} --gpu NAME --out plan.json"


def damaged(name: str, reason: str, values: Mapping[str, Any]) -> PlanFileError:
    """Returns the error for a file that was changed. Its hint has the command that plans again."""
    message = f"{name} is not the plan that autofit wrote: {reason}."
    return PlanFileError(message, hint=f"It was changed, or made by another version. {_plan_again(values)}")


def differing(written: Any, again: Any, path: str = "") -> str:
    """Describes the first difference between a file's JSON and that of the plan read from it; empty if none."""
    if isinstance(written, dict) and isinstance(again, dict):
        if odd := sorted(written.keys() ^ again.keys()):
            return f"{path}{odd[0]} is {'missing' if odd[0] in again else 'unknown'}"
        parts = [differing(written[name], again[name], f"{path}{name}.") for name in again]
        return next(filter(None, parts), "")
    if isinstance(written, list) and isinstance(again, list) and len(written) == len(again):
        return next(filter(None, [differing(*pair, path) for pair in zip(written, again, strict=True)]), "")
    if isinstance(written, float) and not math.isfinite(written):
        return f"{path.removesuffix('.')} is {written}"
    is_same = type(written) is type(again) and bool(written == again)
    if isinstance(again, float) and isinstance(written, float | int) and not isinstance(written, bool):
        is_same = math.isclose(written, again, rel_tol=1e-9)
    name = path.removesuffix(".")
    return "" if is_same else f"{name} is {reprlib.repr(written)} where it should be {reprlib.repr(again)}"
