"""The file that a watch leaves in the output folder: one JSON object a line, sizes in bytes."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

RECORD_NAME = "memory.jsonl"


class Record:
    """Appends, so that a run that goes on writes on; opened for each line, so that nothing is lost with the process.

    A line that the process before was killed in is ended first, and stays a line that no JSON reader takes.

    Args:
        path: The folder is made when it is not there.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._is_mended = False

    def write(self, line: Mapping[str, Any]) -> None:
        """Add one line.

        Raises:
            OSError: The disk is full, or the folder cannot be written to.
        """
        if not self._is_mended:
            self._mend()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _mend(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        self._is_mended = True


def record_path(file: str | pathlib.Path, output_dir: str, rank: int) -> pathlib.Path:
    """``memory.jsonl`` of rank 0, ``memory.rank1.jsonl`` of rank 1."""
    path = pathlib.Path(output_dir) / file
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
