"""Lists every difference of CUDA from the CPU, one rule each with its source.

The rehearsal runs on CPU tensors so that its result is the same everywhere; the rules correct the differences that this
causes. Short rules are here, longer ones in modules of their own. The recorder gets the memory that kernels allocate
within one operator from ``workspaces``, and autograd's in-place operations from ``inplace_accumulation``.

To add a rule, write a module in this folder with a context manager whose docstring names its source, and a constant
``RULES`` that holds a :class:`CudaRule` of it: :func:`every_rule` finds it there.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.utils import memory
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils as foreach_module
from transformers.integrations import moe

from autotrain_mem.rehearsal import cuda
from autotrain_mem.rehearsal.cuda import workspaces
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types.hardware import Capability

Tensors = Literal["fake cpu", "real cpu", "fake cuda"]
"""The tensors that a trainer runs on: a rehearsal's, a simulated card's, or those of a rehearsal on a machine with a
GPU, where torch itself takes CUDA's paths (``scripts/gpu_records/native.py``)."""

ON_CPU: tuple[Tensors, ...] = ("fake cpu", "real cpu")


@dataclass(frozen=True, slots=True)
class CudaRule:
    """Describes one difference of CUDA from the CPU."""

    imitate: Callable[[Recorder, Capability], AbstractContextManager[None]]
    """A context in which tensors behave as on a card of this compute capability; it restores everything on exit."""
    tensors: tuple[Tensors, ...] = ON_CPU
    """The tensors that need the rule."""
    not_counted: Callable[[Capability], tuple[str, ...]] = lambda card: ()
    """What the rule leaves out on such a card, each with its bound."""


def foreach_on_cpu() -> AbstractContextManager[None]:
    """Optimizers and gradient clipping work on lists of tensors at once, and hold temporaries for all of them together.

    Source: ``torch/optim/optimizer.py: _default_to_fused_or_foreach``, which calls ``torch/utils/_foreach_utils.py:
    _get_foreach_kernels_supported_devices``. On the CPU they process one tensor at a time.
    """
    devices = [*foreach_module._get_foreach_kernels_supported_devices(), "cpu"]
    return _patched(
        (foreach_module, "_get_foreach_kernels_supported_devices", lambda: devices),
        (optimizer_module, "_get_foreach_kernels_supported_devices", lambda: devices),
        (optimizer_module, "_foreach_supported_types", [*optimizer_module._foreach_supported_types, FakeTensor]),
        (foreach_module, "_foreach_supported_types", [*foreach_module._foreach_supported_types, FakeTensor]),
    )


def fused_dropout() -> AbstractContextManager[None]:
    """Dropout is one fused kernel that saves a mask of one byte per element.

    Source: ``aten/src/ATen/native/Dropout.cpp: is_fused_kernel_acceptable`` and ``native_dropout``. The CPU saves the
    scaled noise in the input's dtype.
    """
    plain = torch.nn.functional.dropout

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if inplace or not training or p in (0.0, 1.0) or input.numel() == 0:
            return plain(input, p, training, inplace)
        return torch.native_dropout(input, p, training)[0]

    return _patched((torch.nn.functional, "dropout", dropout))


def grouped_experts_of_bfloat16() -> AbstractContextManager[None]:
    """A mixture's grouped product has a fake kernel for bfloat16 only.

    In other dtypes it is replaced by transformers' own loop over the experts (``transformers/integrations/moe.py:
    _grouped_mm_fallback``), whose results have the same sizes.
    """
    return _patched((moe, "_can_use_grouped_mm", lambda input, weight, offs: weight.dtype is torch.bfloat16))


def one_hot_by_scattering() -> AbstractContextManager[None]:
    """CUDA scatters classes into zeros; the CPU first finds their minimum and maximum, and fake tensors compare.

    Source: ``aten/src/ATen/native/Onehot.cpp: one_hot``.
    """
    plain = torch.nn.functional.one_hot

    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if num_classes == -1 or tensor.numel() == 0:
            return plain(tensor, num_classes)
        zeros = tensor.new_zeros((*tensor.shape, num_classes))
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    return _patched((torch.nn.functional, "one_hot", one_hot))


