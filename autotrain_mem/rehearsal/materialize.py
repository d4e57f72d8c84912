"""A model with the real architecture and no weights: built on the meta device, then given fake tensors.

Only config.json is needed. A rehearsed model keeps everything that the trainer looks at: class, config, tied weights,
names, dtypes and which parameters train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from autotrain_mem.errors import ModelNotFoundError, UnsupportedModelError
from autotrain_mem.rehearsal.quantized import stand_in


def load_config(model: str, **options: Any) -> Any:
    """The model's transformers config.

    Raises:
        ModelNotFoundError: a hub id that cannot be reached.
        UnsupportedModelError: the installed transformers does not know the architecture.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, **options)
    except OSError as error:
        raise ModelNotFoundError(
            f"No model {model!r}: it is neither a folder here nor a hub id that can be reached.",
            hint="Check the spelling; offline, give the folder that holds config.json (weights are needed to train, "
            "not to plan).",
        ) from error
    except (ValueError, KeyError) as error:
        import transformers

        raise UnsupportedModelError(
            f"transformers {transformers.__version__} cannot read the config of {model}: {error}",
            hint="Update transformers, or pass --trust_remote_code true for a model that brings its own code.",
        ) from error
    return config


def build_on_meta(config: Any, *, dtype: str, attn_implementation: str | None) -> torch.nn.Module:
    """The architecture that TRL would load (``trl.trainer.utils.create_model_from_path``), on the meta device.

    Args:
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for what the config says the checkpoint holds.
        attn_implementation: None for the library's own choice.

    Raises:
        UnsupportedModelError: no causal language model of this architecture in the installed transformers.
    """
    import transformers
    from transformers.initialization import no_init_weights

    names = config.architectures or []
    architecture = getattr(transformers, names[0], None) if names else None
    if architecture is None:
        architecture = transformers.AutoModelForCausalLM
    torch_dtype = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    build = architecture.from_config if hasattr(architecture, "from_config") else architecture._from_config
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with torch.device("meta"), no_init_weights():
            model = build(config, dtype=torch_dtype, **options)
        model.tie_weights()
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModelError(
            f"A model of type {config.model_type!r} cannot be built for training: {error}",
            hint="SFT needs a causal language model that transformers implements; see --attn_implementation for "
            "attention that is not installed here.",
        ) from error
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a causal language model: it has no output head over the vocabulary.",
            hint="SFT trains causal language models, such as Qwen2ForCausalLM or LlamaForCausalLM.",
        )
    assert isinstance(model, torch.nn.Module)
    return model


def materialize(model: torch.nn.Module) -> torch.nn.Module:
    """Give every meta tensor a fake one (call it under a fake mode); a tied parameter stays one parameter."""
    if getattr(model, "hf_quantizer", None) is not None:
        stand_in(model)
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None or old.device.type != "meta":
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    is_parameter = isinstance(old, torch.nn.Parameter)
                    made[id(old)] = torch.nn.Parameter(new, old.requires_grad) if is_parameter else new
                table[name] = made[id(old)]
    return model


@contextmanager
def conversion_by_assignment() -> Iterator[None]:
    """``module.to()`` assigns new parameters: on fake ones it would end in swap_tensors, which refuses them."""

    def assign(module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(convert)
        for name, old in module._parameters.items():
            if old is not None:
                with torch.no_grad():
                    new = convert(old)
                if new is not old:
                    module._parameters[name] = torch.nn.Parameter(new, old.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
        return module

    with patch.object(torch.nn.Module, "_apply", assign):
        yield
