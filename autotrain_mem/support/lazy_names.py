"""Imports a package's public names from its modules as they are asked for, so that importing it takes no time."""

from __future__ import annotations

import importlib
from collections.abc import Mapping


def lazily_imported(package: str, names: Mapping[str, str], name: str) -> object:
    """Returns what a package's ``__getattr__`` is asked for.

    Args:
        names: Module of the package -> the names of it that the package offers, in one text.

    Raises:
        AttributeError: the package offers no such name.
    """
    for module, offered in names.items():
        if name in offered.split():
            return getattr(importlib.import_module(f"{package}.{module}"), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def html_of(shown: object) -> str:
    """Returns what a notebook shows of a result; the module that knows how is imported when one is shown."""
    html = lazily_imported(__name__.partition(".")[0], {"report.first_screen": "html_of"}, "html_of")
    return str(html(shown))  # type: ignore[operator]
