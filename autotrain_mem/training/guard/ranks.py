"""Lets each rank of DDP meet a full device by itself: gradients and metrics come together when all ranks are through.

What couples ranks inside a micro-step is the average of gradients and the collectives with which a trainer gathers
what it logs. Both are taken out of what may be repeated:

- Forward and backward run as under ``no_sync``. A rank that splits its micro-batch still has the gradient of the whole
  one at the end, so the others need not repeat theirs: they would only wait for it otherwise. All average once
  (:meth:`Ranks.micro_step`), by DDP's own reducer.
- Before each collective, and when the loss is made, all agree whether somebody was out of memory. Then each goes on
  alone, where gathering gives a rank's own values, and what they logged is merged (:meth:`Ranks.gather`).

An agreement is an ``all_reduce`` of one number by gloo: it waits for no kernel and takes no memory of a device. It is
given up after ``--ddp_timeout`` seconds, with an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

GATHERING = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")
"""Methods of ``accelerate.Accelerator`` that TRL's ``compute_loss`` calls (``trl/trainer/*_trainer.py``)."""

Value = TypeVar("Value")


class OtherRankFullError(torch.OutOfMemoryError):  # type: ignore[misc]  # torch is untyped to mypy here
    """Raised when another rank ran out of memory after some values of this micro-step were gathered: all of it is
    repeated."""


