"""Objects of the user's process in the rehearsal's: the same in everything but the values of their tensors."""

import fnmatch
import functools
import itertools
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from real_run import births, first_difference, rehearsed_by, sft_trainer, trained_by, with_lora
from tiny import tiny_config
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY
from trl import SFTConfig

from autotrain_mem.rehearsal import fake_run
from autotrain_mem.support.errors import UsageError
from autotrain_mem.trainers.model_support import statistics
from autotrain_mem.trainers.pickle_without_tensors import pack, unpack
from tests.forked import Forge


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family))


def quantized(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=None, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**options)
    )


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """By all their names: of one that is tied, each."""
    named = (each(remove_duplicate=False) for each in (model.named_parameters, model.named_buffers))
    return dict(itertools.chain(*named, statistics(model)))


def facts(model: Any) -> dict[str, tuple[Any, ...]]:
    """All that memory depends on, with the first name of the same tensor, and of the same storage."""
    first: dict[Any, str] = {}
    return {
        name: (
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter),
            tensor.untyped_storage().nbytes(),
            first.setdefault(id(tensor), name),
            first.setdefault(tensor.untyped_storage()._cdata, name),
        )
        for name, tensor in tensors(model).items()
    }


class Gate(torch.nn.Module):
    """A layer of the user's own, with a buffer that is not saved."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.gate = torch.nn.Parameter(torch.zeros(64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.scale = torch.full((7,), 2.0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * self.gate.tanh()


def gated() -> Any:
    model = model_of("llama")
    model.model.layers[1].mlp = Gate(model.model.layers[1].mlp)
    return model


def half_frozen() -> Any:
    model = model_of("gpt2").to(torch.bfloat16).eval()
    model.transformer.wte.requires_grad_(False)
    return model


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
FP4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "bfloat16"}
MODELS: dict[str, Callable[[Path], Any]] = {
    "gemma3": lambda _: model_of("gemma3"),
    "gpt2": lambda _: model_of("gpt2"),
    "lora": lambda _: with_lora(model_of("qwen3"), modules_to_save=["lm_head"]),
    "a layer of the user's own": lambda _: gated(),
    "half frozen, bfloat16, evaluating": lambda _: half_frozen(),
    "nf4": lambda folder: with_lora(quantized(folder, **NF4)),
    "fp4": lambda folder: with_lora(quantized(folder, **FP4)),
    "int8": lambda folder: with_lora(quantized(folder, load_in_8bit=True)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_the_same_in_all_but_its_values(kind: str, qwen: Path) -> None:
    model = MODELS[kind](qwen)
    model.hf_device_map = {"": 0}
    packed = pack(model)
    assert model.hf_device_map == {"": 0}
    with patch.dict(_CAN_RECORD_REGISTRY, clear=True), fake_run.fake_tensors():
        fake = unpack(packed)
        made = [module for module in fake.modules() if isinstance(module, PreTrainedModel)]
        assert all(_CAN_RECORD_REGISTRY.get(each) for each in made if each._can_record_outputs)
    for copied in (unpack(packed), fake):
        assert not hasattr(copied, "hf_device_map"), "where the model was placed is left out"
        assert facts(copied) == facts(model)
        assert [type(module) for module in copied.modules()] == [type(module) for module in model.modules()]
        assert [module.training for module in copied.modules()] == [module.training for module in model.modules()]
    assert {tensor.device.type for tensor in tensors(unpack(packed)).values()} == {"meta"}
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors(fake).values())
    assert len({id(module.config) for module in fake.modules() if hasattr(module, "config")}) == 1


def test_an_8bit_layer_that_has_run_still_holds_its_weight_once(qwen: Path) -> None:
    model = quantized(qwen, load_in_8bit=True)
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.int64))
    packed = pack(model)
    with fake_run.fake_tensors():
        layer = unpack(packed).model.layers[0].mlp.up_proj
    assert layer.weight.CB is None
    assert layer.state.CB.untyped_storage()._cdata == layer.weight.untyped_storage()._cdata


def test_no_value_of_a_tensor_is_packed() -> None:
    model = gated()
    before = pack(model)
    with torch.no_grad():
        for tensor in (*tensors(model).values(), model.model.layers[1].mlp.scale):
            tensor.fill_(13)
    assert pack(model) == before


def test_a_view_that_repeats_few_bytes_is_told_with_all_that_it_would_take_on_a_gpu() -> None:
    virtual = torch.empty(1).expand(1 << 28)
    packed = pack(virtual)
    assert len(packed) < 10_000
    assert unpack(packed).untyped_storage().nbytes() == 1 << 30


SCRIPT = """
    from __future__ import annotations

    import sys
    import threading
    from dataclasses import dataclass, field

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig

    import beside
    from autotrain_mem.trainers.pickle_without_tensors import pack

    folder, out = sys.argv[1:]
    WEIGHTS = torch.ones(3)

    class MyModelConfig(Qwen2Config):
        pass


    class MyModel(Qwen2ForCausalLM):
        config: MyModelConfig
        config_class = MyModelConfig

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)


    def weighted(outputs, labels, num_items_in_batch=None):
        return outputs.logits.float().mean() * WEIGHTS.sum()


    @dataclass
    class MyConfig(SFTConfig):
        scales: list[int] = field(default_factory=lambda: [4])


    handed = {
        "model": MyModel.from_pretrained(folder, dtype=torch.bfloat16),
        "args": MyConfig(output_dir=out + ".d", use_cpu=True, report_to="none", save_strategy="no", max_steps=2),
        "train_dataset": Dataset.from_list([{"input_ids": [5] * 48}] * 8),
        "processing_class": AutoTokenizer.from_pretrained(folder),
        "compute_loss_func": weighted,
        "callback": beside.Callback(),
        "module": beside,
        "locks": [threading.Lock(), threading.RLock()],
    }
    with open(out, "wb") as file:
        file.write(pack(handed))
