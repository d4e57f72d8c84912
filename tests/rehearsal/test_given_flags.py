"""What counts as rehearsed takes effect on the trainer that a rehearsal builds: its parts are looked at, no argument.

The trainer is built by what a rehearsal builds it by, around a true tiny model, and not trained.
"""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from real_run import Folder, births, case, rehearsed

from autotrain_mem.rehearsal.rehearse import trainer_spec
from autotrain_mem.settings.flag_verdicts import Verdict, group_of

pytestmark = [pytest.mark.newest, pytest.mark.slow]

See = Callable[[Any], Any]
Samples = dict[str, tuple[Any, See]]
"""Flag -> its value, and where on a trainer that value is found again."""


def of_adapter(name: str) -> See:
    return lambda trainer: getattr(trainer.model.peft_config["default"], name)


def dropout(trainer: Any) -> bool:
    import torch

    return all(module.p == 0 for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout))


def syncs(trainer: Any) -> bool:
    return "SyncRefModelCallback" in {type(each).__name__ for each in trainer.callback_handler.callbacks}


SFT: Samples = {
    "neftune_noise_alpha": (5.0, attrgetter("neftune_noise_alpha")),
    "label_smoothing_factor": (0.25, lambda trainer: trainer.label_smoother.epsilon),
    "loss_type": ("nll", attrgetter("args.loss_type")),
    "pad_to_multiple_of": (16, lambda trainer: trainer.data_collator.pad_to_multiple_of),
    "use_cache": (True, lambda trainer: trainer.model.config.use_cache),
    "accelerator_config": ({"even_batches": False}, lambda trainer: {"even_batches": trainer.accelerator.even_batches}),
    "gradient_checkpointing_kwargs": (
        {"use_reentrant": False, "preserve_rng_state": False},
        attrgetter("args.activation_checkpointing_kwargs"),
    ),
    "attn_implementation": ("eager", lambda trainer: trainer.model.config._attn_implementation),
}
LORA: Samples = {
    "lora_dropout": (0.25, of_adapter("lora_dropout")),
    "lora_modules_to_save": (["lm_head"], of_adapter("modules_to_save")),
    "lora_target_modules": (["q_proj", "down_proj"], lambda trainer: [*of_adapter("target_modules")(trainer)]),
}
DPO: Samples = {
    "ld_alpha": (0.5, attrgetter("ld_alpha")),
    "f_divergence_type": ("js_divergence", lambda trainer: str(trainer.f_divergence_type)),
    "sync_ref_model": (True, syncs),
    "disable_dropout": (True, dropout),
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
