"""The recorded allocations of loading are those of transformers' and bitsandbytes' own code."""

from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from real_run import Folder, case, rehearsed
from tiny import FAMILIES, tiny_config
from torch._subclasses.fake_tensor import FakeTensorMode
from trace_reading import sizes
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, core_model_loading, modeling_utils
from trl.trainer.utils import create_model_from_path

from autotrain_mem.cli.tiny_model import VOCABULARY_SIZE
from autotrain_mem.rehearsal import fake_run
from autotrain_mem.rehearsal.cuda import loading
from autotrain_mem.rehearsal.cuda.bitsandbytes import FUSED_UP_TO_TOKENS, cuda_bitsandbytes
from autotrain_mem.rehearsal.cuda.loading import ASKED_FREE, WARM_UP, cuda_loading
from autotrain_mem.rehearsal.fake_run import fake_tensors, materialize
from autotrain_mem.rehearsal.known_values import KnownValues
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.support.errors import UnsupportedModelError
from autotrain_mem.trainers.model_support import refuse_unrehearsed, statistics
from autotrain_mem.trainers.weightless import without_weights
from autotrain_mem.types import Owner, Phase, Trace

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
QUANTIZED: dict[str, dict[str, Any]] = {
    "nf4-nested": {**NF4, "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "float32"},
    "nf4-bf16-storage": {**NF4, "bnb_4bit_quant_storage": "bfloat16"},
    "int8": {"load_in_8bit": True},
}
KINDS = ("full", "nf4-nested", "fp4", "int8")


def quantization(kind: str) -> Any:
    return BitsAndBytesConfig(**QUANTIZED[kind]) if kind in QUANTIZED else None


def options(kind: str) -> dict[str, Any]:
    return {"dtype": torch.bfloat16, "quantization_config": quantization(kind)}


def loaded(path: Any, kind: str = "full", *, fake: bool = True, **more: Any) -> Trace:
    """Returns the record of loading a model."""
    recorder = Recorder()
    with ExitStack() as stack:
        if fake:
            stack.enter_context(fake_tensors())
            stack.enter_context(without_weights(materialize))
        stack.enter_context(cuda_loading(recorder))
        model = AutoModelForCausalLM.from_pretrained(path, **{"device_map": "auto", **options(kind), **more})
        trace = recorder.trace()
        del model
    return trace


def transformers_warm_up(path: Any, kind: str, cached_bytes: int) -> int:
    """Returns the bytes that ``caching_allocator_warmup`` requests on a GPU of a TiB with ``cached_bytes`` cached."""
    asked: list[int] = []
    read = PreTrainedModel._load_pretrained_model

    def empty(elements: int, dtype: torch.dtype, **where: Any) -> None:
        asked.append(elements * dtype.itemsize)

    def watched(model: Any, state_dict: Any, files: Any, load_config: Any, *more: Any) -> Any:
        devices = dict.fromkeys(model.state_dict(), torch.device("cuda", 0))
        gpu = {"memory_reserved": cached_bytes, "memory_allocated": 0, "mem_get_info": (1 << 40, 1 << 40)}
        answers = {name: (lambda index, answer=answer: answer) for name, answer in gpu.items()}
        with (
            patch.multiple(torch.cuda, current_device=lambda: 0, **answers),
            patch.object(modeling_utils.torch, "empty", empty),
        ):
            modeling_utils.caching_allocator_warmup(model, devices, load_config.hf_quantizer)
        return read(model, state_dict, files, load_config, *more)

    with patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(watched)):
        AutoModelForCausalLM.from_pretrained(path, **options(kind))
    return sum(asked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("small_segment_bytes", [1, 2 << 20])
def test_first_comes_one_block_of_the_size_that_transformers_asks_for_and_goes(
    family: str, kind: str, small_segment_bytes: int, model_folder: Folder
) -> None:
    """The models are so small that transformers requests nothing if a real segment is cached."""
    with patch.object(loading, "SMALL_SEGMENT_BYTES", small_segment_bytes):
        trace = loaded(model_folder(family), kind)
    asked_bytes = transformers_warm_up(model_folder(family), kind, small_segment_bytes)
    assert trace.blocks[0].size_bytes == 8  # accelerate's get_max_memory
    warm_up = [block.size_bytes for block in trace.blocks[:2] if block.module == WARM_UP]
    assert warm_up == ([asked_bytes] if asked_bytes else [])
    assert list(trace.events[: 2 * len(warm_up) + 2]) == [1, -1, 2, -2][: 2 * len(warm_up) + 2]
    assert bool(warm_up) is (small_segment_bytes == 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_born_in_the_order_in_which_transformers_loads_them(family: str, model_folder: Folder) -> None:
    names_set: list[str] = []
    set_one = core_model_loading.set_param_for_module

    def watched(model: Any, name: str, *args: Any) -> None:
        names_set.append(name)
        set_one(model, name, *args)

    with patch.object(core_model_loading, "set_param_for_module", watched):
        model = AutoModelForCausalLM.from_pretrained(model_folder(family))
    trace = loaded(model_folder(family))
    born = [block.module for _, sign, block in trace.walk() if sign > 0 and block.owner is Owner.WEIGHTS]
    assert born[: len(names_set)] == names_set
    assert set(born[len(names_set) :]) == {name for name, _ in model.named_non_persistent_buffers()}
    assert len(names_set) >= 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_rehearsed_load_is_a_real_one(family: str, kind: str, model_folder: Folder) -> None:
    fake, real = (loaded(model_folder(family), kind, fake=fake) for fake in (True, False))
    assert fake.events == real.events
    assert fake.blocks == real.blocks


def test_only_a_quantizer_asks_for_a_map_of_devices_of_its_own(qwen: Path) -> None:
    """GRPO's reward models are loaded without one, and moved by the trainer later."""
    assert not loaded(qwen, device_map=None).events
    asked, unasked = (loaded(qwen, "fp4", device_map=given) for given in ("auto", None))
    assert unasked.blocks[1:] == asked.blocks[1:]
    assert [unasked.blocks[0].module, asked.blocks[0].module] == [WARM_UP, ASKED_FREE]


def test_trl_loads_onto_the_device_unless_the_training_is_distributed(qwen: Path) -> None:
    for arguments, is_on_device in (({}, True), ({"device_map": None}, False)):
        recorder = Recorder()
        with cuda_loading(recorder):
            model = create_model_from_path(str(qwen), **arguments)
        assert bool(recorder.trace().events) is is_on_device
        assert not hasattr(model, "hf_device_map"), "there is no device here"


def of_weight(trace: Trace, name: str) -> list[tuple[int, int]]:
    """Returns (+1 or -1, bytes) of all blocks that loading one weight takes."""
    return [(sign, block.size_bytes) for _, sign, block in trace.walk() if block.module.startswith(name)]


WEIGHT = "model.layers.0.mlp.down_proj.weight"
OUT, IN = 64, 192
SOURCE = OUT * IN * 2


@pytest.mark.parametrize("kind", ["nf4-nested", "fp4"])
def test_a_4_bit_weight_costs_what_bitsandbytes_makes_of_it(kind: str, qwen: Path) -> None:
    nested = kind == "nf4-nested"
    with Recorder().recording() as recorder:
        source = torch.ones(OUT, IN, dtype=torch.bfloat16)
        made = functional.quantize_4bit(source, compress_statistics=nested, quant_type=kind[:3])
        del source
    large = [block.size_bytes for block in recorder.trace().blocks if block.size_bytes >= 64]
    ours = of_weight(loaded(qwen, kind), WEIGHT)
    table, codes = 1024, Counter([64, 64, 64, 64])  # kept by bitsandbytes for the process; made on the host
    born = Counter(size for sign, size in ours if sign > 0 and size >= 64)
    assert not born - Counter(large)
    assert not (Counter(large) - born) - codes - Counter([table])
    assert made is not None


@pytest.mark.parametrize(("kind", "passing"), [("nf4-nested", [SOURCE, 768, 768]), ("int8", [SOURCE, SOURCE])])
def test_a_weight_arrives_whole_and_dies_quantized(kind: str, passing: list[int], qwen: Path) -> None:
    """768 bytes: a float32 scale for each 64 of 64 x 192. In 8 bits there is a copy in float16."""
    events = of_weight(loaded(qwen, kind), WEIGHT)
    assert events[0] == (1, SOURCE)
    assert events[-1] == (-1, SOURCE)
    assert sorted(size for sign, size in events if sign < 0) == sorted(passing)


def test_gpt2s_weights_are_made_contiguous_before_they_are_quantized(model_folder: Folder) -> None:
    source = 64 * 3 * 64 * 2
    events = of_weight(loaded(model_folder("gpt2"), "fp4"), "transformer.h.0.attn.c_attn.weight")
    assert events.count((1, source)) == events.count((-1, source)) == 2


def load_of(trace: Trace) -> list[tuple[int, int, str]]:
    return [(sign, block.size_bytes, block.module) for phase, sign, block in trace.walk() if phase is Phase.LOAD]


def test_an_adapter_is_born_after_the_weights_in_their_dtype_and_is_then_made_float32(qwen: Path) -> None:
    trace = rehearsed(case("sft", qwen, use_peft=True, dtype="bfloat16"))
    events = [(sign, size) for sign, size, name in load_of(trace) if "lora_A" in name]
    half = [size for sign, size in events if sign < 0]
    assert half
    casts = [event for size in half for event in ((1, 2 * size), (-1, size))]
    assert events == [*((1, size) for size in half), *casts]


def test_a_second_model_takes_a_block_of_its_own(qwen: Path) -> None:
    with patch.object(loading, "SMALL_SEGMENT_BYTES", 1):
        trace = rehearsed(case("dpo", qwen))
    warm_ups = [index for index, (sign, _, name) in enumerate(load_of(trace)) if sign > 0 and name == WARM_UP]
    assert len(warm_ups) == 2
    assert warm_ups[0] == 2, "the number of get_max_memory comes first"
    between = [name for sign, _, name in load_of(trace)[: warm_ups[1]] if sign > 0]
    assert "model.norm.weight" in between


def load(folder: Path, **options: Any) -> Any:
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
def test_a_quantized_base_keeps_what_real_ones_do(family: str, name: str, dtype: str, model_folder: Folder) -> None:
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


@pytest.mark.parametrize("name", ["nf4-nested", "int8"])
def test_a_quantized_checkpoint_keeps_its_quantization(name: str, qwen: Path, tmp_path: Path) -> None:
    load(qwen, dtype="bfloat16", quantization_config=quantization(name)).save_pretrained(tmp_path)
    real = load(tmp_path, dtype="bfloat16")
    (tmp_path / "model.safetensors").unlink()
    assert weights(fake_load(tmp_path, dtype="bfloat16")) == weights(real)
    with pytest.raises(UnsupportedModelError, match=r"quantized already \(bitsandbytes\)"):
        fake_load(tmp_path, quantization_config=quantization("nf4-nested"))


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors", "llm_int8_has_fp16_weight"])
def test_other_quantizations_are_refused_by_name(method: str) -> None:
    keeps_float16 = method == "llm_int8_has_fp16_weight"
    config = tiny_config("qwen2")
    if not keeps_float16:
        config.quantization_config = {"quant_method": method}
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


def test_8bit_optimizer_state_has_the_real_sizes(qwen: Path) -> None:
    """Embeddings and parameters below 4096 elements have 32-bit state; the rest 8-bit state, and a scale per 256."""
    with cuda_bitsandbytes():
        real = state_sizes(load(qwen), embedding_bits=32)
    with fake_run.fake_tensors() as mode, without_weights(materialize), cuda_bitsandbytes():
        model = load(qwen)
        with Recorder(KnownValues(mode).run).recording():
            fake = state_sizes(model, embedding_bits=32)
    assert fake == real
    embedding, gate = VOCABULARY_SIZE * 64, 64 * 192
    assert fake[0] == {"state1": embedding * 4, "state2": embedding * 4}
    scales = {"absmax1": gate // 256 * 4, "absmax2": gate // 256 * 4, "qmap1": 1024, "qmap2": 1024}
    assert {"state1": gate, "state2": gate, **scales} in fake
    with cuda_bitsandbytes():  # bitsandbytes remembers by position which parameters had 32 bits in the last run
        assert state_sizes(load(qwen), embedding_bits=None)[0]["state1"] == embedding
