"""What counts as rehearsed takes effect on the trainer that a rehearsal builds: its parts are looked at, no argument.

The trainer is built by what a rehearsal builds it by, around a true tiny model, and not trained.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_run import births, case, rehearsed

from autotrain_mem.rehearsal.rehearse import trainer_spec
from autotrain_mem.settings.flag_verdicts import Verdict, group_of

pytestmark = [pytest.mark.newest, pytest.mark.slow]

Folder = Callable[[str], Path]
See = Callable[[Any], Any]
Samples = dict[str, tuple[Any, See]]
"""Flag -> its value, and where on a trainer that value is found again."""


def of_generation(name: str) -> See:
    return lambda trainer: getattr(trainer.generation_config, name)


def of_args(name: str) -> See:
    return lambda trainer: getattr(trainer.args, name)


def of_trainer(name: str) -> See:
    return lambda trainer: getattr(trainer, name)


def of_adapter(name: str) -> See:
    return lambda trainer: getattr(trainer.model.peft_config["default"], name)


def dropout(trainer: Any) -> bool:
    import torch

    return all(module.p == 0 for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout))


def syncs(trainer: Any) -> bool:
    return "SyncRefModelCallback" in {type(each).__name__ for each in trainer.callback_handler.callbacks}


SFT: Samples = {
    "neftune_noise_alpha": (5.0, of_trainer("neftune_noise_alpha")),
    "label_smoothing_factor": (0.25, lambda trainer: trainer.label_smoother.epsilon),
    "loss_type": ("nll", of_args("loss_type")),
    "pad_to_multiple_of": (16, lambda trainer: trainer.data_collator.pad_to_multiple_of),
    "use_cache": (True, lambda trainer: trainer.model.config.use_cache),
    "accelerator_config": ({"even_batches": False}, lambda trainer: {"even_batches": trainer.accelerator.even_batches}),
    "max_grad_norm": (0.5, of_args("max_grad_norm")),
    "optim_args": ("weight_decay=0.5", of_args("optim_args")),
    "torch_empty_cache_steps": (3, of_args("torch_empty_cache_steps")),
    "eval_accumulation_steps": (3, of_args("eval_accumulation_steps")),
    "gradient_checkpointing_kwargs": (
        {"use_reentrant": False, "preserve_rng_state": False},
        of_args("activation_checkpointing_kwargs"),
    ),
    "ddp_bucket_cap_mb": (7, of_args("ddp_bucket_cap_mb")),
    "attn_implementation": ("eager", lambda trainer: trainer.model.config._attn_implementation),
}
LORA: Samples = {
    "lora_dropout": (0.25, of_adapter("lora_dropout")),
    "lora_modules_to_save": (["lm_head"], of_adapter("modules_to_save")),
    "use_dora": (True, of_adapter("use_dora")),
    "use_rslora": (True, of_adapter("use_rslora")),
    "lora_target_modules": (["q_proj", "down_proj"], lambda trainer: [*of_adapter("target_modules")(trainer)]),
}
DPO: Samples = {
    "ld_alpha": (0.5, of_trainer("ld_alpha")),
    "label_smoothing": (0.25, of_trainer("label_smoothing")),
    "use_weighting": (True, of_trainer("use_weighting")),
    "f_divergence_type": ("js_divergence", lambda trainer: str(trainer.f_divergence_type)),
    "sync_ref_model": (True, syncs),
    "disable_dropout": (True, dropout),
}
GRPO: Samples = {
    "top_p": (0.5, of_generation("top_p")),
    "top_k": (7, of_generation("top_k")),
    "min_p": (0.25, of_generation("min_p")),
    "repetition_penalty": (1.5, of_generation("repetition_penalty")),
    "temperature": (0.5, of_generation("temperature")),
    "generation_kwargs": ({"use_cache": False}, lambda trainer: {"use_cache": trainer.generation_config.use_cache}),
    "num_iterations": (3, of_trainer("num_iterations")),
    "beta": (0.5, lambda trainer: trainer.ref_model is not None and trainer.beta),
    "delta": (2.0, of_args("delta")),
    "top_entropy_quantile": (0.5, of_trainer("top_entropy_quantile")),
    "off_policy_mask_threshold": (0.5, of_trainer("off_policy_mask_threshold")),
    "importance_sampling_level": ("sequence", of_trainer("importance_sampling_level")),
    "mask_truncated_completions": (True, of_trainer("mask_truncated_completions")),
    "cast_lm_head_to_fp32": (True, lambda trainer: str(trainer.model.lm_head.weight.dtype) == "torch.float32"),
}
CASES: dict[str, tuple[str, Samples, dict[str, Any]]] = {
    "sft": ("sft", SFT, {}),
    "sft with lora": ("sft", LORA, {"use_peft": True}),
    "dpo": ("dpo", DPO, {}),
    "grpo": ("grpo", GRPO, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_of_a_rehearsal_has_what_is_given(name: str, model_folder: Folder, tmp_path: Path) -> None:
    method, samples, knobs = CASES[name]
    given = {flag: value for flag, (value, _) in samples.items()}
    family = "gpt2" if "disable_dropout" in given else "llama"
    one = case(method, model_folder(family), given, **knobs)
    trainer = trainer_spec(one.job, one.knobs, one.length, str(tmp_path)).build()
    for flag, (value, seen) in samples.items():
        found = seen(trainer)
        assert (sorted(found) if isinstance(found, list) else found) == (
            sorted(value) if isinstance(value, list) else value
        ), flag
        group = group_of(method, flag)
        assert group is not None
        assert group.verdict is Verdict.REHEARSED, flag


def test_noise_on_the_embeddings_is_in_the_trace_of_a_rehearsal(model_folder: Folder) -> None:
    """``transformers/integrations/neftune.py`` draws it anew in each micro-step."""
    folder = model_folder("qwen2")
    plain, noisy = (rehearsed(case("sft", folder, given)) for given in ({}, {"neftune_noise_alpha": 5.0}))
    assert len(births(noisy)) > len(births(plain))
