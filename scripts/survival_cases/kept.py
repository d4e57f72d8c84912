"""Keeps results on disk, a JSON object for each case, so that an interrupted run can be continued."""

import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Row = dict[str, Any]


class Kept:
    """The rows of one section, by name. Safe to use from several threads."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._rows: dict[str, Row] = json.loads(path.read_text()) if path.is_file() else {}

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Row:
        return self._rows[name]

    def put(self, name: str, row: Row) -> None:
        with self._lock:
            self._rows[name] = row
            unfinished = self._path.with_suffix(".partial")
            unfinished.write_text(json.dumps(self._rows, indent=1) + "\n")
            os.replace(unfinished, self._path)

    def fill(self, names: Iterable[str], make: Callable[[str], Row], processes: int) -> dict[str, Row]:
        """Returns the rows of these names; makes the missing ones, ``processes`` at a time."""
        wanted = list(names)
        missing = [name for name in wanted if name not in self]
        started = time.monotonic()

        def made(name: str) -> None:
            row = make(name)
            self.put(name, row)
            print(f"{time.monotonic() - started:6.0f} s  {name}: {row.get('outcome', '')}", file=sys.stderr, flush=True)

        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(made, missing))
        return {name: self[name] for name in wanted}
