"""Makes CPU tensors behave like CUDA's: each rule imitates one difference, and its docstring names the source.

Short rules are here, longer ones in modules of their own. To add a rule, write a module in this folder with a context
manager and a constant ``RULES`` that lists its :class:`CudaRule`.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
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


@dataclass(frozen=True, slots=True)
class CudaRule:
    """Describes one difference between CUDA and the CPU."""

    imitate: Callable[[Recorder, Capability], AbstractContextManager[None]]
    """Returns a context in which tensors behave as on a card of this compute capability."""
    fakes_only: bool = False
    """Whether only fake tensors need the rule, and not those of a run on a simulated card."""
    not_counted: Callable[[Capability], tuple[str, ...]] = lambda card: ()
    """Lists the memory that the rule leaves out at a compute capability, each with its bound."""


def foreach_on_cpu() -> AbstractContextManager[None]:
    """On CUDA, optimizers and gradient clipping process all tensors at once, with temporaries for all of them; on the
    CPU, one tensor at a time. Source: ``torch/optim/optimizer.py: _default_to_fused_or_foreach``."""
    devices = [*foreach_module._get_foreach_kernels_supported_devices(), "cpu"]
    return _patched(
        (foreach_module, "_get_foreach_kernels_supported_devices", lambda: devices),
        (optimizer_module, "_get_foreach_kernels_supported_devices", lambda: devices),
        (optimizer_module, "_foreach_supported_types", [*optimizer_module._foreach_supported_types, FakeTensor]),
        (foreach_module, "_foreach_supported_types", [*foreach_module._foreach_supported_types, FakeTensor]),
    )


def fused_dropout() -> AbstractContextManager[None]:
    """On CUDA, dropout is one fused kernel that saves a mask of one byte per element; on the CPU, it saves noise in the
    input's dtype. Source: ``aten/src/ATen/native/Dropout.cpp: is_fused_kernel_acceptable``."""
    plain = torch.nn.functional.dropout

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if inplace or not training or p in (0.0, 1.0) or input.numel() == 0:
            return plain(input, p, training, inplace)
        return torch.native_dropout(input, p, training)[0]

    return _patched((torch.nn.functional, "dropout", dropout))


def grouped_experts_of_bfloat16() -> AbstractContextManager[None]:
    """In dtypes other than bfloat16, a mixture's grouped product becomes a loop over the experts, since its fake kernel
    rejects them; results have the same sizes (``transformers/integrations/moe.py: _grouped_mm_fallback``)."""
    return _patched((moe, "_can_use_grouped_mm", lambda input, weight, offs: weight.dtype is torch.bfloat16))


def one_hot_by_scattering() -> AbstractContextManager[None]:
    """On CUDA, ``one_hot`` scatters classes into zeros; on the CPU it also checks their range. Source:
    ``aten/src/ATen/native/Onehot.cpp: one_hot``."""
    plain = torch.nn.functional.one_hot

    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if num_classes == -1 or tensor.numel() == 0:
            return plain(tensor, num_classes)
        zeros = tensor.new_zeros((*tensor.shape, num_classes))
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    return _patched((torch.nn.functional, "one_hot", one_hot))


def rows_of_svd() -> AbstractContextManager[None]:
    """On CUDA, ``svd`` returns ``Vh`` stored by rows (cuSOLVER), so that PEFT's PSOFT keeps a view of its first rows;
    on the CPU it is stored by columns (LAPACK). Source: ``torch/_meta_registrations.py: _linalg_svd_meta``."""
    plain = torch.linalg.svd

    def svd(matrix: torch.Tensor, full_matrices: bool = True, **options: Any) -> Any:
        u, s, vh = plain(matrix, full_matrices, **options)
        return torch.return_types.linalg_svd((u, s, vh.contiguous()))

    return _patched((torch.linalg, "svd", svd))


def fp16_on_cpu() -> AbstractContextManager[None]:
    """On CUDA, an fp16 accelerator autocasts to float16 and scales the loss.

    On a CPU accelerate silently ignores ``mixed_precision="fp16"`` (``accelerate/accelerator.py:
    Accelerator.__init__``). On fake tensors the scaler, of a few scalars, is disabled, since it depends on values.
    """
    build = Accelerator.__init__

    def init(accelerator: Accelerator, *args: Any, **kwargs: Any) -> None:
        build(accelerator, *args, **kwargs)
        if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", enabled=detect_fake_mode() is None)

    return _patched((Accelerator, "__init__", init))


def recorded_empty_cache(recorder: Recorder) -> AbstractContextManager[None]:
    """Calls that empty the cache of a CUDA device are recorded, although there is no device.

    TRL (``trl/experimental/utils.py: empty_cache``) and transformers' evaluation call ``torch.cuda.empty_cache``;
    ``torch_empty_cache_steps`` and ``Accelerator.free_memory`` go through ``accelerate/utils/memory.py:
    clear_device_cache``, which detects the hardware, such as an Apple or Intel GPU. transformers' memory metrics
    (``skip_memory_metrics=False``), which need ``torch.cuda.is_available()``, are not imitated.
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
    CudaRule(lambda recorder, card: recorded_empty_cache(recorder)),
)


@functools.cache
def every_rule() -> tuple[CudaRule, ...]:
    """Lists the rules of all modules in this folder, in the order of their names."""
    modules = [importlib.import_module(f"{cuda.__name__}.{each.name}") for each in pkgutil.iter_modules(cuda.__path__)]
    return tuple(rule for module in modules for rule in getattr(module, "RULES", ()))


@contextmanager
def cuda_semantics(recorder: Recorder, compute_capability: Capability, *, are_fake: bool = True) -> Iterator[None]:
    """Within the block, applies the rules that fake or real CPU tensors need: build and train the trainer there."""
    with ExitStack() as stack:
        for rule in every_rule():
            if are_fake or not rule.fakes_only:
                stack.enter_context(rule.imitate(recorder, compute_capability))
        yield


def not_imitated(compute_capability: Capability) -> tuple[str, ...]:
    """Lists the memory that a rehearsal for this compute capability leaves out under any settings."""
    left_out = [each for rule in reversed(every_rule()) for each in rule.not_counted(compute_capability)]
    return (*workspaces.NOT_COUNTED, *left_out)
