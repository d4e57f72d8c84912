"""Imports a package's public names on first use, so that importing the package takes no time."""

import ast
import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path


def lazily_imported(package: str, file: str, name: str) -> object:
    """Returns the object ``name``, which ``file`` (a package's ``__init__.py``) imports for type checkers only. The
    package's ``__getattr__`` calls this function. Raises AttributeError if the file imports no such name."""
    if name not in _modules(file):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_modules(file)[name]), name)


@cache
def _modules(file: str) -> Mapping[str, str]:
    """Reads the block ``if TYPE_CHECKING``: name -> the module that it is imported from."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


class ShownInNotebooks:
    """Shows a result in a notebook as in the terminal; imports the renderer on first use."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(importlib.import_module("autotrain_mem.report.first_screen").html_of(self))
