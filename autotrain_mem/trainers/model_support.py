"""Decides which quantized models and kernels can be rehearsed, where quantized weights go, and finds their tensors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from autotrain_mem.support.errors import UnsupportedModelError
from autotrain_mem.types.hardware import Capability


def refuse_unrehearsed(config: Any, asked: Any) -> None:
    """Raises UnsupportedModelError for a quantization that is not rehearsed, and for a second quantization.

    Only bitsandbytes' quantization is rehearsed, and checkpoints in mxfp4 if they are dequantized. ``config``: the
    model's config. ``asked``: the quantization config given by the user, or None."""
    present = quantization_method(checkpoint_quantization(config))
    if present == "mxfp4" and getattr(asked, "dequantize", False):
        return
    if present and asked is not None:
        raise UnsupportedModelError(
            f"The checkpoint is quantized already ({present}), so it cannot be quantized again.",
            hint="Remove --load_in_4bit and --load_in_8bit, or use the checkpoint that it was quantized from.",
        )
    method = present or quantization_method(asked)
    if method and method != "bitsandbytes":
        raise UnsupportedModelError(
            f"A model quantized with {method} is not rehearsed yet, only bitsandbytes' quantization is.",
            hint="Load it with quantization_config=Mxfp4Config(dequantize=True)."
            if method == "mxfp4"
            else "Use the checkpoint that it was quantized from, and --load_in_4bit or --load_in_8bit.",
        )
    if getattr(asked, "llm_int8_has_fp16_weight", False):
        raise UnsupportedModelError(
            "8-bit layers that keep float16 weights (llm_int8_has_fp16_weight) are not rehearsed yet.",
            hint="--load_in_8bit alone keeps int8 weights only.",
        )


def checkpoint_quantization(config: Any) -> Any:
    """Returns the checkpoint's quantization, as a dict or a config object; None if it has none
    (``transformers/quantizers/auto.py: get_hf_quantizer``)."""
    found = getattr(config, "quantization_config", None)
    return found or getattr(config.get_text_config(decoder=True), "quantization_config", None)


def quantization_method(quantization: Any) -> str:
    """Returns the method of a quantization config, such as ``gptq``; empty for None."""
    if quantization is None:
        return ""
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        return "bitsandbytes"  # older checkpoints do not name it (AutoQuantizationConfig.from_dict)
    method = quantization.get("quant_method") or "an unnamed method"
    return str(getattr(method, "value", method))


def waits_on_host(quantizer: Any) -> bool:
    """Returns whether a quantizer's model waits in host memory to be sharded: FSDP keeps its shards there, and 4-bit
    weights in a floating-point storage are sharded (``accelerate/utils/fsdp_utils.py: fsdp2_prepare_model``)."""
    storage = getattr(quantizer.quantization_config, "bnb_4bit_quant_storage", torch.uint8)
    is_sharded = storage.is_floating_point and not quantizer.pre_quantized
    return is_sharded and os.environ.get("FSDP_OFFLOAD_PARAMS") == "true"


