"""Handles out-of-memory errors on each DDP rank separately, then combines the gradients and metrics of all ranks."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
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
    """Raised when another rank ran out of memory after this micro-step gathered values, so this rank repeats it."""


class Ranks:
    """Connects one rank with the others. Without a group, no method communicates.

    While no rank is out of memory, DDP averages gradients during the backward pass. Before each collective of the
    trainer, and after the loss, the ranks agree on whether one ran out of memory. If so, each continues separately, as
    under ``no_sync``: gathering returns its own values, all average once at the end, and their logs are merged. A rank
    whose backward pass fails contributes zeros to what DDP still has to average, so that no other rank waits for it. An
    agreement is an ``all_reduce`` of one number over gloo, which takes no device memory. ``accelerator``: the
    trainer's; its collectives are replaced while a micro-step runs. ``group``: A gloo group of all ranks; None for one
    process, or if nothing can be repeated."""

    def __init__(self, accelerator: Any, group: Any = None) -> None:
        self._accelerator = accelerator
        self._group = group
        self.count, self.number = int(accelerator.num_processes), int(accelerator.process_index)
        self._is_open = False
        """True while the other ranks wait for an agreement before they gather or continue."""
        self._is_alone = False
        self._has_gathered = False
        self._overlapping: DistributedDataParallel | None = None
        """The DDP module if it averages during this micro-step's backward pass, else None."""
        self._uses_all = False
        """True once a step gave every trained parameter a gradient on this rank."""
        self.is_apart = False
        """True once all ranks have agreed that each does this micro-step separately."""

    def greatest(self, *numbers: int) -> list[int]:
        """Returns the maximum of each number over all ranks. All ranks must call it."""
        if self._group is None:
            return list(numbers)
        tensor = torch.tensor(numbers)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        agreed: list[int] = tensor.tolist()
        return agreed

    def gather(self, value: Value) -> list[Value]:
        """Returns the values of all ranks in rank order. All ranks must call it."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def micro_step(self, model: Any = None, *, has_room: bool = False) -> Iterator[None]:
        """Within the block, a rank can repeat its part of a step; gradients of ``model``, if any, are averaged.
        ``has_room``: whether this rank expects to fit its part at once."""
        if self._group is None:
            yield
            return
        ddp = ddp_of(model)
        with self._collectives_stood_in_for(), nullcontext() if ddp is None else self._averaged(ddp, has_room):
            self._is_open, self._is_alone, self._has_gathered, self.is_apart = True, False, False, False
            try:
                yield
                self.loss_is_made()
            finally:
                self._is_open = False

    @contextmanager
    def _averaged(self, ddp: DistributedDataParallel, has_room: bool) -> Iterator[None]:
        """Within the block, a repeated forward repeats no collective. A step's last micro-step averages gradients: in
        the backward pass if all ranks have room and use all parameters, else at the end of the block."""
        ddp.reducer._rebuild_buckets()  # as DDP does before a forward (``distributed.py: _pre_forward``)
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_buffers()
            ddp.require_forward_param_sync = False
        syncs = ddp.require_backward_grad_sync
        overlaps = syncs and not any(self.greatest(not (has_room and self._uses_all)))
        self._overlapping = ddp if overlaps else None
        try:
            with nullcontext() if overlaps else ddp.no_sync():
                yield
        finally:
            ddp.require_backward_grad_sync, self._overlapping = syncs, None
        if syncs and (not overlaps or any(self.greatest(self._is_alone))):
            self._uses_all = all(each.grad is not None for each in trained_by(ddp))
            average(self, ddp)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block, gathering returns this rank's own values without communication."""
        with patch.multiple(self, _is_alone=True, _is_open=False), self._collectives_stood_in_for():
            yield

    def leave(self, done: Collection[int] = ()) -> None:
        """Continues separately, since a rank ran out of memory or splits its batch; notifies the waiting ranks.
        ``done``: the ids of the parameters whose gradient is complete."""
        if self._is_open:
            self._agree(leaves=True)
        self._is_alone = True
        if (ddp := self._overlapping) is not None:
            self._overlapping = None
            failed = [each for each in trained_by(ddp) if id(each) not in done]
            if self.is_apart:
                average(self, ddp)
            elif failed:  # the other ranks are in their backward passes, and wait for these
                _nothing(failed).backward()
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False

    def loss_is_made(self) -> None:
        """Ends gathering, once all ranks have a loss. Raises OtherRankFullError if another rank ran out of memory and
        this one must repeat its forward pass."""
        if self._is_open:
            self._agree(leaves=False)
            self._is_open = False

    @property
    def has_logged_for_all(self) -> bool:
        """Returns whether the micro-step's logs were gathered from all ranks before this rank failed."""
        return self._group is not None and not self._is_open and not self._is_alone

    def _agree(self, *, leaves: bool) -> None:
        (self.is_apart,) = map(bool, self.greatest(leaves))
        if not self.is_apart:
            return
        self._is_open, self._is_alone = False, True
        if (self._has_gathered or self._overlapping is not None) and not leaves:
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
            if self._is_alone and "gather" in collective.__name__:
                # From one process, a scalar is gathered as a list (``accelerate/utils/operations.py: _gpu_gather``).
                return tree_map_only(torch.Tensor, lambda tensor: tensor[None] if tensor.ndim == 0 else tensor, tensors)
            if self._is_alone:
                return tensors
            self._has_gathered = True
            with patch.object(self, "_is_open", False):  # gather_for_metrics calls gather
                return collective(tensors, *args, **options)

        return guarded