"""

BESIDE = """
    import threading

    LOCK = threading.local()  # cannot be pickled: a module of the user's own goes by reference

    class Callback:
        steps = 3
"""


def test_what_a_script_defines_itself_arrives_with_what_it_uses(
    qwen: Path, tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module beside the script is one that this process does not know."""
    script, packed = tmp_path / "train.py", tmp_path / "packed"
    script.write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "beside.py").write_text(textwrap.dedent(BESIDE))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with forge.commands(sys.modules[__name__]):
        command = [sys.executable, str(script), str(qwen), str(packed)]
        done = subprocess.run(command, env=environment, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    there = unpack(packed.read_bytes())
    assert type(there["model"]).__qualname__ == "MyModel"
    assert isinstance(there["args"], SFTConfig)
    assert (there["args"].max_steps, there["args"].scales) == (2, [4])
    assert there["train_dataset"][0]["input_ids"] == [5] * 48
    assert there["processing_class"]("2+2").input_ids
    assert there["compute_loss_func"].__globals__["WEIGHTS"].device.type == "meta"
    assert type(there["callback"]) is sys.modules["beside"].Callback
    assert there["module"] is sys.modules["beside"]
    assert all(lock.acquire(timeout=1) for lock in there["locks"])


def test_what_cannot_be_sent_is_named_with_the_argument_that_holds_it() -> None:
    parts = {"model": torch.ones(3), "callbacks": [Gate(None), (line for line in ())]}
    with pytest.raises(UsageError, match=r"callbacks cannot be sent .*: cannot pickle 'generator' object"):
        pack([parts], parts)
    silent = type("Silent", (), {"__reduce__": Mock(side_effect=AssertionError)})()
    with pytest.raises(UsageError, match="The call cannot be sent to the process that rehearses: AssertionError"):
        pack(silent)


def test_a_generator_of_random_numbers_and_a_device_arrive_as_the_cpus_and_optimizers_as_torchs_own() -> None:
    adamw = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    doubled = functools.cache(lambda number: 2 * number)
    sent = [torch.Generator(), torch.device("cuda:1"), adamw, (torch.optim.SGD, {"lr": 1}), weakref.ref(adamw), doubled]
    generator, device, optimizer, rest, reference, function = unpack(pack(sent))
    assert (type(generator), type(optimizer)) == (torch.Generator, torch.optim.AdamW)
    assert (device, rest) == (torch.device("cpu"), (torch.optim.SGD, {"lr": 1}))
    assert (reference(), function(4)) == (optimizer, 8)
    assert unpack(pack(fnmatch._compile_pattern)) is fnmatch._compile_pattern, "a module has it"
    assert unpack(pack(weakref.ref(set())))() is None


def trained_before(output_dir: Path) -> Any:
    model = gated()
    trained_by(lambda: sft_trainer(model, output_dir))
    return model


CASES: dict[str, Callable[[Path, Path], Any]] = {
    "lora in bfloat16": lambda *_: with_lora(model_of("qwen3").to(torch.bfloat16)),
    "lora on 4 bits": lambda folder, _: with_lora(quantized(folder, load_in_4bit=True, bnb_4bit_use_double_quant=True)),
    "lora on 8 bits": lambda folder, _: with_lora(quantized(folder, load_in_8bit=True)),
    "trained before": lambda _, output_dir: trained_before(output_dir),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_object_trains_as_it_was_rehearsed(case: str, qwen: Path, tmp_path: Path) -> None:
    model = CASES[case](qwen, tmp_path)
    packed = pack(model)
    fake = rehearsed_by(lambda: sft_trainer(unpack(packed), tmp_path))
    real = trained_by(lambda: sft_trainer(model, tmp_path))
    assert len(births(real)) > 100
    assert not first_difference(fake, real)
