"""What counts as rehearsed takes effect on the trainer that a rehearsal builds: its parts are looked at, no argument.

The trainer is built around a true tiny model, and not trained. What no part and no trace shows is looked for in a real
run. fp16 trains on a GPU only; here a CPU gets bf16 in its place.
"""

import importlib.util
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from real_run import Folder, births, case, rehearsed
from safetensors.torch import load_file

from autotrain_mem.methods.configs import on_cpu, on_host
from autotrain_mem.methods.interface import method_of
from autotrain_mem.rehearsal.rehearse import trainer_spec
from autotrain_mem.settings.flag_verdicts import Verdict, group_of
from autotrain_mem.support import codec
from autotrain_mem.trainers.finish import finished

pytestmark = pytest.mark.slow

See = Callable[[Any], Any]
Samples = dict[str, tuple[Any, See]]
"""Flag -> its value, and where on a trainer that value is found again."""


def of_adapter(name: str) -> See:
    return lambda trainer: getattr(trainer.model.peft_config["default"], name)


SFT: Samples = {
    "neftune_noise_alpha": (5.0, attrgetter("neftune_noise_alpha")),
    "label_smoothing_factor": (0.25, lambda trainer: trainer.label_smoother.epsilon),
    "loss_type": ("nll", attrgetter("args.loss_type")),
    "pad_to_multiple_of": (16, lambda trainer: trainer.data_collator.pad_to_multiple_of),
    "use_cache": (True, lambda trainer: trainer.model.config.use_cache),
    "accelerator_config": ({"even_batches": False}, lambda trainer: {"even_batches": trainer.accelerator.even_batches}),
    "gradient_checkpointing_kwargs": (
        {"use_reentrant": False, "preserve_rng_state": False},
        attrgetter("args.gradient_checkpointing_kwargs"),
    ),
    "attn_implementation": ("eager", lambda trainer: trainer.model.config._attn_implementation),
}
LORA: Samples = {
    "lora_dropout": (0.25, of_adapter("lora_dropout")),
    "lora_modules_to_save": (["lm_head"], of_adapter("modules_to_save")),
    "lora_target_modules": (["down_proj", "q_proj"], lambda trainer: sorted(of_adapter("target_modules")(trainer))),
}
DPO: Samples = {
    "ld_alpha": (0.5, attrgetter("ld_alpha")),
    "f_divergence_type": ("js_divergence", lambda trainer: str(trainer.f_divergence_type)),
    "sync_ref_model": (True, lambda trainer: "SyncRefModelCallback" in str(trainer.callback_handler.callbacks)),
    "disable_dropout": (True, lambda trainer: "Dropout(p=0.1" not in str(trainer.model)),
}
GRPO: Samples = {
    "top_k": (7, attrgetter("generation_config.top_k")),
    "temperature": (0.5, attrgetter("generation_config.temperature")),
    "generation_kwargs": ({"use_cache": False}, lambda trainer: {"use_cache": trainer.generation_config.use_cache}),
    "num_iterations": (3, attrgetter("num_iterations")),
    "beta": (0.5, lambda trainer: trainer.ref_model is not None and trainer.beta),
    "mask_truncated_completions": (True, attrgetter("mask_truncated_completions")),
    "cast_lm_head_to_fp32": (True, lambda trainer: str(trainer.model.lm_head.weight.dtype) == "torch.float32"),
}
CASES: dict[str, tuple[str, Samples, dict[str, Any]]] = {
    "sft": ("sft", SFT, {}),
    "sft with lora": ("sft", LORA, {"use_peft": True}),
    "dpo": ("dpo", DPO, {}),
    "grpo": ("grpo", GRPO, {"dtype": "bfloat16"}),
}


@pytest.mark.newest
@pytest.mark.parametrize("name", CASES)
def test_the_trainer_of_a_rehearsal_has_what_is_given(name: str, model_folder: Folder, tmp_path: Path) -> None:
    method, samples, knobs = CASES[name]
    given = {flag: value for flag, (value, _) in samples.items()}
    family = "gpt2" if "disable_dropout" in given else "llama"
    one = case(method, model_folder(family), given, **knobs)
    trainer = trainer_spec(one.job, one.knobs, one.length, str(tmp_path)).build()
    for flag, (value, seen) in samples.items():
        assert seen(trainer) == value, flag
        group = group_of(method, flag)
        assert group is not None
        assert group.verdict is Verdict.REHEARSED, flag


@pytest.mark.newest
def test_noise_on_the_embeddings_is_in_the_trace_of_a_rehearsal(qwen: Path) -> None:
    """``transformers/integrations/neftune.py`` draws it anew in each micro-step."""
    folder = qwen
    plain, noisy = (rehearsed(case("sft", folder, given)) for given in ({}, {"neftune_noise_alpha": 5.0}))
    assert len(births(noisy)) > len(births(plain))


TEXTS = [f"{number} and {number + 1} make {2 * number + 1}. " * (2 + number % 2) for number in range(8)]
PAIRS = {"prompt": ["What is 1 + 1?"] * 8, "chosen": [" 2, I think"] * 8, "rejected": [" 3 or 4"] * 8}


def made(method: str, folder: Path, output_dir: Path, given: dict[str, Any] | None = None, **knobs: Any) -> Any:
    """A trainer of two steps, on real text, as autofit trains it."""
    one = case(method, folder, given, **knobs)
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2}
    run = {"output_dir": str(output_dir), "max_steps": 2}
    filled = method_of(method).configs(on_cpu({**quiet, **one.job.arguments, **codec.to_json(one.knobs), **run}))
    rows = Dataset.from_dict({"text": TEXTS} if method == "sft" else PAIRS)
    torch.manual_seed(0)
    return finished(method_of(method).build_trainer(filled, one.job.model, rows, None), one.knobs)


def test_training_on_a_cpu_fp16_becomes_bf16() -> None:
    given = {"fp16": True, "dataloader_num_workers": 2}
    assert on_host(given) == {"fp16": False, "bf16": True, "use_cpu": True, "dataloader_num_workers": 2}


def test_the_reward_head_is_trained_with_the_adapter_and_saved(qwen: Path, tmp_path: Path) -> None:
    trainer = made("reward", qwen, tmp_path, use_peft=True)
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
    ("given", "whole_logits", "fused_attention", "packed"),
    [
        ({"loss_type": "chunked_nll", "attn_implementation": "sdpa"}, False, True, False),
        ({"loss_type": "nll", "attn_implementation": "eager"}, not ALWAYS_CHUNKED, False, False),
        ({}, False, True, True),
    ],
    ids=["as without them", "whole and eager", "packed"],
)
def test_the_loss_the_attention_and_the_rows_are_those_that_are_named(
    given: dict[str, Any], whole_logits: bool, fused_attention: bool, packed: bool, qwen: Path, tmp_path: Path
) -> None:
    """A packed row is one whose documents each start at position zero; a chunked loss never calls the whole head."""
    trainer = made("sft", qwen, tmp_path, given, packing=packed)
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
