"""Every lever takes effect in a real run that is built as the product builds it: what is there is looked at, no flag.

Activation offloading and the optimizer on the host: ``test_host`` and ``tests/trainers/test_host_optimizer``;
attention's kernels: ``test_attention``. fp16 trains on a GPU only; here it is seen that a CPU gets bf16 in its place.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from real_run import case

from autotrain_mem.methods.configs import on_cpu, on_host
from autotrain_mem.methods.interface import method_of
from autotrain_mem.support import codec
from autotrain_mem.trainers.finish import finished

pytestmark = pytest.mark.slow

Folder = Callable[[str], Path]
Make = Callable[..., Any]

TEXTS = [f"{number} and {number + 1} make {2 * number + 1}. " * (2 + number % 2) for number in range(8)]
PAIRS = {"prompt": ["What is 1 + 1?"] * 8, "chosen": [" 2, I think"] * 8, "rejected": [" 3 or 4"] * 8}


@pytest.fixture
def make(model_folder: Folder, tmp_path: Path) -> Make:
    """``make("sft", use_peft=True, lora_r=4)``: a trainer of two steps, on real text, as autofit trains it."""

    def made(method: str = "sft", family: str = "qwen2", **settings: Any) -> Any:
        from datasets import Dataset

        chosen = {name: value for name, value in settings.items() if name in _KNOBS}
        given = {name: value for name, value in settings.items() if name not in _KNOBS}
        one = case(method, model_folder(family), given, **chosen)
        quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2}
        run = {"output_dir": str(tmp_path), "max_steps": 2}
        filled = method_of(method).configs(on_cpu({**quiet, **one.job.arguments, **codec.to_json(one.knobs), **run}))
        rows = Dataset.from_dict({"text": TEXTS} if method == "sft" else PAIRS)
        torch.manual_seed(0)
        return finished(method_of(one.job.method).build_trainer(filled, one.job.model, rows, None), one.knobs)

    return made


_KNOBS = frozenset(codec.to_json(case("sft", "").knobs))


def linears(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.parametrize(("nested", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_4_bit_weights_are_packed_and_scaled_and_stay_as_they_are(nested: bool, dtype: str, make: Make) -> None:
    import bitsandbytes

    trainer = make(use_peft=True, load_in_4bit=True, use_bnb_nested_quant=nested, dtype=dtype)
    layers = [layer for layer in linears(trainer.model) if isinstance(layer, bitsandbytes.nn.Linear4bit)]
    before = [layer.weight.detach().clone() for layer in layers]
    trainer.train()
    assert len(layers) == 2 * 7, "all linear layers of two decoder layers"
    for layer, weight in zip(layers, before, strict=True):
        assert layer.compute_dtype is getattr(torch, dtype)
        assert layer.weight.dtype is torch.uint8
        assert layer.weight.numel() == layer.in_features * layer.out_features // 2
        assert layer.weight.quant_state.quant_type == "nf4"
        assert (layer.weight.quant_state.state2 is not None) is nested
        assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize(("bf16", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_mixed_precision_is_what_the_layers_answer_in(bf16: bool, expected: torch.dtype, make: Make) -> None:
    trainer = make(bf16=bf16)
    seen = set()
    trainer.model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *call: seen.add(call[-1].dtype))
    trainer.train()
    assert seen == {expected}


def test_training_on_a_cpu_fp16_becomes_bf16() -> None:
    given = {"fp16": True, "dataloader_num_workers": 2}
    assert on_host(given) == {"fp16": False, "bf16": True, "use_cpu": True, "dataloader_num_workers": 2}


def test_lora_adapts_the_given_modules_with_the_given_rank_and_changes_nothing_else(make: Make) -> None:
    trainer = make(use_peft=True, lora_r=4, lora_target_modules=["q_proj", "down_proj"])
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    adapted = {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name in before if "lora_A" in name}
    assert adapted == {"q_proj", "down_proj"}
    assert {value.shape[0] for name, value in before.items() if "lora_A" in name} == {4}


def test_the_reward_head_is_trained_with_the_adapter_and_saved(make: Make, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = make("reward", use_peft=True)
    trainer.train()
    head = trainer.model.base_model.model.score
    trained = head.modules_to_save["default"].weight
    assert not torch.equal(trained, head.original_module.weight)
    trainer.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    (name,) = (name for name in saved if "score" in name)
    assert torch.equal(saved[name], trained)


@pytest.mark.parametrize(("checkpointing", "calls"), [(True, 2), (False, 1)])
def test_gradient_checkpointing_runs_each_layer_again_in_the_backward_pass(
    checkpointing: bool, calls: int, make: Make
) -> None:
    trainer = make(gradient_checkpointing=checkpointing)
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    trainer.model.model.layers[0].mlp.register_forward_pre_hook(counted)
    trainer.train()
    micro_steps = 2 * 2
    assert count == calls * micro_steps


ALWAYS_CHUNKED = importlib.util.find_spec("trl.kernels") is not None
"""Since TRL 1.16 the loss "nll" is chunked too."""


@pytest.mark.parametrize(
    ("settings", "whole_logits", "fused_attention", "packed"),
    [
        ({"loss_type": "chunked_nll", "attn_implementation": "sdpa", "packing": False}, False, True, False),
        ({"loss_type": "nll", "attn_implementation": "eager"}, not ALWAYS_CHUNKED, False, False),
        ({"packing": True}, False, True, True),
    ],
    ids=["as without them", "whole and eager", "packed"],
)
def test_the_loss_the_attention_and_the_rows_are_those_that_are_named(
    settings: dict[str, Any], whole_logits: bool, fused_attention: bool, packed: bool, make: Make
) -> None:
    """A packed row is one whose documents each start at position zero; a chunked loss never calls the whole head."""
    trainer = make(**settings)
    calls: list[dict[str, Any]] = []
    logits: list[torch.Tensor] = []
    trainer.model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    trainer.model.lm_head.register_forward_hook(lambda *call: logits.append(call[-1]))
    functional = torch.nn.functional
    attend = functional.scaled_dot_product_attention
    with patch.object(functional, "scaled_dot_product_attention", side_effect=attend) as attention:
        trainer.train()
    assert bool(logits) is whole_logits
    assert attention.called is fused_attention
    assert {len(call["input_ids"]) for call in calls} == {1 if packed else 2}
    starts = [(call["position_ids"] == 0).sum().item() for call in calls if call.get("position_ids") is not None]
    assert (max(starts, default=0) > 1) is packed
