"""Explains exceptions of the installed libraries, or of the user's own code in them: whose they are, and where.

For a command the message speaks of flags. For a script it names the script's line: its classes and functions run in the
worker as they would in the script.
"""

from __future__ import annotations

import builtins
import contextlib
import pathlib
import sysconfig
import traceback
from typing import Any

from autotrain_mem.support.errors import RehearsalError

_PACKAGES = ("site-packages", "dist-packages")
"""Folders of installed packages; the second is Debian's."""
_TYPED = ("<stdin>", "<ipython-input")
"""File names of code that a user typed without a file; dataclasses and torch.fx have similar names for code that they
generate."""


def failure(step: str, error: Exception, *, from_python: bool) -> RehearsalError:
    """Turns an exception into an error that explains it to the user.

    Args:
        step: What was being done, as in "Rehearsing the trainer".
        from_python: Whether a script's trainer asked, whose user gave no flags.
    """
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if from_python and (own := _hint_of_own(error)):
        return RehearsalError(f"{step} failed: {said}", hint=own)
    asks = "argument" if from_python else "flag"
    if isinstance(error, ImportError):
        hint = f"Install what it names, or remove the {asks} that asks for it."
    else:
        hint = f"Change the {asks} that it names, if it names one."
        hint += "" if from_python else " --debug shows the traceback."
    return RehearsalError(f"{step} failed in the installed libraries: {said}", hint=hint)


def _hint_of_own(error: Exception) -> str:
    """Names the innermost line of the user's own code in the error's traceback; empty if there is none.

    Example: "It was raised in Broken.__init__ (script.py:27), while it was rehearsed."
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [each for each in frames if library_of(each[0].f_code.co_filename) == ""]
    if not own:
        return ""
    frame, line = own[-1]
    function = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    place = f"{function} ({pathlib.Path(frame.f_code.co_filename).name}:{line})"
    if _reads_a_value(error):
        return (
            f"{place} reads the value of a tensor, and in a rehearsal tensors have none: read it after the trainer is "
            "built, or in train()."
        )
    library = library_of(frames[-1][0].f_code.co_filename)
    where = f"{library}, called by {place}" if library else place
    return f"It was raised in {where}, while it was rehearsed."


def _reads_a_value(error: Exception) -> bool:
    """Returns whether it comes from ``Tensor.item``, or from ``Tensor.nonzero``, whose shape depends on values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def passed_on(error: Exception) -> dict[str, Any] | None:
    """Describes an error of TRL, PEFT or the user's own code, so that the script's process can raise it too.

    ``{"kind": "ValueError", "text": ..., "note": "It was raised in ..."}``: the nearest class of Python's own, and the
    place; None for errors of other libraries.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if _reads_a_value(error) or not frames or library_of(frames[-1].filename) not in ("trl", "peft", ""):
        return None
    text: Any = str(error)
    if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str | int | float | None):
        text = error.args[0]  # a KeyError shows its key as Python writes it
    for kind in type(error).__mro__:
        if getattr(builtins, kind.__name__, None) is kind:
            with contextlib.suppress(TypeError):  # UnicodeDecodeError takes more than a text, and its base does not
                kind(text)
                return {"kind": kind.__name__, "text": text, "note": _hint_of_own(error)}
    return None


def library_of(filename: str) -> str:
    """Returns the installed package of a code file, "Python" for the standard library; empty for the user's own code.

    Example: ``/usr/lib/python3/dist-packages/torch/nn/modules/module.py`` is ``torch``.
    """
    if filename.startswith("<"):
        return "" if filename.startswith(_TYPED) else "Python"
    path, package = pathlib.Path(filename), pathlib.Path(__file__).parents[1]
    if path.is_relative_to(package):
        return package.name
    parts = path.parts
    for folder in _PACKAGES:
        if folder in parts:
            return pathlib.Path(parts[len(parts) - 1 - parts[::-1].index(folder) + 1]).stem
    return "Python" if path.is_relative_to(sysconfig.get_path("stdlib")) else ""
