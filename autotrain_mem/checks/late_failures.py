"""Checks what TRL, transformers and torch take now, and end a training with as it starts or at its first evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotrain_mem.checks.collect import Problems
from autotrain_mem.checks.flags import Flags
from autotrain_mem.methods.configs import OF_WORKERS
from autotrain_mem.methods.interface import method_of
from autotrain_mem.types.methods_table import METHODS


def data_workers(flags: Flags) -> Problems:
    """Some flags need processes that load data (``torch/utils/data/dataloader.py: DataLoader.__init__``)."""
    given = flags.given
    asked = [f"--{name}" for name in OF_WORKERS if given.get(name)]
    if asked and not given.get("dataloader_num_workers"):
        yield (
            f"{', '.join(asked)} {'needs' if len(asked) == 1 else 'need'} processes that load data: torch refuses "
            "it without.",
            f"Give --dataloader_num_workers 2, or remove {', '.join(asked)}.",
        )


def best_model(flags: Flags) -> Problems:
    """Only evaluations find a best model, by a metric that is named (``transformers/trainer.py: _validate_args,
    _determine_best_metric``). PPO, which evaluates nothing, has a refusal of its own (``trainers.ppo_checks``)."""
    given = flags.given
    if _text(given.get("save_strategy")) != "best" or not method_of(flags.method).is_evaluated:
        return
    if not _evaluates(given):
        yield (
            "--save_strategy best without --eval_strategy never finds a best model, and saves none.",
            "Give --eval_strategy steps, or --save_strategy steps.",
        )
    if not given.get("metric_for_best_model"):
        yield (
            "--save_strategy best needs to know best by what: transformers refuses it as the trainer is built.",
            "Give --metric_for_best_model loss.",
        )


def kept_inputs(flags: Flags) -> Problems:
    """``transformers/trainer.py: evaluation_loop`` takes a batch for a mapping; here it is a list of prompts."""
    if flags.given.get("include_for_metrics") and METHODS[flags.method].is_online:
        yield (
            "--include_for_metrics would end the first evaluation: a batch of prompts holds no such inputs.",
            "Remove --include_for_metrics.",
        )


def accelerator(flags: Flags) -> Problems:
    """Two keys of accelerate's config change the batch behind a plan's back."""
    config = _accelerator_config(flags.given.get("accelerator_config"))
    if config.get("split_batches"):  # accelerate/data_loader.py: BatchSamplerShard._iter_with_split
        yield (
            "--accelerator_config split_batches divides --per_device_train_batch_size among the processes, so that a "
            "GPU trains on fewer rows than a plan says.",
            "Remove split_batches; --effective_batch_size says how many rows a step has over all GPUs.",
        )
    if (config.get("gradient_accumulation_kwargs") or {}).get("num_steps") is not None:
        # transformers/trainer.py: create_accelerator_and_postprocess
        yield (
            "--accelerator_config num_steps takes the place of --gradient_accumulation_steps, or is refused beside it.",
            "Remove num_steps, and give --gradient_accumulation_steps.",
        )


def _accelerator_config(value: Any) -> Mapping[str, Any]:
    """A mapping, a text of JSON, or the name of a file that holds one (``transformers/training_args.py:
    __post_init__``); what cannot be read is for TRL to refuse."""
    if isinstance(value, Mapping) or value is None:
        return value or {}
    try:
        text = str(value) if str(value).startswith("{") else Path(str(value)).read_text(encoding="utf-8")
        read = json.loads(text)
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, Mapping) else {}


def evaluation_of_command(flags: Flags) -> Problems:
    """A command, as TRL's scripts do, hands over rows to evaluate on only with a strategy, and no compute_metrics
    (``trl/scripts/sft.py: main``)."""
    given = flags.given
    if not method_of(flags.method).is_evaluated:
        return
    if given.get("eval_on_start") and not _evaluates(given):  # transformers/trainer.py: get_eval_dataloader
        yield (
            "--eval_on_start without --eval_strategy has no rows to evaluate on: it would end as training starts.",
            "Give --eval_strategy steps, or remove --eval_on_start.",
        )
    if given.get("include_for_metrics") and not METHODS[flags.method].is_online:
        yield (
            "--include_for_metrics keeps what compute_metrics reads of a whole evaluation, and a command has no such "
            "function.",
            "Remove --include_for_metrics; a trainer of autotrain_mem's in a script takes compute_metrics.",
        )


def _evaluates(given: Mapping[str, Any]) -> bool:
    return _text(given.get("eval_strategy")) not in ("", "no")


def _text(value: Any) -> str:
    return str(getattr(value, "value", value) or "")
