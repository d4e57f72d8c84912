"""Refuses model objects whose rehearsal would be wrong: a rehearsal puts a whole, plain model on one device."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autotrain_mem.support.errors import Problem, UnsupportedModelError
from autotrain_mem.trainers.model_support import checkpoint_quantization, quantization_method

_BY_NAME = "Or give the model's name or folder instead of the object: the plan is then made before the model is loaded."


def check_model_object(model: Any, *, gets_adapter: bool) -> None:
    """Raises UnsupportedModelError, with the first reason found, if a rehearsal of a model object would be wrong.
    ``gets_adapter``: whether a PEFT config is given too, so that the model may be frozen."""
    not_a_module = ("is not a torch.nn.Module.", "Give a transformers model, or a PEFT model around one.")
    for check in (_spread, _unknown_tensors, _unknown_layers):
        for problem, hint in check(model) if isinstance(model, torch.nn.Module) else [not_a_module]:
            raise UnsupportedModelError(f"This {type(model).__name__} {problem}", hint=f"{hint}\n{_BY_NAME}")
    if not gets_adapter and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"This {type(model).__name__} has nothing to train: all its parameters are frozen.",
            hint="Give peft_config=LoraConfig(...), or unfreeze some: model.requires_grad_(True).",
        )


_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.nn.parallel.data_parallel": "DataParallel",
    "torch.distributed.fsdp": "FSDP",
    "deepspeed": "DeepSpeed",
}
"""Python module of a wrapper for several devices -> the wrapper's name. FSDP2 adds its class to nn.Modules' bases."""


def _spread(model: Any) -> Iterator[Problem]:
    """Yields a problem for wrappers, ZeRO-3, compilation and device maps, in this order: one may cause the next."""
    for module in model.modules():
        for kind in type(module).__mro__:
            for home, name in _WRAPPERS.items():
                if f"{kind.__module__}.".startswith(f"{home}."):
                    yield (
                        f"is wrapped for several devices ({name}); a plan is for one GPU per process.",
                        "Give the model itself, before it is wrapped: the trainer wraps it.",
                    )
    # transformers/modeling_utils.py: from_pretrained, deepspeed/runtime/zero/partition_parameters.py: Init
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        yield (
            "is divided among the processes already: ZeRO-3 divides models that are loaded after the config is made.",
            "Load it before the config is made; the trainer then divides it.",
        )
    for module in model.modules():
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
            yield (
                "is compiled, and a rehearsal runs its operators one by one.",
                "Give the model itself, and SFTConfig(torch_compile=True): an uncompiled rehearsal usually needs at "
                "least as much memory.",
            )
    places = {place for module in model.modules() for place in (vars(module).get("hf_device_map") or {}).values()}
    if len(places) > 1 or places & {"cpu", "disk"}:
        yield (
            f"is spread by a device_map over {_listed(places)}.",
            'Load it on one device: from_pretrained(..., device_map=None) or device_map={"": 0}.',
        )


def _unknown_tensors(model: Any) -> Iterator[Problem]:
    """Yields a problem for each tensor without a known shape, storage or device."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            yield f"has a lazy parameter without a shape: {name}.", "Run it once, so that its shapes are known."
        elif is_traceable_wrapper_subclass(tensor):
            yield (
                f"keeps {name} as a {type(tensor).__name__}, whose storages are unknown.",
                "Give a model with plain weights, or one quantized by bitsandbytes.",
            )
        elif tensor.device.type == "meta":
            yield f"has no weights: {name} is on the meta device.", "Load its weights, or move it with model.to_empty."
    if len(devices := {tensor.device for _, tensor in tensors}) > 1:
        yield f"is spread over {_listed(devices)}; only one is supported.", "Move it to one: model.to('cuda:0')."
    if others := {device.type for device in devices} - {"cpu", "cuda"}:
        yield (
            f"is on {_listed(others)}, whose allocator is unknown.",
            "Move it to the CPU to plan for a card: model.to('cpu'), and AutoFit(gpu=...).",
        )


def _unknown_layers(model: Any) -> Iterator[Problem]:
    """Yields a problem for layers quantized without bitsandbytes, and for fused layers: fake tensors cannot run Triton
    kernels. Liger's layers are rehearsed only if the trainer applies them (``rehearsal.cuda``)."""
    from transformers import PreTrainedModel

    for part in model.modules():
        method = quantization_method(checkpoint_quantization(part.config)) if isinstance(part, PreTrainedModel) else ""
        if method and method != "bitsandbytes":
            yield (
                f"is quantized with {method}, whose layers keep their weights in their own format.",
                "Load the unquantized checkpoint with quantization_config=BitsAndBytesConfig(load_in_4bit=True).",
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if getattr(tensor, "bnb_quantized", None) is False:
            yield (
                f"has a 4-bit layer that is not quantized yet: {name}.",
                "Move the model to the GPU first, which quantizes it: model.to('cuda').",
            )
        elif getattr(tensor, "has_fp16_weights", False):
            yield (
                f"keeps the float16 weights of 8-bit layers: {name}.",
                "Load it with BitsAndBytesConfig(load_in_8bit=True) alone, which keeps int8 weights only.",
            )
    for module in model.modules():
        if getattr(module, "_use_kernels", False):  # ``transformers/modeling_utils.py: set_use_kernels``
            yield (
                "runs kernels from the hub (use_kernels), whose buffers are unknown.",
                "Load it without use_kernels and kernel_config; for fused layers give use_liger_kernel=True.",
            )
        if any(home.startswith("liger_kernel.") for home in (type(module).__module__, module.forward.__module__)):
            yield (
                f"already has Liger's layers ({type(module).__name__}).",
                "Give the model as it is loaded, and use_liger_kernel=True: the trainer applies them.",
            )


def check_loading(options: Mapping[str, Any] | None) -> None:
    """Raises UnsupportedModelError if ``model_init_kwargs`` ask for layers that cannot be rehearsed."""
    for name in ("use_kernels", "kernel_config"):
        if (options or {}).get(name):
            raise UnsupportedModelError(
                f"model_init_kwargs asks for kernels from the hub ({name}), whose buffers are unknown.",
                hint="Remove it; for fused layers give use_liger_kernel=True, which is rehearsed.",
            )


def _listed(things: set[Any]) -> str:
    return ", ".join(sorted(map(str, things)))
