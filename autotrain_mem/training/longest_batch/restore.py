"""Puts back what a training step changed of a trainer, and lets a first step meet the memory that later ones hold."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW
from torch.utils._python_dispatch import _disable_current_modes

from autotrain_mem.training.guard.context import keep_rng_state

_KEPT_BY_VALUE = ("_metrics", "_stored_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "_textual_logs")
"""Attributes that a step adds to in place (``trl/trainer/grpo_trainer.py: __init__``; all of TRL's trainers have
``_metrics``): the step gets copies."""

_PLAIN = (bool, int, float, str, type(None), list, tuple, dict, set, deque, torch.Tensor)
"""Kinds of values that a step may leave in a trainer under a name: counters, buffers of completions, running entropies.
Everything else, such as a method that somebody replaced, was put there for good."""

SMALLEST_8BIT_ELEMENTS = 4096
"""bitsandbytes keeps the state of smaller parameters in 32 bits (``bitsandbytes/optim/optimizer.py: Optimizer2State``,
``min_8bit_size``)."""

Undo = Callable[[], None]
OnError = Callable[[BaseException], None]
"""Is shown an error before what stood in for later steps is gone, so that it can be told who held what."""


@contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Put everything back afterwards: gradients, random states, counters and metrics, buffers of all models.

    Weights and the state of the optimizer are the caller's affair: it must not step. What a step may touch was read off
    ``transformers/trainer.py: training_step``, TRL 1.12 and 1.16 (``training_step``, ``_prepare_inputs``,
    ``compute_loss`` of SFT, Reward, DPO, GRPO, RLOO) and ``accelerate/accelerator.py: backward``. Copies of buffers lie
    in host memory. Only this trainer's models are looked at. What DDP counts of its forwards all ranks count alike.
    """
    shared = trainer.accelerator.gradient_state._shared_state
    modules = list({id(module): module for model in models_of(trainer) for module in model.modules()}.values())
    counting = [trainer, trainer.state, *(each for each in modules if not isinstance(each, DistributedDataParallel))]
    if trainer.accelerator.scaler is not None:
        counting.append(trainer.accelerator.scaler)
    undo: list[Undo] = [
        keep_rng_state(),
        functools.partial(shared.update, dict(shared)),
        *map(_attributes, counting),
        *(_buffers(module) for module in modules if module._buffers),
        _gradients(modules),
        *(functools.partial(_drop_whole_gradients, module) for module in modules if isinstance(module, FSDPModule)),
    ]
    try:
        yield
    finally:
        for back in undo:
            back()


def models_of(trainer: Any) -> list[torch.nn.Module]:
    """List all of a trainer's models, each once: the trained one as it is wrapped, references, judges, values."""
    names = ("model_wrapped", "model", "ref_model", "reward_model", "value_model", "teacher_model")
    candidates = [getattr(trainer, name, None) for name in names]
    candidates += getattr(trainer, "reward_funcs", None) or ()
    unique = {id(model): model for model in candidates if isinstance(model, torch.nn.Module)}
    return list(unique.values())


def _attributes(kept: Any) -> Undo:
    """Restore what names stand for in an object, and the contents of those that a step adds to: a trainer's counters, a
    model's switches, the longest row that a rotary embedding has met."""
    held = vars(kept)
    before = dict(held)
    held.update({name: copy.deepcopy(held[name]) for name in _KEPT_BY_VALUE if name in held})

    def back() -> None:
        for name in [name for name in held if name not in before and isinstance(held[name], _PLAIN)]:
            del held[name]
        for name, value in before.items():
            if held.get(name) is not value and isinstance(value, _PLAIN) and isinstance(held.get(name), _PLAIN):
                held[name] = value

    return back


def _buffers(module: torch.nn.Module) -> Undo:
    """Restore buffers, replaced or written in place: statistics of a batch norm, a rotary embedding that grows."""
    before = dict(module._buffers)
    with torch.no_grad(), _disable_current_modes():  # a simulated card keeps no account of the host
        copies = {name: buffer.detach().to("cpu", copy=True) for name, buffer in before.items() if buffer is not None}

    def back() -> None:
        module._buffers.clear()
        module._buffers.update(before)
        with torch.no_grad(), _disable_current_modes():
            for name, value in copies.items():
                before[name].copy_(value)

    return back


def _gradients(modules: Sequence[torch.nn.Module]) -> Undo:
    parameters = {id(parameter): parameter for module in modules for parameter in module._parameters.values()}
    before = [(parameter, parameter.grad) for parameter in parameters.values() if parameter is not None]
    for parameter, _ in before:
        parameter.grad = None

    def back() -> None:
        for parameter, gradient in before:
            parameter.grad = gradient

    return back


def keeps_whole_gradients(model: torch.nn.Module) -> bool:
    """Whether FSDP2 reduces no gradient in this micro-step, and keeps all of them whole until the step's last one."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return not all(group.reduce_grads for each in modules for group in each._get_fsdp_state()._fsdp_param_groups)


def _drop_whole_gradients(module: FSDPModule) -> None:
    """Drop the gradients that FSDP2 has not yet reduced to its shards, since the step's last micro-batch is to come
    (``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: post_backward``)."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


# -- the memory of later steps -----------------------------------------------------------------------------------------


@contextmanager
def with_memory_of_later_steps(trainer: Any, on_error: OnError | None = None) -> Iterator[None]:
    """Inside, optimizer state, and gradients of a micro-step before, are there where there will be some.

    A first step has less beside it than the steps after it. They are as large as the real ones will be, tensor by
    tensor, so that these find blocks that fit them. Whole gradients that FSDP2 keeps only a micro-step before makes.
    """
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    stand_ins: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    try:
        for parameter, dtype in _kept_by_adam(optimizer):
            moments = {name: torch.empty_like(parameter, dtype=dtype) for name in ("first", "second")}
            stand_ins[parameter] = optimizer.state[parameter] = moments
        if trainer.args.gradient_accumulation_steps > 1 and not keeps_whole_gradients(trainer.model):
            for parameter in trainer.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        yield
    except BaseException as error:
        if on_error is not None:
            on_error(error)
        raise
    finally:
        for parameter in stand_ins:
            del optimizer.state[parameter]
        stand_ins.clear()
        for parameter in trainer.model.parameters():
            parameter.grad = None


def _kept_by_adam(optimizer: Any) -> list[tuple[torch.Tensor, torch.dtype]]:
    """Parameters of which an optimizer will keep two moments on the device, and in which dtype.

    Adam is known as torch and bitsandbytes have it; of other optimizers nothing is, and nothing stands in.
    """
    if optimizer is None or optimizer.state or getattr(optimizer, "is_paged", False):
        return []
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    if type(optimizer) in (AdamW, Adam):
        return [(each, each.dtype) for each in trained]
    if type(optimizer).__module__ not in ("bitsandbytes.optim.adam", "bitsandbytes.optim.adamw"):
        return []
    few_bits = torch.uint8 if optimizer.args.optim_bits == 8 else torch.float32
    return [(each, few_bits if each.numel() >= SMALLEST_8BIT_ELEMENTS else torch.float32) for each in trained]
