"""Tests that model objects are refused, with the reason, only if they cannot be rehearsed."""

import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
from tiny import tiny_config
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from autotrain_mem.checks.model_objects import check_loading, check_model_object
from autotrain_mem.support.errors import UnsupportedModelError
from autotrain_mem.trainers.model_support import refuse_unrehearsed


def tiny() -> Any:
    return AutoModelForCausalLM.from_config(tiny_config("qwen2"))


def changed(change: Callable[[Any], Any]) -> Callable[[], Any]:
    """Makes a model to which something was done."""

    def make() -> Any:
        model = tiny()
        change(model)
        return model

    return make


def with_more(layer: Callable[[], torch.nn.Module]) -> Callable[[], Any]:
    return changed(lambda model: model.register_module("more", layer()))


def layer_of(package: str) -> Callable[[], torch.nn.Module]:
    """Makes a layer of a class that cannot be made without a process group, or is not installed."""
    return type("Liger", (torch.nn.Module,), {"__module__": package})


class OnMps(torch.nn.Module):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter([("weight", SimpleNamespace(device=torch.device("mps")))])


ZEROS = torch.zeros(2)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (dict, "is not a torch.nn.Module"),
    "on meta": (
        changed(lambda model: model.model.layers[1].to("meta")),
        r"has no weights: model.layers.1.\S+ is on the meta device",
    ),
    "compiled": (lambda: torch.compile(tiny()), "OptimizedModule is compiled"),
    "compiled in place": (changed(lambda model: model.compile()), "is compiled"),
    "offloaded": (
        changed(lambda model: setattr(model, "hf_device_map", {"a": 0, "b": "disk"})),
        "device_map over 0, disk",
    ),
    "gptq": (
        changed(lambda model: setattr(model.config, "quantization_config", {"quant_method": "gptq"})),
        "quantized with gptq",
    ),
    "lazy": (with_more(lambda: torch.nn.LazyLinear(2)), r"lazy parameter without a shape: more.weight"),
    "ddp": (layer_of("torch.nn.parallel.distributed"), r"wrapped for several devices \(DistributedDataParallel\)"),
    "data parallel": (lambda: torch.nn.DataParallel(tiny()), r"several devices \(DataParallel\)"),
    "deepspeed": (layer_of("deepspeed.runtime.engine"), r"several devices \(DeepSpeed\)"),
    "zero-3": (
        changed(lambda model: setattr(next(model.parameters()), "ds_id", 0)),
        "divided among the processes already",
    ),
    "fsdp2 within": (
        lambda: torch.nn.Sequential(layer_of("torch.distributed.fsdp._fully_shard._fully_shard")()),
        r"several devices \(FSDP\)",
    ),
    "4 bits to be": (with_more(lambda: bitsandbytes.nn.Linear4bit(8, 8)), "not quantized yet: more.weight"),
    "float16 beside 8 bits": (
        with_more(lambda: bitsandbytes.nn.Linear8bitLt(8, 8)),
        "keeps the float16 weights of 8-bit layers: more.weight",
    ),
    "a tensor subclass": (
        changed(lambda model: model.register_parameter("more", torch.nn.Parameter(TwoTensor(ZEROS, ZEROS)))),
        "keeps more as a TwoTensor",
    ),
    "kernels from the hub": (changed(lambda model: setattr(model, "_use_kernels", True)), r"\(use_kernels\)"),
    "liger's class within": (
        with_more(layer_of("liger_kernel.transformers.rms_norm")),
        r"already has Liger's layers \(Liger\)",
    ),
    "mps": (OnMps, "is on mps, whose allocator is unknown"),
    "frozen": (changed(lambda model: model.requires_grad_(False)), "all its parameters are frozen"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_rehearsal_would_be_wrong_is_refused_with_the_reason(kind: str) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(UnsupportedModelError, match=reason) as raised:
        check_model_object(make(), gets_adapter=False)
    assert raised.value.hint
    if kind == "frozen":
        check_model_object(make(), gets_adapter=True)


def test_loading_with_kernels_from_the_hub_is_refused() -> None:
    for name in ("use_kernels", "kernel_config"):
        with pytest.raises(UnsupportedModelError, match=name):
            check_loading({name: True})
        check_loading({"dtype": "bfloat16", name: None})
    check_loading(None)


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_a_model_that_bitsandbytes_quantized_is_refused_only_if_it_is_spread(bits: str, qwen: pathlib.Path) -> None:
    config = BitsAndBytesConfig(**{bits: True})
    model = AutoModelForCausalLM.from_pretrained(qwen, device_map=None, quantization_config=config)
    model.hf_device_map = {"": 0}
    check_model_object(model, gets_adapter=True)
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(UnsupportedModelError, match="device_map"):
        check_model_object(model, gets_adapter=True)


def test_a_base_quantized_in_another_way_is_refused_with_the_reason() -> None:
    config = SimpleNamespace(quantization_config={"quant_method": "torchao"}, get_text_config=lambda decoder: config)
    with pytest.raises(UnsupportedModelError, match="quantized with torchao is not rehearsed yet, only bitsandbytes"):
        refuse_unrehearsed(config, None)
