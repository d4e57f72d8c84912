"""A recorder for one process of several: it looks into shards, knows what lies on the host, and counts collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autotrain_mem.rehearsal.ranks.collectives import Collectives
from autotrain_mem.rehearsal.trace.operator_costs import Cost, host_step
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Owner

if TYPE_CHECKING:
    from autotrain_mem.rehearsal.ranks.zero_offload import HostTensors


class RankRecorder(Recorder):
    """Records the run of one process.

    An operator on DTensors comes back with the local tensors, which are what lies on the device. Collectives are
    counted for the step's time.
    """

    collectives: Collectives | None = None
    shards = False
    """Whether models to train lie on the host until they are cut into shards."""
    offloads = False
    """Whether shards stay there."""
    host: HostTensors | None = None
    """Knows what lies on the host, where DeepSpeed offloads."""
    is_on_host = False
    """Whether what is computed now is the host's."""
    _unseen = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stepped_on_host: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._unseen or self.is_on_host:
            return self._execute(func, args, kwargs or {})
        if self.host is not None and self.host.meets(args, kwargs or {}):
            return self.host.run(func, args, kwargs or {}, self._execute)
        if self.collectives is not None and func.namespace in Collectives.NAMESPACES:
            return self.collectives.run(self, func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator as any other."""
        return super().__torch_dispatch__(func, (), args, kwargs)

    def see_result(self, out: Any) -> None:
        """Look at what a collective made, if it made anything: functional ones make what they gather into."""
        if isinstance(out, torch.Tensor):
            self._see(out)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Leaves out what is made inside: it lies on the host, or nowhere; values are known as far as anywhere."""
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
            return
        if self.offloads and is_sharded(model):
            for parameter in model.parameters():
                self.disown(parameter)
            self._stepped_on_host += [each for each in model.parameters() if each.requires_grad]
        super().adopt_model(model)

    def mark(self, tensor: torch.Tensor, owner: Owner, name: str) -> None:
        """Say whose a tensor's storage is, unless it is the host's."""
        if not self.is_on_host:
            super().mark(tensor, owner, name)

    def count_step(self, costs: Iterable[Cost] = (), pinned: Iterable[int] = ()) -> None:
        """Count a step of an optimizer; what lies on the host is stepped there."""
        on_host = host_step(map(local, self._stepped_on_host), fused=True)[1:] if self.offloads else ()
        super().count_step((*costs, *on_host), pinned)

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor was seen to lie on the host."""
        block = self.block_of(tensor)
        return block is not None and self.ledger.is_disowned(block)

    def _see(self, tensor: torch.Tensor) -> int | None:
        return super()._see(local(tensor))

    def block_of(self, tensor: torch.Tensor) -> int | None:
        return super().block_of(local(tensor))


def local(tensor: Any) -> Any:
    """Return what of a tensor this process holds, also where nobody waited yet for what others send of it."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_sharded(model: torch.nn.Module) -> bool:
    """Tells whether a model's parameters are in shards."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())
