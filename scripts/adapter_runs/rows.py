"""Reads the results of PEFT's method comparison: one JSON for each run, with its config and what it reserved."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KNOWN = "lora--llama-3.2-3B-rank32"
"""The run by which the length of the longest batch is found, which no result tells."""


@dataclass(frozen=True, slots=True)
class Row:
    """One public run."""

    name: str
    result: Mapping[str, Any]

    @property
    def measured_bytes(self) -> int:
        """What the process had reserved at most, loading and evaluation included (``utils.py: log_results``)."""
        return int(self.result["train_info"]["accelerator_memory_max"])

    @property
    def adapter(self) -> dict[str, Any] | None:
        """PEFT's config, as the run began with it; None where all weights were trained.

        AdaLoRA writes into it which ranks it kept (``peft/tuners/adalora/model.py: update_and_allocate``).
        """
        told: dict[str, Any] | None = self.result["run_info"]["peft_config"]
        if not told:
            return None
        return {**told, "rank_pattern": None} if told["peft_type"] == "ADALORA" else told

    @property
    def config(self) -> Mapping[str, Any]:
        """How it was trained."""
        found: Mapping[str, Any] = self.result["run_info"]["train_config"]
        return found

    @property
    def is_plain(self) -> bool:
        """Whether it was trained as all are: by torch's AdamW, without compiling, autocast or checkpointing."""
        told = {"optimizer_type": "AdamW", "dtype": "bfloat16", "compile": False, "use_amp": False, "use_gc": False}
        return told.items() <= self.config.items()


def read_rows(folder: pathlib.Path) -> list[Row]:
    """Returns the runs that ended well, the known one first; the folder is ``method_comparison/MetaMathQA/results``."""
    rows = [Row(file.stem, json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*.json"))]
    ended = [row for row in rows if row.result["train_info"]["status"] == "success"]
    return sorted(ended, key=lambda row: row.name != KNOWN)