def ddp_of(model: Any) -> DistributedDataParallel | None:
    """Returns the DDP module of a model that accelerate prepared and may have compiled; None if there is none."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, DistributedDataParallel) else None


def trained_by(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Returns the parameters that DDP averages, as in ``distributed.py: _build_params_for_reducer``."""
    named = ddp.module.named_parameters()
    return [each for name, each in named if each.requires_grad and name not in ddp.parameters_to_ignore]


def average(ranks: Ranks, ddp: DistributedDataParallel) -> None:
    """Averages the gradients over all ranks, with a DDP forward and backward pass that runs no model: the backward adds
    zero to each gradient, and DDP's hooks put the gradients into its buckets. The gradient of a parameter that no rank
    used stays None."""
    trained = trained_by(ddp)
    used = [parameter.grad is not None for parameter in trained]
    if ddp.find_unused_parameters:  # then DDP finds out which are used on other ranks
        touched = [each for each, is_used in zip(trained, used, strict=True) if is_used] or trained[:1]
    else:
        touched = trained
        used = list(map(bool, ranks.greatest(*used)))
    ddp.require_forward_param_sync = False  # on every rank: buffers are not broadcast again
    ddp._pre_forward(0)  # a placeholder: DDP fails if it has no input to move to its device
    ddp._post_forward(_nothing(touched)).backward()
    if not ddp.find_unused_parameters:
        for parameter, is_used in zip(trained, used, strict=True):
            if not is_used:
                parameter.grad = None


def _nothing(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Returns a loss of zero whose backward pass reaches the parameters from the last to the first, as a model's does:
    DDP makes its buckets in the order of the first backward pass (``reducer.cpp: rebuild_buckets``)."""
    return functools.reduce(_Nothing.apply, parameters, parameters[0].new_zeros(()))


class _Nothing(torch.autograd.Function):  # type: ignore[misc]
    """Makes a loss depend on one parameter more, whose gradient is zeros that take no memory."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        ctx.parameter = parameter
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, ctx.parameter.new_zeros(()).expand(ctx.parameter.shape)


def shares_by_ddp(accelerator: Any) -> bool:
    """Returns whether each process holds the whole model (``accelerate/utils/dataclasses.py: DistributedType``)."""
    is_plain = getattr(accelerator, "parallelism_config", None) is None
    return is_plain and str(accelerator.distributed_type.value).startswith("MULTI_")


def ranks_of(trainer: Any) -> Ranks:
    """Connects the ranks of a trainer that can be guarded. All must call it. Raises RuntimeError if gloo cannot."""
    several = trainer.accelerator.num_processes > 1
    group = _cpu_group(dist.group.WORLD, trainer.args.ddp_timeout) if several else None
    return Ranks(trainer.accelerator, group)


@functools.lru_cache(maxsize=1)  # a trainer may be guarded many times
def _cpu_group(world: Any, timeout_seconds: int) -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
