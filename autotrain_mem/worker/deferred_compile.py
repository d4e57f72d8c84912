"""Keeps imports from preparing torch.compile for functions that nobody calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def deferred_compile() -> Iterator[None]:
    """Functions that are decorated with ``torch.compile`` here are compiled when they are first called, if ever.

    bitsandbytes decorates its optimizers so as it is imported (``backends/default/ops.py: _try_torch_compile``), for
    which torch imports all of its inductor: a sixth of the import of TRL. No rehearsal calls them.
    """
    import torch

    compile_now = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if not callable(model) or isinstance(model, torch.nn.Module):
            return compile_now(model, **options)
        return _deferred(model, lambda: compile_now(model, **options))

    with mock.patch.object(torch, "compile", compile_later):
        yield


def _deferred(function: Callable[..., Any], compiled: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    once = functools.cache(compiled)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return once()(*arguments, **keywords)

    return call
