"""Temporary folders of a parent that was killed: it tidies nothing up, so its workers do, which outlive it by a moment.

What is in them is as private as the user's data: rows of a script's own memory, whole.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

PREFIX = "autofit-"
"""How the names of our temporary folders begin; nothing of another name is removed."""
SCRATCH = "AUTOFIT_SCRATCH"
"""The variable that tells a worker which folder is its own: not TMPDIR alone, which may be everyone's."""


class ScratchFolders:
    """The folders that a worker knows of: its own, and those of what scripts handed over."""

    def __init__(self) -> None:
        own = os.environ.get(SCRATCH)
        self._folders = {pathlib.Path(own)} if own else set()

    def note(self, request: Mapping[str, Any]) -> None:
        """A question came, perhaps with the path of a file that a script handed over."""
        call = (request.get("job") or {}).get("python_call")
        if call is not None:
            self._folders.add(pathlib.Path(call["path"]).parent)

    def remove(self) -> None:
        """Remove them all; other workers of the same parent may be doing the same."""
        for folder in self._folders:
            if folder.name.startswith(PREFIX):
                _remove(folder)


def _remove(folder: pathlib.Path) -> None:
    """Renames the folder first: whoever still writes there then finds no folder, and cannot add to it meanwhile."""
    renamed = folder.with_name(f"{folder.name}-over-{os.getpid()}")
    try:
        folder.rename(renamed)
    except OSError:  # another worker was first; or Windows, where a file in it is open
        renamed = folder
    shutil.rmtree(renamed, ignore_errors=True)
