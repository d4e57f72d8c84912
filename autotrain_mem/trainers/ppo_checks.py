"""Rejects settings that PPO cannot apply, and checks that the other settings took effect."""

from collections.abc import Iterator
from typing import Any

from autotrain_mem.support.errors import DatasetFormatError, EmptyDatasetError, TrainingError
from autotrain_mem.types.findings import Finding, settle

SHARDING = ("deepspeed", "fsdp", "parallelism_config")
"""The arguments that TRL's PPOTrainer accepts but never passes to its accelerator (``ppo_trainer.py: __init__``)."""


def refuse(args: Any, tokenizer: Any, *datasets: Any) -> None:
    """Raises UsageError for all :func:`problems`, and DatasetFormatError if the prompts are not tokenized."""
    settle(Finding(kind="error", message=message, cure=cure) for message, cure in problems(args, tokenizer))
    for dataset in datasets:
        if dataset is not None and len(dataset) and "input_ids" not in dataset[0]:
            names = ", ".join(sorted(dataset[0]))
            raise DatasetFormatError(
                f"PPO needs tokenized prompts in a column 'input_ids'; the rows have {names}.",
                hint="Tokenize the prompts first: dataset.map(lambda row: "
                '{"input_ids": tokenizer(row["prompt"]).input_ids}).',
            )


def problems(args: Any, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yields a message and its cure for each setting that PPO would ignore or misapply."""
    for name in SHARDING:
        if getattr(args, name, None):
            yield (
                f"PPO cannot be sharded, and --{name} would be ignored.",
                "Remove the flag; with several GPUs, each holds all four models. LoRA needs less memory: --use_peft.",
            )
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy not in ("no", "steps"):
        yield (
            f"PPO counts no epochs and determines no best step, so --save_strategy {strategy} would never save.",
            "Give --save_strategy steps with --save_steps N, or --save_strategy no.",
        )
    hint = "Give the tokenizer a padding token that no text uses, and save it with the model."
    if tokenizer.pad_token_id is None:
        yield "PPO needs a tokenizer with a padding token.", hint
    elif tokenizer.pad_token_id == tokenizer.eos_token_id:
        yield (
            f"The padding token is the end token ({tokenizer.pad_token!r}, id {tokenizer.pad_token_id}): PPO finds "
            "padding by its id, and would mask the end of every response, where it reads the score.",
            hint,
        )


def verify(trainer: Any) -> None:
    """Checks that the settings of the trainer's config took effect. Raises TrainingError if a setting did not take
    effect, and EmptyDatasetError if there are too few prompts for one rollout, so that TRL's loop would wait forever.
    """
    if broken := [*_broken_promises(trainer)]:
        raise TrainingError(
            f"PPO cannot do what its config says: {'; '.join(broken)}.",
            hint="This call has trained nothing. Remove the flag, or do not replace parts of the built trainer.",
        )
    if len(trainer.dataloader) == 0:
        raise EmptyDatasetError(
            f"{len(trainer.train_dataset)} prompts do not fill one rollout, which takes {trainer.args.batch_size}.",
            hint="Give more prompts, or a smaller --per_device_train_batch_size or --gradient_accumulation_steps.",
        )


def _broken_promises(trainer: Any) -> Iterator[str]:
    args, accelerator, wanted = trainer.args, trainer.accelerator, trainer.args.mixed_precision
    on = accelerator.native_amp if wanted != "no" else True  # accelerate silently drops fp16 on a CPU
    if accelerator.mixed_precision != wanted or not on:
        actual = accelerator.mixed_precision if accelerator.native_amp else "none"
        yield f"mixed precision should be {wanted} and is {actual} on {accelerator.device.type}"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        yield "the launcher sets DeepSpeed or FSDP, with which this trainer cannot save"
    for name, model in (("policy", trainer.policy_model), ("value model", trainer.value_model)):
        recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        if args.activation_checkpointing and not recomputes:
            yield f"gradient checkpointing is off in the {name}"
    if args.max_grad_norm and "step" not in vars(trainer.optimizer):
        yield f"gradients would not be clipped to {args.max_grad_norm}"
    if 0 < args.max_steps < args.num_total_batches:
        yield f"{args.num_total_batches} updates are planned, but max_steps is {args.max_steps}"
    if accelerator.gradient_state.sync_with_dataloader:
        yield "gradients would not be accumulated over the last prompts of the data"