class Ranks:
    """Holds what one rank knows of the others. Without a group every method does nothing.

    Args:
        accelerator: Of the trainer: its collectives are stood in for while a micro-step runs.
        group: Of all ranks, on the CPU; None in a run of one process, and where nothing may be repeated.
    """

    def __init__(self, accelerator: Any, group: Any = None) -> None:
        self._accelerator = accelerator
        self._group = group
        self.count, self.number = int(accelerator.num_processes), int(accelerator.process_index)
        self._is_open = False
        """Whether the others wait for a word of this rank before they gather or go on."""
        self._is_alone = False
        self._has_gathered = False
        self.is_apart = False
        """Whether all know that this micro-step is done by each rank alone."""

    def greatest(self, *numbers: int) -> list[int]:
        """Agree on the greatest of each number; all ranks must call it."""
        if self._group is None:
            return list(numbers)
        tensor = torch.tensor(numbers)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        agreed: list[int] = tensor.tolist()
        return agreed

    def gather(self, value: Value) -> list[Value]:
        """Returns the values of all ranks, in their order; all must call it."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    # -- a micro-step ------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_step(self, model: Any = None) -> Iterator[None]:
        """Within the block, a rank can do its part of a step as often as it needs; gradients are averaged at the end.

        Args:
            model: What is trained, as accelerate wrapped it; None where nothing is.
        """
        if self._group is None:
            yield
            return
        ddp = ddp_of(model)
        with self._collectives_stood_in_for(), nullcontext() if ddp is None else averaged_once(self, ddp):
            self._is_open, self._is_alone, self._has_gathered, self.is_apart = True, False, False, False
            try:
                yield
                self.loss_is_made()
            finally:
                self._is_open = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block, gathering returns this rank's own values without communication."""
        with patch.multiple(self, _is_alone=True, _is_open=False), self._collectives_stood_in_for():
            yield

    def leave(self) -> None:
        """Continues alone, since this rank is out of memory or splits from the start; tells the ranks that wait."""
        if self._is_open:
            self._agree(leaves=True)
        self._is_alone = True

    def loss_is_made(self) -> None:
        """Marks the end of gathering: no rank waits for one that fails from here on.

        Raises:
            OtherRankFullError: see there.
        """
        if self._is_open:
            self._agree(leaves=False)
            self._is_open = False

    @property
    def has_logged_for_all(self) -> bool:
        """Returns whether all that the trainer logs of a micro-step was gathered, before this rank had to repeat it."""
        return self._group is not None and not self._is_open and not self._is_alone

    def _agree(self, *, leaves: bool) -> None:
        (self.is_apart,) = map(bool, self.greatest(leaves))
        if not self.is_apart:
            return
        self._is_open, self._is_alone = False, True
        if self._has_gathered and not leaves:
            raise OtherRankFullError("CUDA out of memory on another rank, which repeats its part of this micro-step.")

    def _collectives_stood_in_for(self) -> AbstractContextManager[Any]:
        if self._group is None:
            return nullcontext()
        guarded = {name: self._guarded(getattr(self._accelerator, name)) for name in GATHERING}
        return patch.multiple(self._accelerator, **guarded)  # type: ignore[no-any-return,call-overload]

    def _guarded(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def guarded(tensors: Any, *args: Any, **options: Any) -> Any:
            if self._is_open and not self._is_alone:
                self._agree(leaves=False)
            if self._is_alone:
                return own_values(tensors) if "gather" in collective.__name__ else tensors
            self._has_gathered = True
            with patch.object(self, "_is_open", False):  # gather_for_metrics calls gather
                return collective(tensors, *args, **options)

        return guarded


def own_values(tensors: Any) -> Any:
    """Returns what one process gathers: the same, but a number becomes a list of one (``accelerate/utils/operations.py:
    _gpu_gather``)."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor[None] if tensor.ndim == 0 else tensor, tensors)


# -- the average of gradients ------------------------------------------------------------------------------------------


def ddp_of(model: Any) -> DistributedDataParallel | None:
    """Finds the DDP in what accelerate made of a model, which may be compiled around it."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, DistributedDataParallel) else None


@contextmanager
def averaged_once(ranks: Ranks, ddp: DistributedDataParallel) -> Iterator[None]:
    """Within the block, no forward and no backward talks to another rank; at the end gradients are averaged, where DDP
    would.

    What DDP does with others before a forward is done while nothing is tried yet: it broadcasts buffers, and once it
    makes its buckets anew (``torch/nn/parallel/distributed.py: _pre_forward``).
    """
    ddp.reducer._rebuild_buckets()
    if ddp._check_sync_bufs_pre_fwd():
        ddp._sync_buffers()
        ddp.require_forward_param_sync = False
    with ddp.no_sync():
        yield
    if ddp.require_backward_grad_sync:
        average(ranks, ddp)


def average(ranks: Ranks, ddp: DistributedDataParallel) -> None:
    """Average the gradients that are there over all ranks, as the backward of a DDP forward does.

    That forward has no model in it, and its backward adds nothing to any gradient: DDP's hooks then put the gradients
    into its buckets. Buckets, their dtype and a communication hook are DDP's own, and so is what it does with
    parameters that no rank used: their gradient stays None.
    """
    # As ``distributed.py: _build_params_for_reducer`` chooses them.
    named = ddp.module.named_parameters()
    trained = [each for name, each in named if each.requires_grad and name not in ddp.parameters_to_ignore]
    used = [parameter.grad is not None for parameter in trained]
    if ddp.find_unused_parameters:  # then DDP finds out which are used elsewhere
        touched = [each for each, is_used in zip(trained, used, strict=True) if is_used] or trained[:1]
    else:
        touched = trained
        used = list(map(bool, ranks.greatest(*used)))
    ddp._pre_forward(0)  # of an input: with none it finds no device to move it to
    ddp._post_forward(_Nothing.apply(*touched)).backward()
    if not ddp.find_unused_parameters:
        for parameter, is_used in zip(trained, used, strict=True):
            if not is_used:
                parameter.grad = None


class _Nothing(torch.autograd.Function):  # type: ignore[misc]
    """A loss of zero that depends on parameters: its gradients are zeros that take no memory."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        zeros = {each.dtype: each.new_zeros(()) for each in ctx.parameters}
        return tuple(zeros[each.dtype].expand(each.shape) for each in ctx.parameters)


# -- the group ---------------------------------------------------------------------------------------------------------


def shares_by_ddp(accelerator: Any) -> bool:
    """Returns whether several processes hold the whole model each (``accelerate/utils/dataclasses.py:
    DistributedType``)."""
    is_plain = getattr(accelerator, "parallelism_config", None) is None
    return is_plain and str(accelerator.distributed_type.value).startswith("MULTI_")


def ranks_of(trainer: Any) -> Ranks:
    """Finds the ranks that a trainer trains with; all of them must call it.

    Raises:
        RuntimeError: they cannot reach each other by gloo.
    """
    if trainer.accelerator.num_processes < 2 or not shares_by_ddp(trainer.accelerator):
        return Ranks(trainer.accelerator)
    return Ranks(trainer.accelerator, _cpu_group(dist.group.WORLD, trainer.args.ddp_timeout))


@functools.lru_cache(maxsize=1)  # a trainer may be guarded, and left, many times
def _cpu_group(world: Any, timeout_seconds: int) -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
