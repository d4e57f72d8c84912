"""Provides a FakeTensorMode for static shapes that takes the results of repeated operators from its own cache.

FakeTensorMode looks up every operator by the metadata of its arguments (``torch/_subclasses/fake_tensor.py:
_cached_dispatch_impl``). That takes about 130 microseconds per operator, which was most of a rehearsal's time. This
mode stores torch's cache entries a second time, under a cheaper key: the few facts that determine a result. torch still
decides what may be cached. Operators with other arguments than ordinary fake tensors, plain values and lists of these
take torch's path.
"""

import functools
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = frozenset({int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format})
_PURE_NAMESPACES = frozenset({"bitsandbytes"})
"""Namespaces of operators whose results depend on shapes and dtypes alone; torch caches only its own operators."""
_aten = torch.ops.aten
_PLACED = frozenset(
    {_aten.as_strided.default, _aten.view.dtype, _aten.view_as_real.default, _aten.view_as_complex.default}
)
"""Views whose offset is absolute, or in elements of another size. All other results are equally far from their argument
at any offset: this saves torch's lookup for each window of an image."""
_META = torch.device("meta")

Key = tuple[Any, ...]


class QuickFakeMode(FakeTensorMode):  # type: ignore[misc]  # torch is untyped to mypy here
    """A FakeTensorMode with a faster cache, which :meth:`answer` reads without the dispatcher."""

    def __init__(self, is_quick: bool | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._states: dict[torch.device, dict[str, Any]] = {}
        self._is_quick = _is_quick() if is_quick is None else is_quick

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns an operator's result from the cache; NotImplemented if the operator must be called. The recorder
        calls this from above this mode. If other modes are active, the operator must be called, so that they see it."""
        if not self._is_quick or torch._C._len_torch_dispatch_stack() != 1:
            return NotImplemented
        recipe = _recipes.get(self._key(func, args, kwargs))
        return NotImplemented if recipe is None else self._follow(recipe, args)

    def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Replaces torch's lookup: returns a result from this cache, or torch's result, which it adds to this cache."""
        key = self._key(func, args, kwargs)
        if (recipe := _recipes.get(key, _UNSEEN)) is None:
            return super()._cached_dispatch_impl(func, types, args, kwargs)
        if recipe is not _UNSEEN:
            return self._follow(recipe, args)
        out = super()._cached_dispatch_impl(func, types, args, kwargs)
        # An operator that changes the metadata of its arguments is never answered from this cache.
        _recipes[key] = self._recipe(func, args, kwargs) if self._key(func, args, kwargs) == key else None
        return out

    def _key(self, func: Any, args: Any, kwargs: Any) -> Key | None:
        """Returns the facts in torch's ``_cache_key`` for static shapes; None if an argument is not ordinary."""
        facts = [func, torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()]
        placed = func in _PLACED or func._schema.is_mutable
        ordinary = self._is_quick and self._read(args, facts, placed)
        if kwargs and ordinary:
            facts += kwargs
            ordinary = self._read(kwargs.values(), facts, placed)
        return tuple(facts) if ordinary else None

    def _read(self, items: Iterable[Any], facts: list[Any], placed: bool) -> bool:
        """Adds the facts of some arguments, with offsets if ``placed``; returns whether all of them are ordinary."""
        for item in items:
            if (kind := type(item)) is FakeTensor:
                state = item.__dict__
                if state["constant"] is not None or state["fake_mode"] is not self or item.layout is not torch.strided:
                    return False
                facts += (
                    item.dtype,
                    item.shape,
                    item.stride(),
                    placed and item.storage_offset(),
                    item.untyped_storage().nbytes(),
                    state["_fake_device"],
                    item.requires_grad,
                    # These keys include conjugation, negation, quantization and inference mode.
                    torch._C._dispatch_keys(item).raw_repr(),
                )
            elif kind in _PLAIN:
                facts += (kind, item)  # 1, 1.0 and True are equal, but give results of different dtypes
            elif kind is list or kind is tuple:
                facts += (kind, len(item))
                if not self._read(item, facts, placed):
                    return False
            else:
                return False
        return True

    def _validate_cache_key(self, func: Any, args: Any, kwargs: Any) -> None:
        if func.namespace not in _PURE_NAMESPACES or func._schema.is_mutable:
            super()._validate_cache_key(func, args, kwargs)

    def _recipe(self, func: Any, args: Any, kwargs: Any) -> "_Recipe | None":
        """Makes a recipe from torch's cache entry for an operator that just ran; None if there is no ordinary entry."""
        try:
            key = self._cache_key(fake_tensor._CacheKeyState(self.shape_env), func, args, kwargs)
        except fake_tensor._BypassDispatchCache:
            return None
        if not isinstance(entry := FakeTensorMode.cache.get(key), fake_tensor._DispatchCacheValidEntry):
            return None
        parts = tuple(part for info in entry.output_infos if (part := _part(info, args)) is not None)
        if len(parts) < len(entry.output_infos):
            return None
        return (lambda mode, args: tuple([part(mode, args) for part in parts])) if entry.is_output_tuple else parts[0]

    def _follow(self, recipe: "_Recipe", args: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return recipe(self, args)

    def wrap(self, tensor: torch.Tensor, device: torch.device) -> FakeTensor:
        """Turns a meta tensor into a fake one on a device: ``FakeTensor.__new__`` without its checks."""
        if (state := self._states.get(device)) is None:
            state = self._states[device] = dict(FakeTensor(self, tensor, device).__dict__)
        fake = torch.Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        fake.__dict__.update(state)
        return fake


_Recipe = Callable[["QuickFakeMode", Any], Any]
"""Returns an operator's result for its arguments: ``recipe(mode, args)``. No dispatch mode is active in the call."""


def _UNSEEN(mode: QuickFakeMode, args: Any) -> Any:
    """Marks a missing recipe."""


_recipes: dict[Key | None, _Recipe | None] = {None: None}
"""Maps keys to recipes; None if an operator is never answered from this cache. Like torch's cache, it outlives the mode
and is shared by all modes."""


def _part(info: Any, args: Any) -> _Recipe | None:
    """Makes the recipe for one output: reads torch's info as ``_get_output_tensor_from_cache_entry`` does. A view keeps
    its distance from its argument's offset."""
    found, written, viewed = info.metadata, info.inplace_idx, info.view_idx
    if written is not None:
        return lambda mode, args: args[written]
    if found is None:  # a number, which follows from shapes alone
        constant = info.constant_value
        return lambda mode, args: constant
    if found.layout is not torch.strided or found.requires_grad or found.is_conj or found.is_neg:
        return None
    shape, stride, dtype, device = found.shape, found.stride, found.dtype, found.device
    distance = 0 if viewed is None else found.storage_offset - args[viewed].storage_offset()

    def make(mode: QuickFakeMode, args: Any) -> Any:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        if viewed is not None:
            base = args[viewed]
            tensor.set_(base.untyped_storage(), base.storage_offset() + distance, shape, stride)
        return mode.wrap(tensor, device)

    return make


@functools.cache
def _is_quick() -> bool:
    """Returns whether the installed torch has all private names used here, and this cache returns torch's results."""
    try:
        with QuickFakeMode(is_quick=True) as mode:
            matrix = torch.empty(2, 3)
            calls: tuple[tuple[Any, tuple[Any, ...]], ...] = (
                (torch.ops.aten.t.default, (matrix,)),
                (torch.ops.aten.exp.default, (matrix,)),
                (torch.ops.aten._foreach_zero_.default, ([matrix],)),
            )
            return hasattr(fake_tensor, "_BypassDispatchCache") and all(
                _alike(func(*args), mode.answer(func, args, {})) for func, args in calls
            )
    except Exception:  # a later torch without a private name may raise any exception
        return False


def _alike(fake: Any, other: Any) -> bool:
    """Returns whether two results are one object, or fake tensors with equal metadata; storages are not compared."""
    if not isinstance(fake, torch.Tensor):
        return fake is other
    facts = [
        (type(each), each.__dict__, each.dtype, each.shape, each.stride(), torch._C._dispatch_keys(each).raw_repr())
        for each in (fake, other)
    ]
    return facts[0] == facts[1]