@contextmanager
def quantized_to_host() -> Iterator[None]:
    """Within the block, a model that :func:`waits_on_host` is loaded there, each weight by way of the GPU.

    transformers loads a quantized model onto the GPU as a whole (``quantizers/quantizer_bnb_4bit.py:
    update_device_map``). ``fully_shard`` needs one unit at a time there (``torch/distributed/fsdp/_fully_shard/
    _fsdp_init.py: _move_states_to_device``), so a model that is larger than the GPU can be sharded from the host.
    """
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    place, convert = Bnb4BitHfQuantizer.update_device_map, Bnb4bitQuantize.convert

    def device_map(quantizer: Any, asked: Any) -> Any:
        return {"": "cpu"} if waits_on_host(quantizer) else place(quantizer, asked)

    def quantize(operation: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        if not waits_on_host(operation.hf_quantizer):
            return convert(operation, weights, *args, **kwargs)
        gpu = place(operation.hf_quantizer, None)[""]
        arrived = {name: [each.to(gpu) for each in found] for name, found in weights.items()}
        return {name: each.to("cpu") for name, each in convert(operation, arrived, *args, **kwargs).items()}

    with (
        patch.object(Bnb4BitHfQuantizer, "update_device_map", device_map),
        patch.object(Bnb4bitQuantize, "convert", quantize),
    ):
        yield


def statistics(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and tensors of quantized weights' scales, codes and offsets."""
    for name, module in model.named_modules():
        if (weight := module._parameters.get("weight")) is None:
            continue
        prefix = f"{name}.weight" if name else "weight"
        if (state := getattr(weight, "quant_state", None)) is not None:
            yield from _of_state(state, prefix)
        scale = getattr(weight, "SCB", None)
        if scale is None:  # after the first forward it is in the layer's state (Linear8bitLt.init_8bit_state)
            scale = getattr(getattr(module, "state", None), "SCB", None)
        if scale is not None:
            yield f"{prefix}.SCB", scale


def unquantized_bytes(model: Any) -> int:
    """Returns the bytes of the fused experts in a quantized model; 0 if the model is not quantized.

    Experts stay unquantized: bitsandbytes converts only ``nn.Linear`` (``transformers/integrations/bitsandbytes.py:
    replace_with_bnb_linear``), and transformers 5 keeps a layer's experts in three-dimensional parameters.
    """
    import bitsandbytes

    quantized = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    if not any(isinstance(module, quantized) for module in model.modules()):
        return 0
    others = (module for module in model.modules() if not isinstance(module, torch.nn.modules.conv._ConvNd))
    weights = (weight for module in others for weight in module.parameters(recurse=False))
    fused = (weight for weight in weights if weight.dim() > 2 and weight.is_floating_point())
    return sum(int(weight.numel()) * weight.element_size() for weight in fused)


def _of_state(state: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("absmax", "code", "offset"):
        if isinstance(value := getattr(state, name), torch.Tensor):
            yield f"{prefix}.{name}", value
    if state.state2 is not None:
        yield from _of_state(state.state2, f"{prefix}.state2")


_HUB_NAMES = ("flash-attn2", "flash-attn3", "vllm-flash-attn3")
FLASH_NAMES = ("flash_attention_2", "flash_attention_3", *(f"kernels-community/{name}" for name in _HUB_NAMES))
"""The names in ``trl/trainer/sft_trainer.py: FLASH_ATTENTION_VARIANTS`` that a rehearsal imitates."""


def why_no_attention(
    attn_implementation: str | None, compute_capability: Capability, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Explains why an attention implementation cannot run or be rehearsed on a card; None if it can. ``dtype``: the
    dtype in which attention computes. ``head_dim``: the largest head dimension of the model."""
    if attn_implementation in (None, "eager", "sdpa"):
        return None
    if attn_implementation not in FLASH_NAMES:
        return f"{attn_implementation} is not rehearsed: use sdpa, which runs torch's own flash kernel on CUDA"
    if compute_capability < (8, 0):
        major, minor = compute_capability
        return f"flash-attention needs compute capability 8.0 or newer; this card has {major}.{minor}"
    if "3" in attn_implementation and compute_capability[0] >= 10:
        return "flash-attention 3 runs on cards of compute capability 8.x and 9.x only"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attention computes in float16 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim > 256:
        return f"flash-attention supports head dimensions of at most 256; this model has {head_dim}"
    return None


LIGER_MODELS = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""The values of ``config.model_type`` for which Liger's layers are imitated."""
LIGER_SWITCHES = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True, "fused_linear_cross_entropy": True}
"""The switches of ``liger_kernel_config``, with their defaults (``apply_liger_kernel_to_llama`` and others)."""


def why_not_liger(model_type: str, config: dict[str, Any] | None = None) -> str | None:
    """Explains why ``use_liger_kernel`` cannot be rehearsed for a model and a Liger config; None if it can."""
    if model_type not in LIGER_MODELS:
        return f"Liger's kernels are rehearsed for {', '.join(LIGER_MODELS)}, not for {model_type}"
    unknown = sorted(name for name, on in (config or {}).items() if on and name not in LIGER_SWITCHES)
    return f"not rehearsed: liger_kernel_config {', '.join(unknown)}" if unknown else None
