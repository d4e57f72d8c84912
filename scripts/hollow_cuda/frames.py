"""Where each block of a run was asked for: torch's own functions, and the lines of Python that led there."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu_records.history import ACTIONS

NOT_TOLD = ("hollow_cuda/", "/torch/overrides.py", "/torch/_ops.py", "/_dynamo/")
PACKAGES = "packages/"
NATIVE = ("at::native::", "autograd::generated::", "pytorch_flash::", "InputBuffer", "AccumulateGrad", "getCUDABlasLt")
GENERATED = "torch::autograd::generated::"
MOST_FUNCTIONS, MOST_FRAMES = 4, 24
SUFFIX = ".frames.json.gz"


class Frames:
    """One entry for each event that ``gpu_records.history.History`` keeps, in its order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """torch's functions in the first line, if asked for; then Python's frames, a line each, innermost first."""
        self.of_event: list[int] = []

    def take(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """From one device's list of ``_snapshot()["device_traces"]``."""
        numbers: dict[str, int] = {}
        for entry in entries:
            if entry["action"] in ACTIONS:
                told = _told(entry) if entry["action"] == "alloc" else ""
                self.of_event.append(numbers.setdefault(told, len(numbers)))
        self.names = list(numbers)

    def write(self, folder: Path, case: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with gzip.open(folder / f"{case}{SUFFIX}", "wt", encoding="utf-8", compresslevel=1) as file:
            json.dump({"names": self.names, "of_event": self.of_event}, file)

    @classmethod
    def read(cls, folder: Path, case: str) -> Frames:
        frames = cls()
        with gzip.open(folder / f"{case}{SUFFIX}", "rt", encoding="utf-8") as file:
            read = json.load(file)
        frames.names, frames.of_event = read["names"], read["of_event"]
        return frames

    def at(self, event: int) -> list[str]:
        """Of an allocation: torch's functions, then Python's frames."""
        return self.names[self.of_event[event]].splitlines()


def _told(entry: Mapping[str, Any]) -> str:
    native, python = [], []
    for frame in entry.get("frames", ()):
        if any(part in frame["name"] for part in NATIVE):
            native.append(frame["name"].partition("(")[0].rpartition(" ")[2].removeprefix(GENERATED))
        elif frame["filename"].endswith(".py") and not any(part in frame["filename"] for part in NOT_TOLD):
            python.append(f"{frame['filename'].rpartition(PACKAGES)[2]}:{frame['line']} {frame['name']}")
    functions = [name.removeprefix("at::native::") for name in native if "empty" not in name]
    return "\n".join([" < ".join(functions[:MOST_FUNCTIONS]), *python[:MOST_FRAMES]])
