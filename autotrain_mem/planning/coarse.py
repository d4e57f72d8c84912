"""Says what a model's sizes alone tell, while workers import TRL: parameters, and the bytes that they take."""

from __future__ import annotations

from autotrain_mem.methods.parameter_count import parameters
from autotrain_mem.planning.wish import Wish
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.sources import check_model_folder
from autotrain_mem.support.units import format_bytes

_TRAINED_BYTES = 16
"""Of a parameter: weight, gradient and AdamW's two moments in float32."""
_HELD_BYTES = 2
"""In bfloat16."""


def coarse_answer(wish: Wish) -> str:
    """Returns two lines about the model of a wish; empty where its sizes are not at hand, or not of a known kind."""
    model = wish.model or wish.argument("model_name_or_path")
    try:
        config = check_model_folder(str(model), "--model") if model else None
    except AutofitError:  # said where it stops something
        return ""
    count = None if config is None else parameters(config)
    if count is None:
        return ""
    trained, held = format_bytes(_TRAINED_BYTES * count), format_bytes(_HELD_BYTES * count)
    return (
        f"From sizes alone: {count / 1e9:.3g} billion parameters, {trained} to train all of them in float32 with\n"
        f"AdamW, {held} to hold them in bfloat16; activations come on top. The plan follows.\n"
    )
