"""A recorder for one process of several: it looks into shards, knows what lies on the host, and counts collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autotrain_mem.rehearsal.ranks.collectives import Collectives
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.spec import Owner


class RankRecorder(Recorder):
    """Records the run of one process.

    An operator on DTensors comes back with the local tensors, which are what lies on the device. Collectives are
    counted for the step's time.
    """

    collectives: Collectives | None = None
    shards = False
    """Whether models to train lie on the host until they are cut into shards."""
    _unseen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._unseen:
            return self._execute(func, args, kwargs or {})
        if self.collectives is not None and func.namespace in Collectives.NAMESPACES:
            return self.collectives.run(self, func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator as any other."""
        return super().__torch_dispatch__(func, (), args, kwargs)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is made inside lies on the host, or nowhere; values are known as far as anywhere."""
        before, self._unseen = self._unseen, True
        is_recording = self in _get_current_dispatch_mode_stack()
        try:
            with nullcontext() if is_recording else self:
                yield
        finally:
            self._unseen = before

    @contextmanager
    def owned(self, owner: Owner, name: str) -> Iterator[None]:
        """Blocks that are born inside, and are nobody's, are this owner's."""
        first = len(self.ledger.sizes)
        yield
        self.ledger.describe_unowned(first, owner, name)

    def hides(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that nothing that it makes is seen."""

        def hidden(*args: Any, **kwargs: Any) -> Any:
            with self.unseen():
                return function(*args, **kwargs)

        return hidden

    def adopt_model(self, model: torch.nn.Module) -> None:
        """Count a model's parameters and buffers as weights, unless it waits on the host to be sharded."""
        if self.shards and not is_sharded(model) and any(each.requires_grad for each in model.parameters()):
            self.name_modules(model)
        else:
            super().adopt_model(model)

    def _see(self, tensor: torch.Tensor) -> int | None:
        return super()._see(local(tensor))

    def block_of(self, tensor: torch.Tensor) -> int | None:
        return super().block_of(local(tensor))


def local(tensor: Any) -> Any:
    """Return what of a tensor this process holds."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_sharded(model: torch.nn.Module) -> bool:
    """Tells whether a model's parameters are in shards."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())
