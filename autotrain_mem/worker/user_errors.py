"""Explains exceptions of the installed libraries and of the user's code; for a script, names the line of that code."""

import builtins
import contextlib
import pathlib
import sysconfig
import traceback
from typing import Any

from autotrain_mem.support.errors import RehearsalError, described

_PACKAGES = ("site-packages", "dist-packages")
"""Folders of installed packages; the second is Debian's."""
_TYPED = ("<stdin>", "<ipython-input")
"""File names of code that a user typed; dataclasses and torch.fx use similar names for generated code."""


def failure(step: str, error: Exception, *, from_python: bool) -> RehearsalError:
    """Turns an exception into an error that explains it to the user. ``step``: such as "Rehearsing the trainer".
    ``from_python``: whether the job comes from a script, which has arguments instead of flags."""
    text = described(error)
    if from_python and (own := _hint_of_own(error)):
        return RehearsalError(f"{step} failed: {text}", hint=own)
    option = "argument" if from_python else "flag"
    libraries = [library_of(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    importer = next((each for each in reversed(libraries) if each != "Python"), "")  # importlib is Python's
    if isinstance(error, ModuleNotFoundError) and importer == "autotrain_mem":
        hint = "autotrain_mem imports it: pip install --upgrade autotrain_mem, or in a checkout: pip install -e ."
    elif isinstance(error, ImportError):
        hint = f"Install the package that it names, or remove the {option} that needs it."
    else:
        hint = f"Change the {option} that it names, if any." + ("" if from_python else " --debug shows the traceback.")
    return RehearsalError(f"{step} failed in the installed libraries: {text}", hint=hint)


def _hint_of_own(error: Exception) -> str:
    """Names the innermost line of the user's own code in the error's traceback; empty if there is none."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not (own := [each for each in frames if library_of(each[0].f_code.co_filename) == ""]):
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
    return f"It was raised in {where}, during a rehearsal."


def _reads_a_value(error: Exception) -> bool:
    """Returns whether an error comes from an operation that needs values (``Tensor.item``, ``Tensor.nonzero``)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def passed_on(error: Exception) -> dict[str, Any] | None:
    """Describes an error of TRL, PEFT or the user's code, so that the script's process can raise it, too: ``{"kind":
    "ValueError", "text": ..., "note": "It was raised in ..."}``. Returns None for errors of other libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    if _reads_a_value(error) or not frames or library_of(frames[-1].filename) not in ("trl", "peft", ""):
        return None
    text: Any = str(error)
    if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str | int | float | None):
        text = error.args[0]  # a KeyError shows the repr of its key
    for kind in type(error).__mro__:
        if getattr(builtins, kind.__name__, None) is kind:
            with contextlib.suppress(TypeError):  # UnicodeDecodeError takes more than a text, unlike its base
                kind(text)
                return {"kind": kind.__name__, "text": text, "note": _hint_of_own(error)}
    return None


def library_of(filename: str) -> str:
    """Returns the package of a code file: "torch", "Python" for the standard library; empty for the user's own code."""
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
