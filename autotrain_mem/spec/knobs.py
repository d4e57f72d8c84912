"""The settings that a plan decides, under TRL's names."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """One point of the search. Everything not named here stays as the user or TRL set it."""

    per_device_train_batch_size: int
    """Rows of one micro-batch on one device."""
    gradient_accumulation_steps: int
    max_length: int | None
    """Tokens that a row is truncated to; None: rows are not truncated."""
    gradient_checkpointing: bool
    packing: bool
    use_peft: bool
    """LoRA on the frozen base model; rank and targets come from the job's arguments or TRL's defaults."""
    dtype: str
    """The dtype that the weights are loaded in: ``float32`` (TRL's default), ``bfloat16``, ``float16`` or ``auto``."""
    optim: str
    """An optimizer name of transformers, such as ``adamw_torch_fused``."""

    @property
    def effective_batch_size(self) -> int:
        """Rows per optimizer step on one device."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Knobs:
        return cls(**{field.name: values[field.name] for field in fields(cls)})


class Harm(IntEnum):
    """What a lever costs the training it is pulled on; the ladder is climbed in this order."""

    NONE = 0
    TIME = 1
    ROUNDING = 2
    WHAT_IS_TRAINED = 3
    DATA = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """One change of a plan against TRL's defaults."""

    name: str
    """The knob that was changed, or the lever's own name where it moves several (``micro_batch``)."""
    before: Any
    after: Any
    harm: Harm
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "before": self.before, "after": self.after, "harm": int(self.harm), "why": self.why}
