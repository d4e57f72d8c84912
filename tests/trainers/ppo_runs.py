"""Tiny PPO runs: four Qwen2 models of two layers, prompts of random tokens."""

import gc
import pathlib
import random
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

from tests.training.tiny_trainers import ARGUMENTS

ROLLOUT = 4
"""Prompts per update: two micro-batches of two."""


def prompts(count: int, **columns: Any) -> Any:
    draw = random.Random(0)
    rows = [[draw.randrange(10, 200) for _ in range(draw.randrange(3, 7))] for _ in range(count)]
    return Dataset.from_dict({"input_ids": rows, **columns})


def config(output_dir: pathlib.Path, **changes: Any) -> Any:
    from autotrain_mem.trainers.ppo_trainer import PPOConfig

    settings = {"gradient_accumulation_steps": 2, "num_ppo_epochs": 1, "num_sample_generations": 0}
    settings |= {"response_length": 4, "stop_token": "eos", "max_steps": 1}
    return PPOConfig(str(output_dir), **ARGUMENTS | settings | changes)


def trainer(folder: pathlib.Path, args: Any, dataset: Any = None, *, use_lora: bool = False, **options: Any) -> Any:
    from autotrain_mem.trainers.ppo_trainer import PPOTrainer

    gc.freeze()  # TRL collects garbage twice per update, and most of a test's time goes into imported modules
    set_seed(0)  # the heads of reward and value model, and the adapter, are drawn
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    build = {
        "processing_class": AutoTokenizer.from_pretrained(folder),
        "model": options.pop("model", None) or AutoModelForCausalLM.from_pretrained(folder),
        "ref_model": None if use_lora else AutoModelForCausalLM.from_pretrained(folder),
        "reward_model": AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1),
        "value_model": AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1),
        "train_dataset": prompts(3 * ROLLOUT) if dataset is None else dataset,
        "peft_config": lora if use_lora else None,
    }
    return PPOTrainer(args=args, **build | options)


def weights(trainer: Any) -> dict[str, Any]:
    """Copies of all trained weights, by name."""
    wrapper = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value.detach().clone() for name, value in wrapper.named_parameters() if value.requires_grad}


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]
