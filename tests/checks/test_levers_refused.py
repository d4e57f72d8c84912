"""Levers that are not rehearsed are refused with the reason, before anything is built."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from autotrain_mem.checks.flags import Flags, compiled_graphs
from autotrain_mem.support.errors import UnsupportedModelError
from autotrain_mem.trainers.model_support import _WHY_NOT, refuse_unrehearsed
from autotrain_mem.types.preflight import collect


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({"torch_compile": True}, False),
        ({"torch_compile_mode": "max-autotune-no-cudagraphs"}, False),
        ({"torch_compile_mode": "reduce-overhead"}, True),
        ({"torch_compile_mode": "max-autotune"}, True),
        ({"torch_compile_backend": "cudagraphs"}, True),
    ],
)
def test_what_compiles_without_a_bound_is_refused(given: dict[str, Any], is_refused: bool) -> None:
    findings = collect([compiled_graphs], Flags(method="sft", given=given))
    assert bool(findings) is is_refused


def config_of(method: str) -> Any:
    config = SimpleNamespace(quantization_config={"quant_method": method})
    config.get_text_config = lambda decoder: config
    return config


@pytest.mark.parametrize("method", ["awq", "gptq", "hqq", "torchao", "fp8", "compressed-tensors", "unheard of"])
def test_a_base_quantized_in_another_way_is_refused_with_the_reason(method: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"quantized with {method} is not rehearsed yet: ") as caught:
        refuse_unrehearsed(config_of(method), None)
    assert _WHY_NOT.get(method, "form of their own") in caught.value.message


def test_reasons_are_for_methods_that_transformers_has() -> None:
    assert _WHY_NOT.keys() <= AUTO_QUANTIZER_MAPPING.keys()
    trains_none = [name for name, why in _WHY_NOT.items() if why == _WHY_NOT["vptq"]]
    for name in trains_none:
        quantizer = AUTO_QUANTIZER_MAPPING[name]
        assert quantizer.is_trainable.fget(SimpleNamespace()) is False, name
