"""Names the layers that FSDP shards one by one: those that transformers names and the model has.

A class of models names the layers of all that it may consist of, such as those of images in
``Qwen3_5ForCausalLM._no_split_modules``, and accelerate refuses a name that it cannot find in the model
(``accelerate/utils/dataclasses.py: set_auto_wrap_policy``), PEFT as well (``peft/utils/other.py:
fsdp_auto_wrap_policy``). That keeps Gemma 3 from 4B on, Gemma 4 and Qwen3.5 from being sharded.
"""

from __future__ import annotations

from typing import Any


def layers_to_shard(model: Any) -> tuple[str, ...]:
    """Returns the names of the classes, of those that a model names, that it has."""
    classes = {type(module).__name__ for module in model.modules()}
    return tuple(sorted({*(getattr(model, "_no_split_modules", None) or ())} & classes))


def name_layers_to_shard(model: Any) -> None:
    """Takes the names that a model has no layers of away from it, also under an adapter."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._no_split_modules = {*layers_to_shard(module)}
            return  # the outermost: accelerate and PEFT ask no other
