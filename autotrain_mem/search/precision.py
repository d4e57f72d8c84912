"""Mixed precision by the card: bfloat16 where tensor cores compute it, float16 with a scaler of the loss elsewhere.

TRL's own default is bfloat16 everywhere (``trl/trainer/base_config.py: __post_init__``). A card before Ampere emulates
it (``torch/cuda/__init__.py: is_bf16_supported``, which counts emulation): it runs, without tensor cores and without a
fused attention kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotrain_mem.settings.levers import KEEPS_UPDATES, LOST_ABOVE, USUAL_WEIGHT
from autotrain_mem.types import Knobs
from autotrain_mem.types.hardware import Capability, lacks_bf16

HALF = ("float16", "bfloat16")


def precise_for(base: Knobs, arguments: Mapping[str, Any], compute_capability: Capability) -> Knobs:
    """The base of a search in the precision of its card; unchanged where the user said ``bf16`` or ``fp16``, or pinned
    weights whose gradients the scaler would refuse.

    Example: for a T4 ``fp16`` is on, and TRL's float32 weights stay what they are: :func:`half_of` says in what half
    precision a lever may load them.
    """
    precise = replace(base, fp16=True)
    if lacks_bf16(compute_capability) and not {"bf16", "fp16"} & arguments.keys() and can_scale(precise):
        return precise
    return base


def half_of(knobs: Knobs) -> str:
    """The dtype of a frozen base in half precision: that of the layers' products, so that none is cast."""
    return "float16" if knobs.fp16 else "bfloat16"


def loses_nothing(base: Knobs, checkpoint_dtype: str | None) -> bool:
    """Whether half precision is what the weights are saved in, of a model that stays frozen: nothing of what is trained
    is rounded.

    PEFT keeps an adapter in float32 beside such a base (``peft/tuners/tuners_utils.py: cast_adapter_dtype``); TRL makes
    that of a quantized base bfloat16 in any case (``trl/trainer/sft_trainer.py: __init__``).
    """
    return base.use_peft and checkpoint_dtype == half_of(base)


def loses_updates(knobs: Knobs) -> bool:
    """Whether weights are trained in bfloat16 itself and most are too large to be changed by a step of Adam, which is
    about the learning rate. Shards have float32 copies (``search.shardings``)."""
    is_half = knobs.dtype == "bfloat16" and not knobs.use_peft and not knobs.is_sharded
    is_adam = "adam" in knobs.optim and knobs.optim != KEEPS_UPDATES
    return is_half and is_adam and (knobs.learning_rate or 1.0) * LOST_ABOVE < USUAL_WEIGHT


def can_scale(knobs: Knobs) -> bool:
    """Whether the scaler takes the gradients of what is trained: weights in half precision have such gradients, and it
    refuses them (``torch/amp/grad_scaler.py: _unscale_grads_``). Of an adapter all is float32."""
    return not knobs.fp16 or knobs.use_peft or knobs.dtype not in HALF


def why_fp16(compute_capability: Capability) -> str:
    """One line for the user, beside the lever ``fp16``."""
    name = ".".join(map(str, compute_capability))
    return (
        f"compute capability {name} has no tensor cores for bfloat16: mixed precision in float16, with a "
        "scaler that keeps small gradients from vanishing"
    )
