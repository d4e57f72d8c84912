"""Levers take effect in a real run that is built as the product builds it, where no trace shows that they do.

That the others change the trace, ``test_rehearse`` says, and ``test_parity`` that a real run is as its rehearsal. fp16
trains on a GPU only; here it is seen that a CPU gets bf16 in its place.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from real_run import Folder, case

from autotrain_mem.methods.configs import on_cpu, on_host
from autotrain_mem.methods.interface import method_of
from autotrain_mem.support import codec
from autotrain_mem.trainers.finish import finished

pytestmark = pytest.mark.slow
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


def test_training_on_a_cpu_fp16_becomes_bf16() -> None:
    given = {"fp16": True, "dataloader_num_workers": 2}
    assert on_host(given) == {"fp16": False, "bf16": True, "use_cpu": True, "dataloader_num_workers": 2}


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
