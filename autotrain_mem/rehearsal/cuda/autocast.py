"""Applies CUDA's autocast policy to CPU tensors, which determines the bytes that each operator saves.

The CPU's dispatch key gets CUDA's casting kernels (``aten/src/ATen/autocast_mode.cpp: TORCH_LIBRARY_IMPL``). Operators
that both devices cast alike keep torch's kernel and its cache of cast weights. Operators that only the CPU casts fall
through, and the rest are cast here.

Not imitated: einsum, mv, addmv, addr, chain_matmul, linalg_multi_dot and the recurrent cells cast an fp32 weight at
each use here, but CUDA caches the cast; softmax and log_softmax of float16 copy their input to float32 here, but CUDA
casts it inside the kernel (``aten/src/ATen/native/SoftMax.cpp: log_softmax``).
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.library import _scoped_library, fallthrough_kernel
from torch.utils._pytree import tree_leaves

from autotrain_mem.rehearsal.cuda.rules import CudaRule


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER_PRECISION = _names(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
    """
)
"""Operators cast to autocast's dtype (``aten/src/ATen/autocast_mode.h: AT_FORALL_LOWER_PRECISION_FP``, torch 2.13)."""

FLOAT32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """
)
"""Operators cast to float32 (``AT_FORALL_FP32``)."""

FLOAT32_BY_DTYPE = _names(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)
"""Operators that return float32 unless another dtype is given (``AT_FORALL_FP32_SET_OPT_DTYPE``)."""

FLOAT32_BY_OVERLOAD = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Operators redirected to an overload that takes a dtype (``AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE``)."""

WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Operators cast to float32 if any input is float32 (``AT_FORALL_PROMOTE``)."""

REFUSED = "binary_cross_entropy"
"""The operator that autocast rejects on CUDA (``autocast_mode.cpp: binary_cross_entropy_banned``)."""

_CPU_OTHERWISE = frozenset({"prod", "prod.dim_int", "grid_sampler"})
"""Operators that both devices cast, but by different rules: the CPU always casts them to float32."""

_NO_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_CASTED = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Within the block, ``torch.autocast("cpu")`` casts as ``torch.autocast("cuda")`` does.

    ``torch.is_autocast_enabled()`` without a device means CUDA's autocast (``torch/csrc/autograd/init.cpp``). Here it
    means the CPU's, since PEFT's adapters on quantized layers call it (``peft/tuners/lora/bnb.py``).
    """
    is_enabled = torch.is_autocast_enabled
    with _scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name, kernel in _kernels().items():
                library.impl(name, kernel, "AutocastCPU")
        with patch.object(torch, "is_autocast_enabled", lambda device_type="cpu": is_enabled(device_type)):
            yield


@cache
def _kernels() -> dict[str, Callable[..., Any]]:
    """Makes a kernel for each operator that the installed torch casts differently on the CPU, but not for cuDNN's, nor
    for the overloads for named tensors, which torch 2.13 removed."""
    cpu, cuda = _registered("AutocastCPU"), _registered("AutocastCUDA")
    missing = sorted(cuda - (cpu - _CPU_OTHERWISE))
    unused = re.compile(r"_*cudnn_|.*(dimname|\.names_)", re.IGNORECASE)
    return {
        **{name: _kernel(name) for name in missing if not unused.match(name)},
        **dict.fromkeys(sorted(cpu - cuda), fallthrough_kernel),
        REFUSED: _refuse,
    }


def _registered(key: str) -> set[str]:
    return {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}


def _kernel(name: str) -> Callable[..., Any]:
    """Returns an operator's casting kernel. Raises KeyError if the operator has no policy here."""
    operator = _operator(name)
    if name in FLOAT32:
        return _casting(operator, lambda args, kwargs: torch.float32)
    if name in LOWER_PRECISION:
        return _casting(operator, lambda args, kwargs: torch.get_autocast_dtype("cpu"))
    if name in WIDEST:
        return _casting(operator, _widest)
    if name in FLOAT32_BY_DTYPE:
        position = [argument.name for argument in operator._schema.arguments].index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = args[position] if len(args) > position else kwargs.get("dtype")
            if given is None and _is_eligible(args[0]):
                args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
            with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
                return operator(*args, **kwargs)

        return kernel
    return _appending_dtype(_operator(FLOAT32_BY_OVERLOAD[name]))


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _casting(operator: Any, choose: Callable[[tuple[Any, ...], dict[str, Any]], torch.dtype]) -> Callable[..., Any]:
    """Makes a kernel that casts to the dtype that ``choose`` returns for the arguments."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose(args, kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
            return operator(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})

    return kernel


def _appending_dtype(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = {"p": 2, "keepdim": False, **dict(zip(names, args, strict=False)), **kwargs}
        tensor = given["self"]
        dtype = torch.float32 if _is_eligible(tensor) else tensor.dtype
        with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
            return operator(*(given[name] for name in names), dtype=dtype)

    return kernel


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast on CUDA; "
        "use binary_cross_entropy_with_logits"
    )


def _widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """Follows ``autocast_mode.h: promote_type``."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    is_wide = any(tensor.dtype is torch.float32 and _is_eligible(tensor) for tensor in tensors)
    return torch.float32 if is_wide else torch.get_autocast_dtype("cpu")


def _is_eligible(tensor: torch.Tensor) -> bool:
    """Follows ``autocast_mode.h: is_eligible``."""
    return tensor.dtype in _CASTED and tensor.device.type == "cpu"


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is not dtype and _is_eligible(value) else value
    return type(value)(_cast(item, dtype) for item in value) if isinstance(value, (list, tuple)) else value


RULES = (CudaRule(lambda recorder, card: cuda_autocast()),)
