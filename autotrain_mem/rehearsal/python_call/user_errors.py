"""Explains what the installed libraries, or the user's own code in them, raise: whose it is and where.

A command's user reads of flags. A script's user reads which line of the script it was: their classes and functions
run in the worker as they would in the script.
"""

from __future__ import annotations

import builtins
import contextlib
import pathlib
import sysconfig
import traceback
from dataclasses import dataclass
from typing import Any

from autotrain_mem.errors import RehearsalError

_PACKAGES = ("site-packages", "dist-packages")
"""Folders of installed packages; Debian's are the second."""
_TYPED = ("<stdin>", "<ipython-input")
"""What code is called that no file holds, and that its user wrote; dataclasses and torch.fx have names like these for
code that they write themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A line of the user's own that was being run."""

    function: str
    """With its class: ``Broken.__init__``."""
    file: str
    line: int
    library: str
    """The installed package that it had called, in which the error was raised; empty where its own line raised it."""

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


def failure(step: str, error: Exception, *, from_python: bool) -> RehearsalError:
    """Turns an exception into an error that says what it means to the user.

    Args:
        step: What was being done, as in "Rehearsing the trainer".
        from_python: Asked by a script's trainer, whose reader gave no flags.
    """
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    place = own_place(error) if from_python else None
    if place is not None:
        return RehearsalError(f"{step} failed: {said}", hint=_hint_of_own(error, place))
    return RehearsalError(f"{step} failed in the installed libraries: {said}", hint=_hint(error, from_python))


def _hint(error: Exception, from_python: bool) -> str:
    asks = "argument" if from_python else "flag"
    if isinstance(error, ImportError):
        return f"Install what it names, or remove the {asks} that asks for it."
    return f"Change the {asks} that it names, if it names one." + (
        "" if from_python else " --debug shows the traceback."
    )


def _hint_of_own(error: Exception, place: Place) -> str:
    if _reads_a_value(error):
        return (
            f"{place} reads the value of a tensor, and in a rehearsal tensors have none: read it after the trainer is "
            "built, or in train()."
        )
    if place.library:
        return f"It was raised in {place.library}, called by {place}, while it was rehearsed."
    return f"It was raised in {place}, while it was rehearsed."


def _reads_a_value(error: Exception) -> bool:
    """``Tensor.item`` and its like; a shape that depends on values (``Tensor.nonzero``, a boolean mask)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def passed_on(error: Exception) -> dict[str, Any] | None:
    """Passes on what TRL, PEFT or the user's own code refused, for a script to meet as if it had been raised there.

    ``{"kind": "ValueError", "text": ..., "note": "It was raised in ..."}``: Python's own class that is nearest to the
    error's, and where it was; None for what others raised, of which the script's reader is told what it means.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if _reads_a_value(error) or not frames or not _speaks_for_itself(frames[-1].filename):
        return None
    text = _text(error)
    for kind in type(error).__mro__:
        if getattr(builtins, kind.__name__, None) is kind:
            with contextlib.suppress(TypeError):  # UnicodeDecodeError takes more than a text, and its base does not
                kind(text)
                return {"kind": kind.__name__, "text": text, "note": _note(error)}
    return None


def _note(error: Exception) -> str:
    place = own_place(error)
    return "" if place is None else _hint_of_own(error, place)


def _text(error: Exception) -> Any:
    """Returns what the class is called with to print the same: a KeyError shows its key as Python writes it."""
    if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str | int | float | None):
        return error.args[0]
    return str(error)


def _speaks_for_itself(filename: str) -> bool:
    return library_of(filename) in ("trl", "peft", "")


def own_place(error: Exception) -> Place | None:
    """The innermost line of the user's own, if there is one in the error's traceback.

    Example: of a ValueError that ``Broken.__init__`` raises, ``Broken.__init__ (script.py:27)``.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [each for each in frames if library_of(each[0].f_code.co_filename) == ""]
    if not own:
        return None
    frame, line = own[-1]
    raised_in = frames[-1][0].f_code.co_filename
    return Place(
        function=frame.f_code.co_qualname.rpartition("<locals>.")[2],
        file=pathlib.Path(frame.f_code.co_filename).name,
        line=line,
        library=library_of(raised_in),
    )


def library_of(filename: str) -> str:
    """The installed package that a file of code belongs to, "Python" for its own; empty for the user's own.

    Example: ``/usr/lib/python3/dist-packages/torch/nn/modules/module.py`` is ``torch``.
    """
    if filename.startswith("<"):
        return "" if filename.startswith(_TYPED) else "Python"
    path, package = pathlib.Path(filename), pathlib.Path(__file__).parents[2]
    if path.is_relative_to(package):
        return package.name
    parts = path.parts
    for folder in _PACKAGES:
        if folder in parts:
            return pathlib.Path(parts[len(parts) - 1 - parts[::-1].index(folder) + 1]).stem
    return "Python" if path.is_relative_to(sysconfig.get_path("stdlib")) else ""