def rows_of_svd() -> AbstractContextManager[None]:
    """cuSOLVER stores ``Vh`` row by row, so its first rows are a view of it, which PEFT's PSOFT keeps.

    Source: ``torch/_meta_registrations.py: _linalg_svd_meta``. LAPACK stores columns, so there the rows are copied.
    """
    plain = torch.linalg.svd

    def svd(matrix: torch.Tensor, full_matrices: bool = True, **options: Any) -> Any:
        u, s, vh = plain(matrix, full_matrices, **options)
        return torch.return_types.linalg_svd((u, s, vh.contiguous()))

    return _patched((torch.linalg, "svd", svd))


def fp16_on_cpu() -> AbstractContextManager[None]:
    """An accelerator made for fp16 keeps its autocast to float16, and its loss scaler, on the CPU too.

    On a CPU accelerate accepts ``mixed_precision="fp16"`` and drops it silently (``accelerate/accelerator.py:
    Accelerator.__init__``, which requires a device other than ``cpu``). Here it is kept, so that attention uses the
    kernels that the card picks for float16, and weights and layers in float16 meet activations in float16: rehearsed as
    bfloat16 they would be cast at every product. Under a fake mode the scaler is disabled: whether gradients are finite
    is a value, and its own tensors are a few scalars.
    """
    build = Accelerator.__init__

    def init(accelerator: Accelerator, *args: Any, **kwargs: Any) -> None:
        build(accelerator, *args, **kwargs)
        if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", enabled=detect_fake_mode() is None)

    return _patched((Accelerator, "__init__", init))


def recorded_empty_cache(recorder: Recorder) -> AbstractContextManager[None]:
    """Records each call that would empty a CUDA device's cache, though there is no device here.

    On a machine with CUDA every such call reaches ``torch.cuda.empty_cache``. Without it some do not. TRL (PPO's loop:
    ``trl/experimental/utils.py: empty_cache``) and transformers' evaluation call it directly;
    ``torch_empty_cache_steps`` and ``Accelerator.free_memory`` go through ``accelerate/utils/memory.py:
    clear_device_cache``, which detects the hardware and does nothing without an accelerator. With an Apple or Intel GPU
    both call its ``empty_cache``.

    Not imitated: transformers' memory metrics (``skip_memory_metrics=False``), which empty the cache between stages
    only if ``torch.cuda.is_available()``.
    """
    return _patched(
        (torch.cuda, "empty_cache", recorder.empty_cache),
        (torch.mps, "empty_cache", recorder.empty_cache),
        (torch.xpu, "empty_cache", recorder.empty_cache),
        (memory, "is_cuda_available", lambda: True),
    )


@contextmanager
def _patched(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in attributes:
            stack.enter_context(patch.object(owner, name, value))
        yield


RULES = (
    CudaRule(lambda recorder, card: foreach_on_cpu()),
    CudaRule(lambda recorder, card: fused_dropout()),
    CudaRule(lambda recorder, card: grouped_experts_of_bfloat16()),
    CudaRule(lambda recorder, card: one_hot_by_scattering()),
    CudaRule(lambda recorder, card: rows_of_svd()),
    CudaRule(lambda recorder, card: fp16_on_cpu()),
    CudaRule(lambda recorder, card: recorded_empty_cache(recorder), (*ON_CPU, "fake cuda")),
)


@functools.cache
def every_rule() -> tuple[CudaRule, ...]:
    """Lists the rules of all modules in this folder, by the modules' names."""
    modules = [importlib.import_module(f"{cuda.__name__}.{each.name}") for each in pkgutil.iter_modules(cuda.__path__)]
    return tuple(rule for module in modules for rule in getattr(module, "RULES", ()))


@contextmanager
def cuda_semantics(recorder: Recorder, compute_capability: Capability, tensors: Tensors = "fake cpu") -> Iterator[None]:
    """Applies every rule that these tensors need, while a trainer is built and while it trains. Restores everything on
    exit."""
    with ExitStack() as stack:
        for rule in every_rule():
            if tensors in rule.tensors:
                stack.enter_context(rule.imitate(recorder, compute_capability))
        yield


def not_imitated(compute_capability: Capability) -> tuple[str, ...]:
    """Lists what a rehearsal for such a card leaves out under any settings."""
    left_out = [each for rule in reversed(every_rule()) for each in rule.not_counted(compute_capability)]
    return (*workspaces.NOT_COUNTED, *left_out)
