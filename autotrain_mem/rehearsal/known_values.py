"""Tracks the values of fake tensors that can be known.

The weights of a rehearsal are fake, but its data is real: token ids, labels and masks arrive with their values. An
operator whose inputs are all known is also computed for real. So loss chunks are counted, padding masks are recognised
and boolean indices have their true sizes. Values that depend on the weights stay unknown. Reading one returns a default
that keeps the run on its usual path (False: nothing is NaN). Sizes that depend on one are as large as possible.
"""

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autotrain_mem.rehearsal.fake_mode import QuickFakeMode

LARGEST_KNOWN_ELEMENTS = 1 << 20
"""A known value above 1 Mi elements is dropped, unless an input is as large. Trainers branch on ids, labels and padding
masks, which are smaller (1 Mi is 256 rows of 4096 tokens). An attention mask of tokens x tokens is larger; computing
with it for real took half of a rehearsal's time. Values computed from known pixels are kept, since SmolVLM drops black
images (``modeling_smolvlm.py: get_image_features``)."""

NO_VALUE = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
_SCALAR = torch.ops.aten._local_scalar_dense.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_VIEW = torch.ops.aten.view.default
_INDEX = torch.ops.aten.index.Tensor
_NONZERO = torch.ops.aten.nonzero.default
_IS_NAN = torch.ops.aten.isnan.default
_MASKED_SELECT = torch.ops.aten.masked_select.default
_LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default

_is_dynamic = functools.cache(lambda operator: torch.Tag.dynamic_output_shape in operator.tags)
"""Returns whether the sizes of an operator's result depend on values."""


class Known(NamedTuple):
    """Holds the real value of a fake tensor. All views of a storage share ``valid``: [False] if values are unknown."""

    value: torch.Tensor
    valid: list[bool]


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the real value of a fake tensor; None if it depends on something unknown."""
    known = tensor.__dict__.get("known")
    return known.value if known is not None and known.valid[0] else None


def know(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Sets the known value of a fake tensor, such as a sampled token, which no operator computes."""
    tensor.__dict__["known"] = Known(value, [True])


def real_tensors() -> AbstractContextManager[None]:
    """Within the block, operators on real tensors run for real, whichever dispatch modes are active."""
    return torch._C._DisableTorchDispatch()  # type: ignore[no-any-return]


