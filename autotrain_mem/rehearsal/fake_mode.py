"""A fake mode whose cache of results is cheaper to ask: half of a rehearsal's time went into the keys of that cache.

FakeTensorMode looks up every operator by the metadata of its arguments (``torch/_subclasses/fake_tensor.py:
_cached_dispatch_impl``) and gathers them through a dataclass, field by field. Here the same facts are read directly.
What is not an ordinary fake tensor or number goes the usual way, and a torch without these methods never calls them.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = frozenset({int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format})
_PURE_NAMESPACES = frozenset({"bitsandbytes"})
"""Libraries whose operators' results follow from shapes and dtypes alone; torch caches only its own."""


class QuickFakeMode(FakeTensorMode):  # type: ignore[misc]  # torch is untyped to mypy here
    """FakeTensorMode, for static shapes."""

    def _prep_args_for_hash(self, result: list[Any], args: Any, state: Any, id_hashed_objects: list[Any]) -> None:
        if isinstance(args, dict):
            for name, value in args.items():
                result.append(name)
                self._prep_args_for_hash(result, (value,), state, id_hashed_objects)
            return
        result.append(type(args))
        result.append(len(args))
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor and arg.fake_mode is self and arg.constant is None and arg.layout is torch.strided:
                result += _facts(arg)
            elif kind in _PLAIN:
                result += (kind, arg)
            elif kind is list or kind is tuple:
                self._prep_args_for_hash(result, arg, state, id_hashed_objects)
            else:
                super()._prep_args_for_hash(result, (arg,), state, id_hashed_objects)

    def _validate_cache_key(self, func: Any, args: Any, kwargs: Any) -> None:
        if func.namespace not in _PURE_NAMESPACES or func._schema.is_mutable:
            super()._validate_cache_key(func, args, kwargs)


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """``TensorMetadata`` of a strided tensor, without what follows from the rest."""
    return (
        FakeTensor,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.fake_device,
        tensor.requires_grad,
        tensor.is_inference(),
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_quantized,
    )
