"""A model with the real architecture and no weights: made on the meta device, then given fake tensors.

Only config.json is needed. A rehearsed model keeps everything that the trainer looks at: class, config, tied weights,
names, dtypes and which parameters train.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


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


def stand_in(model: Any) -> None:
    """Give bitsandbytes' layers of a model on the meta device their quantized weights; call it under a fake mode."""
    import bitsandbytes

    quantize = functools.cache(_quantize)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = module.weight
            packed, described = quantize(
                (module.out_features, module.in_features),
                # A checkpoint that is quantized already has packed weights, which unpack to the model's dtype.
                model.config.dtype if model.hf_quantizer.pre_quantized else weight.dtype,
                blocksize=weight.blocksize,
                compress_statistics=weight.compress_statistics,
                quant_type=weight.quant_type,
                quant_storage=weight.quant_storage,
            )
            state = _quant_state(described)
            _exchange(module, _like(packed), quant_state=state, bnb_quantized=True)
            module.quant_state = state
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            # bitsandbytes/nn/modules.py: Int8Params._quantize: int8 rows, and one float32 scale for each.
            rows = torch.empty((module.out_features, module.in_features), dtype=torch.int8)
            _exchange(module, rows, CB=rows, SCB=torch.empty(module.out_features))


def _quantize(shape: tuple[int, int], dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, Any]:
    """Let bitsandbytes quantize on the meta device (``bitsandbytes/functional.py: quantize_4bit``): sizes are its own.

    Its table of codes is computed from values, and kept for the whole process: here it is lent one without values.
    """
    from bitsandbytes import functional
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), patch.dict(functional.name2qmap, {"dynamic": torch.empty(256, device="meta")}):
        packed, state = functional.quantize_4bit(torch.empty(shape, dtype=dtype, device="meta"), **options)
    return packed, state


def _exchange(linear: Any, stored: torch.Tensor, **attributes: Any) -> None:
    weight = torch.nn.Parameter(stored, requires_grad=False)
    for name, value in {**linear.weight.__dict__, **attributes}.items():
        setattr(weight, name, value)
    linear.weight = weight


def _quant_state(described: Any) -> Any:
    from bitsandbytes.functional import QuantState

    return QuantState(
        absmax=_like(described.absmax),
        shape=described.shape,
        code=_like(described.code),
        blocksize=described.blocksize,
        quant_type=described.quant_type,
        dtype=described.dtype,
        offset=_like(described.offset) if described.nested else None,
        state2=_quant_state(described.state2) if described.nested else None,
    )


def _like(described: torch.Tensor) -> torch.Tensor:
    return torch.empty(described.shape, dtype=described.dtype)
