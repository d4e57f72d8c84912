"""Makes bitsandbytes allocate as on CUDA, by decomposing its operators as its CUDA backend does (version 0.50.2).

- 4-bit product (``bitsandbytes/backends/cuda/ops.py: gemm_4bit``): one fused kernel for up to 4 tokens. For more, the
  whole weight is dequantized into the input's dtype (``_dequant_linear_fallback``), after its float32 scales if these
  are quantized too. Between 5 and 1536 tokens the path depends on the card (``_gemm_4bit_use_custom_cuda``): the one
  that takes more memory is assumed.
- 4-bit layer in evaluation (``bitsandbytes/nn/modules.py: Linear4bit.forward``): no repacking for AVX-512.
- 8-bit product (``bitsandbytes/autograd/_functions.py: matmul``): MatMul8bitLt runs, also in training. It makes int32
  products and a float16 result, and casts it to the input's dtype (``backends/default/ops.py: int8_mixed_scaled_mm,
  int8_scaled_mm``, ``backends/cuda/ops.py: int8_mm_dequant, int8_vectorwise_quant``).
- PEFT's access to a quantized weight (``peft/utils/integrations.py: dequantize_module_weight``): PEFT looks for the
  name of bitsandbytes' class, which a fake tensor does not have.
- 8-bit optimizers (``bitsandbytes/optim/optimizer.py: GlobalOptimManager``): each run forgets which parameters kept
  32-bit state in the run before. Their updates are one in-place operator on both devices, and need no rule.

Values come from the CPU kernels. bitsandbytes requests no cuBLAS workspace (``csrc/ops.cu: igemmlt``).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import _scoped_library

from autotrain_mem.rehearsal.cuda.rules import CudaRule

FUSED_UP_TO_TOKENS = 4
"""The most tokens for the fused 4-bit kernel on every card (``backends/cuda/ops.py: _GEMM_4BIT_CUSTOM_FLOOR_M``)."""

NESTED_BLOCKSIZE = 256
"""The number of scales that share a second-level scale (``bitsandbytes/functional.py: quantize_4bit``)."""

_KEY = "AutogradCPU"
_APART = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)


@contextmanager
def cuda_bitsandbytes() -> Iterator[None]:
    """Makes bitsandbytes' layers on CPU tensors, fake or real, allocate as on CUDA; no effect without bitsandbytes."""
    if find_spec("bitsandbytes") is None:
        yield
        return
    import bitsandbytes
    from bitsandbytes import functional
    from bitsandbytes.autograd import _functions
    from bitsandbytes.nn import modules
    from bitsandbytes.optim import GlobalOptimManager
    from peft.tuners.lora import dora, layer, variants

    plain = dora.dequantize_module_weight

    def dequantize(module: torch.nn.Module) -> Any:
        weight: Any = module.weight
        if isinstance(weight, FakeTensor) and (state := getattr(weight, "quant_state", None)) is not None:
            return functional.dequantize_4bit(weight.data, state)
        if isinstance(weight, FakeTensor) and (scales := getattr(weight, "SCB", None)) is not None:
            return functional.int8_vectorwise_dequant(weight.data, scales)
        return plain(module)

    with (
        ExitStack() as stack,
        patch.object(bitsandbytes, "matmul", _matmul),
        patch.object(modules, "_convert_weight_packed_for_cpu", lambda weight, state, *_: (weight, state)),
        patch.object(GlobalOptimManager, "_instance", None),
        patch.object(_functions.logger, "disabled", True),  # it warns of a cast at each product
    ):
        for user in (dora, layer, variants):
            if hasattr(user, plain.__name__):
                stack.enter_context(patch.object(user, plain.__name__, dequantize))
        if not torch._C._dispatch_has_kernel_for_dispatch_key("bitsandbytes::gemm_4bit", _KEY):  # the outermost block
            # Kernels of the autograd key run before dispatch modes, which then see the operators that they call.
            library = stack.enter_context(_scoped_library("bitsandbytes", "IMPL"))
            for kernel in (_gemm_4bit, _int8_vectorwise_quant, _int8_scaled_mm, _int8_mixed_scaled_mm):
                library.impl(kernel.__name__.removeprefix("_"), kernel, _KEY)
        yield


