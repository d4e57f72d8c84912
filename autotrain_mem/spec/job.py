"""What the user asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Fit = Literal["all", "rounding", "lossless"]
"""How far the ladder may be climbed: ``lossless`` stops before rounding changes, ``rounding`` before LoRA."""


EXAMPLE_DATASETS = {"sft": "trl-lib/Capybara"}
"""What TRL's own documentation trains each method on (trl/scripts/sft.py); taken when no dataset is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training job in the user's own words.

    ``arguments`` holds exactly what the user gave, under TRL's names, and nothing else: every one of them is pinned.
    """

    method: str
    """The TRL trainer: ``sft``."""
    model: str
    """A hub id or a folder. A rehearsal needs its config.json only; training needs the weights."""
    dataset: str | None
    """A hub id, a folder, or a .json, .jsonl, .parquet or .csv file. None: TRL's own example for the method."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """The ``env:`` mapping of a YAML config, for the processes that load the model."""
    effective_batch_size: int | None = None
    """Rows per optimizer step, when given as one number instead of TRL's two."""
    fit: Fit = "all"
    forbid: frozenset[str] = frozenset()
    """Levers that may not be pulled, by name (see ``planner.ladder``)."""

    @property
    def pins_length(self) -> bool:
        """Whether max_length is given as a number (or as no limit), not as ``auto``."""
        return bool(self.arguments.get("max_length", "auto") != "auto")

    def to_json(self) -> dict[str, Any]:
        """Wire form, for child processes and the run record."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        mappings = {"arguments": dict(self.arguments), "environment": dict(self.environment)}
        return fields | mappings | {"forbid": sorted(self.forbid)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Job:
        """Read what :meth:`to_json` wrote."""
        return cls(**{**fields, "forbid": frozenset(fields["forbid"])})
