"""A model with the real architecture and no weights: made on the meta device, then given fake tensors.

Only config.json is needed. A rehearsed model keeps everything that the trainer looks at: class, config, tied weights,
names, dtypes and which parameters train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from autotrain_mem.rehearsal.model.hub_errors import not_loaded
from autotrain_mem.rehearsal.model.quantized import stand_in
from autotrain_mem.support.errors import UnsupportedModelError


def load_config(model: str, **options: Any) -> Any:
    """The model's transformers config.

    Raises:
        ModelNotFoundError: there is none, or the hub does not give it.
        UnsupportedModelError: the installed transformers does not know the architecture.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, **options)
    except OSError as error:
        raise not_loaded(model, error) from error
    except (ValueError, KeyError) as error:
        import transformers

        raise UnsupportedModelError(
            f"transformers {transformers.__version__} cannot read the config of {model}: {error}",
            hint="Update transformers, or pass --trust_remote_code true for a model that brings its own code.",
        ) from error


def materialize(model: torch.nn.Module) -> torch.nn.Module:
    """Give every meta tensor a fake one (call it under a fake mode); a tied parameter stays one parameter."""
    if getattr(model, "hf_quantizer", None) is not None:
        stand_in(model)
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None or old.device.type != "meta":
                    continue
                if id(old) not in fakes:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    is_parameter = isinstance(old, torch.nn.Parameter)
                    fakes[id(old)] = torch.nn.Parameter(new, old.requires_grad) if is_parameter else new
                table[name] = fakes[id(old)]
    return model


@contextmanager
def conversion_in_place() -> Iterator[None]:
    """``module.to()`` gives parameters new data, as on real ones: on fake ones it would end in swap_tensors.

    That one refuses them. A parameter that two modules share stays one.
    """

    def apply(module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(convert)
        for parameter in module._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    new = convert(parameter)
                if new is not parameter:
                    parameter.data = new
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
        return module

    with patch.object(torch.nn.Module, "_apply", apply):
        yield
