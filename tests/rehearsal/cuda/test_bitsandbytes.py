"""A rehearsal loads and runs quantized layers like bitsandbytes; ``test_parity`` trains on them."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from torch._subclasses.fake_tensor import FakeTensorMode
from trace_reading import sizes

from autotrain_mem.cli.tiny_model import VOCABULARY_SIZE
from autotrain_mem.rehearsal import fake_run
from autotrain_mem.rehearsal.cuda.bitsandbytes import FUSED_UP_TO_TOKENS, cuda_bitsandbytes
from autotrain_mem.rehearsal.fake_run import materialize
from autotrain_mem.rehearsal.known_values import KnownValues
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.support.errors import UnsupportedModelError
from autotrain_mem.trainers.model_support import refuse_unrehearsed, statistics
from autotrain_mem.trainers.weightless import without_weights
from autotrain_mem.types import Owner

Folder = Callable[[str], Path]

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
QUANTIZED: dict[str, dict[str, Any]] = {
    "nf4-double": {**NF4, "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "float32"},
    "nf4-bf16-storage": {**NF4, "bnb_4bit_quant_storage": "bfloat16"},
    "int8": {"load_in_8bit": True},
}


def quantization(name: str) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**QUANTIZED[name])


def load(folder: Path, **options: Any) -> Any:
    from trl.trainer.utils import create_model_from_path

    return create_model_from_path(str(folder), device_map=None, **options)


def fake_load(folder: Path, **options: Any) -> Any:
    with FakeTensorMode(), without_weights(materialize):
        return load(folder, **options)


def weights(model: Any) -> dict[str, tuple[Any, ...]]:
    tensors = (*model.named_parameters(), *model.named_buffers(), *statistics(model))
    return {
        name: (tuple(t.shape), t.dtype, t.untyped_storage().nbytes(), isinstance(t, torch.nn.Parameter))
        for name, t in tensors
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_quantized_base_keeps_what_the_real_one_keeps(
    family: str, name: str, dtype: str, model_folder: Folder
) -> None:
    """bitsandbytes keeps tables of codes for the whole process, which must not become fake."""
    given, codes = {"dtype": dtype, "quantization_config": quantization(name)}, dict(functional.name2qmap)
    fake = fake_load(model_folder(family), **given)
    assert functional.name2qmap == codes
    real = load(model_folder(family), **given)
    assert weights(fake) == weights(real)
    assert fake.config.quantization_config.to_dict() == real.config.quantization_config.to_dict()
    assert type(fake.hf_quantizer) is type(real.hf_quantizer)
    for module, true in zip(fake.modules(), real.modules(), strict=True):
        assert type(module) is type(true)
        assert described(module) == described(true)


def described(module: Any) -> list[Any]:
    weight = getattr(module, "weight", None)
    state = getattr(weight, "quant_state", None)
    of_weight = [getattr(weight, name, None) for name in ("compress_statistics", "quant_storage", "bnb_quantized")]
    names = ("shape", "dtype", "blocksize", "quant_type", "nested")
    return [*of_weight, *(getattr(state, name, None) for name in names)]


@pytest.mark.parametrize("name", ["nf4-double", "int8"])
def test_a_quantized_checkpoint_rehearses_with_its_own_quantization_only(
    name: str, model_folder: Folder, tmp_path: Path
) -> None:
    load(model_folder("qwen2"), dtype="bfloat16", quantization_config=quantization(name)).save_pretrained(tmp_path)
    real = load(tmp_path, dtype="bfloat16")
    (tmp_path / "model.safetensors").unlink()
    assert weights(fake_load(tmp_path, dtype="bfloat16")) == weights(real)
    with pytest.raises(UnsupportedModelError, match=r"quantized already \(bitsandbytes\)"):
        fake_load(tmp_path, quantization_config=quantization("nf4-double"))


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors", "llm_int8_has_fp16_weight"])
def test_other_quantizations_are_refused_by_name(method: str) -> None:
    from transformers import BitsAndBytesConfig, Qwen2Config

    keeps_float16 = method == "llm_int8_has_fp16_weight"
    config = Qwen2Config() if keeps_float16 else Qwen2Config(quantization_config={"quant_method": method})
    asked = BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True) if keeps_float16 else None
    with pytest.raises(UnsupportedModelError, match=rf"{method}\b.* (is|are) not rehearsed yet"):
        refuse_unrehearsed(config, asked)


def linear_4bit(inputs: int, outputs: int, nested: bool) -> Any:
    layer = bitsandbytes.nn.Linear4bit(
        inputs, outputs, bias=False, compute_dtype=torch.bfloat16, compress_statistics=nested, quant_type="nf4"
    )
    return layer.to("cpu")


def births_on_cuda(layer: Any, x: torch.Tensor, backward: bool = False) -> list[int]:
    """Returns the sizes that one pass allocates."""
    recorder = Recorder()
    recorder.adopt_model(layer)
    for name, tensor in (*statistics(layer), ("input", x)):
        recorder.mark(tensor, Owner.WEIGHTS, name)
    before = len(recorder.trace().blocks)
    with cuda_bitsandbytes(), recorder.recording():
        out = layer(x)
        if backward:
            out.sum().backward()
    return sizes(recorder.trace())[before:]


def test_a_4bit_product_dequantizes_the_whole_weight_except_for_few_tokens() -> None:
    few = FUSED_UP_TO_TOKENS
    for nested, scales in ((False, 0), (True, 2)):  # scales, then scales and their offset
        layer = linear_4bit(128, 256, nested)
        births = births_on_cuda(layer, torch.randn(few + 1, 128, dtype=torch.bfloat16, requires_grad=True))
        assert {128 * 256 * 2, (few + 1) * 256 * 2} <= {*births}
        assert births.count(128 * 256 // 64 * 4) == scales
        assert births_on_cuda(layer, torch.randn(few, 128, dtype=torch.bfloat16)) == [few * 256 * 2]


def test_a_layer_in_evaluation_keeps_its_packing() -> None:
    layer = linear_4bit(128, 256, nested=False).eval()
    layer.support_avx512bf16_for_cpu = True
    before = layer.weight.data.clone()
    with torch.no_grad():
        births_on_cuda(layer, torch.randn(8, 128, dtype=torch.bfloat16))
    assert torch.equal(layer.weight.data, before)
    assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)


@pytest.mark.parametrize("scale", [1.0, 20.0], ids=["no outliers", "outliers"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_8bit_layer_computes_the_same_with_and_without_the_rules(scale: float, bias: bool) -> None:
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear8bitLt(64, 32, bias=bias, has_fp16_weights=False, threshold=6.0).to("cpu").eval()
    x = torch.randn(10, 64).clamp(-3, 3)
    x[:, 5] *= scale
    results = []
    for context in (nullcontext, cuda_bitsandbytes):
        with context(), torch.no_grad():
            results.append(layer(x))
    assert torch.allclose(results[0], results[1], atol=2e-3), "the product is rounded to float16, as on CUDA"


def test_an_8bit_product_holds_int32_and_float16_results() -> None:
    layer = bitsandbytes.nn.Linear8bitLt(64, 96, bias=False, has_fp16_weights=False, threshold=6.0).to("cpu")
    layer.train()
    x = torch.randn(10, 64, dtype=torch.bfloat16).clamp(-3, 3).requires_grad_()
    births = births_on_cuda(layer, x, backward=True)
    assert {10 * 96 * 4, 10 * 96 * 2, 10 * 64 * 2, 10 * 64, 10 * 4, 96 * 64 * 2} <= {*births}


def state_sizes(model: Any, embedding_bits: int | None) -> list[dict[str, int]]:
    """Returns the bytes of every parameter's state after one step."""
    if embedding_bits is not None:
        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        manager.register_module_override(model.model.embed_tokens, "weight", {"optim_bits": embedding_bits})
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    return [{name: value.nbytes for name, value in state.items() if torch.is_tensor(value)} for state in states]


def test_8bit_optimizer_state_has_the_real_sizes(model_folder: Folder) -> None:
    """Embeddings and parameters below 4096 elements have 32-bit state; the rest 8-bit state, and a scale per 256."""
    with cuda_bitsandbytes():
        real = state_sizes(load(model_folder("qwen2")), embedding_bits=32)
    with fake_run.fake_tensors() as mode, without_weights(materialize), cuda_bitsandbytes():
        model = load(model_folder("qwen2"))
        with Recorder(KnownValues(mode).run).recording():
            fake = state_sizes(model, embedding_bits=32)
    assert fake == real
    embedding, gate = VOCABULARY_SIZE * 64, 64 * 192
    assert fake[0] == {"state1": embedding * 4, "state2": embedding * 4}
    scales = {"absmax1": gate // 256 * 4, "absmax2": gate // 256 * 4, "qmap1": 1024, "qmap2": 1024}
    assert {"state1": gate, "state2": gate, **scales} in fake
    with cuda_bitsandbytes():  # bitsandbytes remembers by position which parameters had 32 bits in the last run
        assert state_sizes(load(model_folder("qwen2")), embedding_bits=None)[0]["state1"] == embedding