def tensors_in(items: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Yields the tensors among arguments, including those in lists and tuples."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_in(item)


def written_arguments(operator: Any, args: tuple[Any, ...]) -> list[Any]:
    """Lists the positional arguments that an operator writes in place."""
    named = zip(operator._schema.arguments, args, strict=False)
    return [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]


def _swap(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.__dict__["known"].value
    return type(item)(_swap(part) for part in item) if isinstance(item, (list, tuple)) else item


def _run_for_real(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with real_tensors():
        return operator(*_swap(args), **{name: _swap(item) for name, item in kwargs.items()})


def _count(mask: torch.Tensor) -> int:
    with real_tensors():
        return int(mask.count_nonzero())


def numbers(tensor: torch.Tensor, **_: Any) -> Any:
    """Replaces ``tensor.numpy()`` of a fake tensor: returns its value if known, else zeros."""
    value = known_value(tensor)
    with real_tensors():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).numpy() if value is None else value.detach().numpy()


def numbers_in(data: Any) -> Any:
    """Reads the numbers behind fake scalars in the data of ``torch.tensor(data)``."""
    if isinstance(data, (list, tuple)):
        return [numbers_in(part) for part in data]
    return data.item() if isinstance(data, FakeTensor) and data.dim() == 0 else data


class KnownValues:
    """Runs operators on fake tensors and keeps track of known values. ``run`` is a recorder's ``execute``."""

    def __init__(self, mode: QuickFakeMode) -> None:
        self._mode = mode

    def arrive(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns a collated batch as fake tensors on the device, with known values."""
        return {
            name: self._fake_with_value(value) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operator on fake tensors; supplies values and sizes that they lack, and computes known results."""
        if operator is _SCALAR:
            if (value := known_value(args[0])) is not None:
                with real_tensors():
                    return value.item()
            return False if args[0].dtype is torch.bool else 0.5 if args[0].is_floating_point() else 1
        if operator is _UNSAFE_VIEW:
            operator = _VIEW  # it does the same below autograd, and a fake mode does not cache _unsafe_view
        known = self._is_known(operator, args, kwargs)
        if _is_dynamic(operator):
            return self._dynamic(operator, args, kwargs, known)
        out = self._mode.answer(operator, args, kwargs)
        out = operator(*args, **kwargs) if out is NotImplemented else out
        if operator is _LAYER_NORM_BACKWARD and out[0] is not None and not out[0].is_contiguous():
            # The kernels return a contiguous gradient of the input, whatever the input's strides are
            # (``aten/src/ATen/native/layer_norm.cpp: layer_norm_backward_cpu``, ``cuda/layer_norm_kernel.cu:
            # layer_norm_backward_cuda``). A fake gradient has these strides (``torch/_decomp/decompositions.py``).
            out = (torch.empty_like(out[0], memory_format=torch.contiguous_format), *out[1:])
        if known:
            self._compute_beside(operator, args, kwargs, out)
        elif operator._schema.is_mutable:
            self._forget(operator, args, kwargs)
        elif operator is _IS_NAN and out.numel() <= LARGEST_KNOWN_ELEMENTS:
            with real_tensors():  # nothing is NaN, so a selection of the elements that are not NaN selects all
                know(out, torch.zeros(out.shape, dtype=torch.bool))
        return out

    def _is_known(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        found = False
        for tensor in tensors_in((*args, *kwargs.values())):
            if not isinstance(tensor, FakeTensor):  # made on the host from Python numbers: it is its own value
                tensor.__dict__.setdefault("known", Known(tensor, [True]))
            known = tensor.__dict__.get("known")
            if known is None or not known.valid[0] or known.value.shape != tensor.shape:
                return False
            found = True
        return found or (operator.namespace == "aten" and operator._schema.name not in NO_VALUE)

    def _compute_beside(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        outs = [out] if isinstance(out, torch.Tensor) else list(out) if isinstance(out, (list, tuple)) else []
        if operator._schema.name in NO_VALUE:
            return
        given = (tensor.numel() for tensor in tensors_in((*args, *kwargs.values())))
        most = max(LARGEST_KNOWN_ELEMENTS, 0, *given)
        if any(not isinstance(item, torch.Tensor) or item.numel() > most for item in outs):
            self._forget(operator, args, kwargs)
            return
        if not outs and not operator._schema.is_mutable:
            return
        real = _run_for_real(operator, args, kwargs)
        valid = next((t.__dict__["known"].valid for t in tensors_in((*args, *kwargs.values()))), None)
        for fake, value in zip(outs, [real] if isinstance(real, torch.Tensor) else real or (), strict=True):
            fake.known = Known(value, valid if valid is not None else [True])

    def _forget(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Marks the values of the arguments that an operator wrote as unknown."""
        for tensor in tensors_in((*written_arguments(operator, args), kwargs.get("out"))):
            if (known := tensor.__dict__.get("known")) is not None:
                known.valid[0] = False

    def _dynamic(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: bool) -> Any:
        if known:
            if isinstance(real := _run_for_real(operator, args, kwargs), torch.Tensor):
                return self._fake_with_value(real)
            return tuple(self._fake_with_value(item) for item in real)
        if operator is _INDEX:
            return operator(args[0], [part for index in args[1] for part in self._as_positions(index)])
        if operator is _NONZERO:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
        if operator is _MASKED_SELECT:
            mask = known_value(args[1])
            return args[0].new_empty((args[0].numel() if mask is None else _count(mask),))
        return operator(*args, **kwargs)

    def _as_positions(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Turns a boolean index into index tensors of the positions that it selects: all, if its value is unknown."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        mask = known_value(index)
        selected = index.numel() if mask is None else _count(mask)
        return [index.new_empty((selected,), dtype=torch.long) for _ in range(index.dim())]

    def _fake_with_value(self, real: torch.Tensor) -> torch.Tensor:
        fake = self._mode.from_tensor(real)
        if (held_bytes := real.untyped_storage().nbytes()) > fake.untyped_storage().nbytes():
            # CUDA allocates the largest possible result, then resizes it (``aten/src/ATen/native/cuda/UniqueCub.cu``).
            fake.untyped_storage().resize_(held_bytes)
        with real_tensors():
            know(fake, real.clone())
        return fake
