"""Tracks the values of device tensors that the host can derive: ids, labels, masks and what is computed from them.

Kernels of the stand-in device compute nothing, so everything read back from it is zero: no token would be selected, and
no completion would have a length. But batches come from the host, with known values. This mode intercepts every call of
a torch function in Python. After the call on the device, it repeats the call on the host if all inputs are known and
small, and stores the result with the device's tensor. Values that depend on the weights stay unknown and read as zero.

- Copies to the host, ``item()``, ``bool()`` and similar calls return the known value.
- Some operators read a size back (``nonzero``, a boolean index). torch's own code then runs completely, with all its
  allocations, and the device returns the known size. An unknown mask selects everything, as a rehearsal assumes.
- Every sampled token is ORDINARY_TOKEN.

This neither keeps tensors on the device alive nor allocates there. It works above autograd on purpose: under a mode
below it, autograd itself behaves differently (for example, it adds gradients out of place:
``ATen/TensorSubclassLikeUtils.h: isTensorSubclassLike``), and the run would no longer be the real one. Therefore sizes
that a backward formula reads back cannot be supplied.
"""

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN
from autotrain_mem.rehearsal.known_values import tensors_in

LARGEST_KNOWN_ELEMENTS = 1 << 20
"""The same limit as in a rehearsal (``rehearsal/values.py``)."""
READ_BACK = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal", "__contains__"})
SELECTING = frozenset({"__getitem__", "__setitem__", "nonzero", "argwhere", "where", "masked_select"})
NO_VALUE = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
RANDOM = ("rand", "normal", "uniform", "bernoulli", "dropout", "exponential", "multinomial", "trunc_normal")


class _Known:
    """The value of a device tensor. ``valid`` is shared by all views of one storage."""

    __slots__ = ("valid", "value")

    def __init__(self, value: torch.Tensor, valid: list[bool]) -> None:
        self.value = value
        self.valid = valid


def know(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Registers the value of a device tensor."""
    tensor.__dict__["known"] = _Known(value, [True])


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the value of a device tensor; None if it is unknown, as for every tensor that requires gradients."""
    known = tensor.__dict__.get("known")
    return known.value if known is not None and known.valid[0] and not tensor.requires_grad else None


class HostValues(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self._runtime = ctypes.CDLL("libcudart.so.13")

    @contextmanager
    def in_recomputation(self) -> Iterator[None]:
        """Inside, values are also tracked while checkpointing recomputes layers. Otherwise the mode is inactive there:
        in autograd's own threads, and while it handles ``backward()`` itself."""
        from torch.utils import checkpoint

        run = checkpoint._run_fn_with_dynamo_disabled

        def run_with_values(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run(*args, **kwargs)

        with patch.object(checkpoint, "_run_fn_with_dynamo_disabled", run_with_values):
            yield

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in ("__get__", "__set__", "size", "dim", "stride", "is_floating_point", "numel"):
            return function(*args, **kwargs)
        on_device = [tensor for tensor in tensors_in((*args, *kwargs.values())) if tensor.is_cuda]
        known = all(known_value(tensor) is not None for tensor in on_device)
        if name in READ_BACK and on_device and known:
            function(*args, **kwargs)
            return function(*_swap(args), **_swap_all(kwargs))
        if name == "repeat_interleave" and on_device and known and len(args) > 1 and isinstance(args[1], torch.Tensor):
            # With ``output_size``, torch reads nothing back (``ATen/native/Repeat.h: repeat_interleave_common``).
            # Without it, torch reads two numbers, for the second of which it briefly allocates 2 x 512 bytes.
            kwargs = {**kwargs, "output_size": int(_swap(args[1]).sum())}
        size = self._size_read_back(name, args, known) if on_device else None
        if size is not None:
            self._runtime.standin_answer(ctypes.c_longlong(size))
        out = function(*args, **kwargs)
        self._runtime.standin_no_answer()
        if not on_device and not any(tensor.is_cuda for tensor in tensors_in([out])):
            return out
        if name == "multinomial":
            know(out, torch.full(out.shape, ORDINARY_TOKEN, dtype=out.dtype))
        elif known and name not in NO_VALUE and not any(word in name for word in RANDOM):
            _compute_beside(function, args, kwargs, out)
        elif name.endswith("_") or name.startswith("__i") or name == "__setitem__":
            _forget(args[:1], kwargs)
        return out

    def _size_read_back(self, name: str, args: Any, known: bool) -> int | None:
        """Returns the size that the function will read back from the device; None if it reads none."""
        if name == "unique_consecutive" and known:
            return int(_swap(args[0]).unique_consecutive().numel())
        if name not in SELECTING:
            return None
        if name in ("nonzero", "argwhere") or (name == "where" and len(args) == 1):
            return _count(args[0])
        masks = [each for each in tensors_in(args[1:]) if each.dtype in (torch.bool, torch.uint8)]
        return _count(masks[0]) if masks and name != "where" else None


def _compute_beside(function: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
    outs = list(tensors_in([out]))
    inputs = list(tensors_in((*args, *kwargs.values())))
    given = [tensor for tensor in inputs if tensor.is_cuda]
    most = max(LARGEST_KNOWN_ELEMENTS, 0, *(tensor.numel() for tensor in inputs))
    if any(each.numel() > most for each in outs):
        _forget((*args[:1], *outs), {})
        return
    try:
        with torch.no_grad():
            reals = list(tensors_in([function(*_swap(args), **_swap_all(kwargs))]))
    except (RuntimeError, TypeError, AssertionError):  # the host cannot run it, or it concerns the device itself
        _forget((*args[:1], *outs), {})
        return
    before = [known.valid for tensor in given if (known := tensor.__dict__.get("known")) is not None]
    for each, value in zip(outs, reals, strict=False):
        if not each.is_cuda:
            if given:
                each.detach().copy_(value)  # read back
        elif each.shape == value.shape and not any(each is tensor for tensor in given):
            # A value from the host is cloned, since the host may change it. A view of a known value stays a view.
            each.__dict__["known"] = _Known(value if before else value.clone(), before[0] if before else [True])


def _count(mask: torch.Tensor) -> int:
    value = known_value(mask) if mask.is_cuda else mask
    return mask.numel() if value is None else int(value.count_nonzero())


def _swap(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return known_value(item) if item.is_cuda else item
    if isinstance(item, torch.device) or (isinstance(item, str) and item.startswith("cuda")):
        return torch.device("cpu")
    if isinstance(item, (list, tuple)) and type(item) in (list, tuple):
        return type(item)(_swap(part) for part in item)
    return item


def _swap_all(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _swap(item) for name, item in kwargs.items()}


def _forget(items: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Marks tensors as unknown after an unknown value was written into them."""
    for tensor in tensors_in((*items, kwargs.get("out"))):
        if (known := tensor.__dict__.get("known")) is not None:
            known.valid[0] = False
