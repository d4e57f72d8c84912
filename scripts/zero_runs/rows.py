"""Reads the public runs of DeepSpeed's engine that say how they were made, and what they reserved."""

from __future__ import annotations

import csv
import pathlib
import re
from dataclasses import dataclass
from typing import Any

from autotrain_mem.machine.catalog import named

MODEL = "meta-llama/Llama-3.1-8B"
_STRATEGY = re.compile(r"zero([123])(\+offload_optimizer)?")
_LIGER = re.compile(r"liger ([\d.]+)")
_FLASH3 = (9, 0)
"""The cards that its kernel was written for. Others ran another flash kernel, whose results have the same sizes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One public run, by its columns."""

    columns: dict[str, str]

    @property
    def measured_gib(self) -> float:
        """What the process that reserved most had reserved at most, in GiB."""
        return float(self.columns["gib_per_gpu"])

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return int(self.columns["seq_len"])

    @property
    def recomputes(self) -> bool:
        """Whether activations were checkpointed."""
        return self.columns["grad_ckpt"] == "yes"

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return int(self._strategy[1])

    @property
    def offloads(self) -> bool:
        """Whether the optimizer lay on the host."""
        return bool(self._strategy[2])

    @property
    def liger(self) -> str | None:
        """The version of Liger that it ran; None where its notes say that it ran without."""
        stated = _LIGER.search(self.columns["trl_or_transformers_version"])
        return None if "Liger no" in self.columns["notes"] or stated is None else stated[1]

    @property
    def card(self) -> str:
        """The catalog's name of its GPU. Example: ``H200-141`` is ``h200``."""
        return self.columns["gpu"].partition("-")[0].lower()

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Of that GPU."""
        capability = named(self.card).compute_capability
        assert capability is not None, "every card of the catalog has one"
        return capability

    @property
    def attention(self) -> str:
        """The attention that transformers is asked for."""
        return "flash_attention_3" if self.compute_capability == _FLASH3 else "flash_attention_2"

    @property
    def processes(self) -> int:
        """Counts its GPUs."""
        return int(self.columns["n_gpus"])

    @property
    def _strategy(self) -> re.Match[str]:
        found = _STRATEGY.fullmatch(self.columns["strategy"])
        assert found is not None, "read_rows takes no other"
        return found


def read_rows(path: pathlib.Path | None) -> list[Row]:
    """Returns the runs of ZeRO that tell what was reserved, all of one model; none without a file."""
    if path is None:
        return []
    with path.open(newline="", encoding="utf-8") as file:
        found = [*csv.DictReader(file)]
    told = {"metric": "reserved", "model": MODEL}
    return [Row(row) for row in found if _STRATEGY.fullmatch(row["strategy"]) and told.items() <= row.items()]


def zero_section(stage: int, *, offloads: bool) -> dict[str, Any]:
    """Returns a ``zero_optimization`` that says nothing of buckets."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return zero