def _whole(operator: Any, *args: Any) -> Any:
    """Runs an operator without decomposing it."""
    with torch._C._ExcludeDispatchKeyGuard(_APART):
        return operator(*args)


def _gemm_4bit(
    A: torch.Tensor,
    B: torch.Tensor,
    shapeB: Sequence[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> Any:
    kernels = torch.ops.bitsandbytes
    inputs = A.shape[-1]
    if A.numel() // inputs <= FUSED_UP_TO_TOKENS and inputs % blocksize == 0:
        nested = (absmax_8bit, absmax_code, absmax_offset)
        return _whole(kernels.gemm_4bit.default, A, B, shapeB, absmax, blocksize, quant_type, bias, *nested)
    scales = absmax
    if absmax_8bit is not None:
        dequantized = kernels.dequantize_blockwise.default(
            absmax_8bit, absmax, absmax_code, NESTED_BLOCKSIZE, torch.float32
        )
        scales = dequantized + absmax_offset
    weight = kernels.dequantize_4bit.default(B, scales, blocksize, quant_type, shapeB, A.dtype)
    return torch.nn.functional.linear(A, weight, bias)


def _matmul(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor | None = None,
    state: Any = None,
    threshold: float = 0.0,
    bias: torch.Tensor | None = None,
) -> Any:
    from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState

    state = state or MatmulLtState()
    if threshold > 0.0:
        state.threshold = threshold
    return MatMul8bitLt.apply(A, B, out, bias, state)


def _int8_vectorwise_quant(A: torch.Tensor, threshold: float = 0.0) -> Any:
    quantize = torch.ops.bitsandbytes.int8_vectorwise_quant.default
    rows, scales, _ = _whole(quantize, A, 0.0)
    if threshold == 0.0:
        return rows, scales, None
    outliers = A.abs() >= threshold
    if outliers.any():
        columns = torch.argwhere(outliers.any(dim=0)).view(-1)
        with torch._C._DisableTorchDispatch():  # writes values without outliers, as CUDA's kernel would
            exact, exact_scales, _ = _whole(quantize, A, threshold)
            rows.copy_(exact)
            scales.copy_(exact_scales)
    else:
        columns = torch.empty(0, device=A.device, dtype=torch.int64)
    if A.numel() > A.shape[-1]:
        rows[:, columns] = 0
    return rows, scales, columns


def _int8_scaled_mm(
    A: torch.Tensor,
    B: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    kernels = torch.ops.bitsandbytes
    product = kernels.int8_linear_matmul.default(A, B)
    fused_bias = bias if bias is not None and bias.dtype is torch.float16 else None
    half = kernels.int8_mm_dequant.default(product, row_stats, col_stats, dtype=torch.float16, bias=fused_bias)
    if bias is not None and fused_bias is None:
        half.add_(bias)
    return half.to(dtype or torch.float16)


def _int8_mixed_scaled_mm(
    A: torch.Tensor,
    CA: torch.Tensor,
    CB: torch.Tensor,
    SCA: torch.Tensor,
    SCB: torch.Tensor,
    outlier_cols: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if outlier_cols is None or outlier_cols.numel() == 0:
        nothing = torch.empty(0, device=A.device, dtype=A.dtype)
        return _int8_scaled_mm(CA, CB, SCA, SCB, bias, A.dtype), nothing
    inputs = A[:, outlier_cols].contiguous()
    columns = CB[:, outlier_cols].contiguous()
    weights = torch.ops.bitsandbytes.int8_vectorwise_dequant.default(columns, SCB).to(A.dtype).t()
    output = _int8_scaled_mm(CA, CB, SCA, SCB, bias, A.dtype)
    return output.addmm(inputs, weights), inputs


RULES = (CudaRule(lambda recorder, card: cuda_bitsandbytes()),)
