"""Checks arguments with TRL's own dataclasses, and for values that fail at the start or at the first evaluation."""

import contextlib
import copy
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotrain_mem.checks.flag_checks import Flags
from autotrain_mem.methods.configs import OF_WORKERS, on_cpu, read_config, undivided
from autotrain_mem.methods.interface import method_of
from autotrain_mem.settings.adapter_config import PEFT_CONFIG
from autotrain_mem.settings.words import words_of
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import METHODS, Problems


def data_workers(flags: Flags) -> Problems:
    """Refuses flags that need data loader workers if there are none."""
    given = flags.given
    asked = [f"--{name}" for name in OF_WORKERS if given.get(name)]
    if asked and not given.get("dataloader_num_workers"):
        yield (
            f"{', '.join(asked)} {'needs' if len(asked) == 1 else 'need'} data loader workers.",
            f"Give --dataloader_num_workers 2, or remove {', '.join(asked)}.",
        )


def best_model(flags: Flags) -> Problems:
    """Refuses saving the best model without evaluations or a named metric (``transformers/trainer.py: _validate_args,
    _determine_best_metric``). ``trainers.ppo_checks`` refuses it for PPO."""
    given = flags.given
    if _text(given.get("save_strategy")) != "best" or not method_of(flags.method).is_evaluated:
        return
    if not _evaluates(given):
        yield (
            "--save_strategy best without --eval_strategy never saves a model.",
            "Give --eval_strategy steps, or --save_strategy steps.",
        )
    if not given.get("metric_for_best_model"):
        yield "--save_strategy best needs --metric_for_best_model.", "Give --metric_for_best_model loss."


def kept_inputs(flags: Flags) -> Problems:
    """Refuses ``--include_for_metrics`` for batches of prompts: ``transformers/trainer.py: evaluation_loop`` fails."""
    if flags.given.get("include_for_metrics") and METHODS[flags.method].is_online:
        yield (
            "--include_for_metrics would fail at the first evaluation: it reads inputs that prompts lack.",
            "Remove --include_for_metrics.",
        )


def accelerator(flags: Flags) -> Problems:
    """Refuses keys of accelerate's config that change the planned batch or cannot join prompts."""
    if isinstance(config := flags.given.get("accelerator_config"), str):
        # JSON or a file's path (``transformers/training_args.py: __post_init__``); TRL refuses an unreadable one.
        with contextlib.suppress(OSError, ValueError):
            config = json.loads(config if config.startswith("{") else Path(config).read_text(encoding="utf-8"))
    if not isinstance(config, Mapping):
        return
    if config.get("split_batches"):  # accelerate/data_loader.py: BatchSamplerShard._iter_with_split
        yield (
            "--accelerator_config split_batches divides --per_device_train_batch_size among the processes: each GPU "
            "would train on fewer rows than planned.",
            "Remove split_batches; --effective_batch_size is the number of rows of a step over all GPUs.",
        )
    if config.get("dispatch_batches") and "num_generations" in METHODS[flags.method].knobs:
        # accelerate/data_loader.py: DataLoaderDispatcher._fetch_batches
        yield (
            "--accelerator_config dispatch_batches would fail at the first batch: accelerate cannot join prompts, "
            "which are text.",
            "Remove it. Iterable datasets require `dispatch_batches=False`, and TRL sets that itself.",
        )
    if (config.get("gradient_accumulation_kwargs") or {}).get("num_steps") is not None:
        # transformers/trainer.py: create_accelerator_and_postprocess
        yield (
            "--accelerator_config num_steps overrides --gradient_accumulation_steps.",
            "Remove num_steps, and give --gradient_accumulation_steps.",
        )


def evaluation_of_command(flags: Flags) -> Problems:
    """Refuses evaluation that a command cannot do: like TRL's scripts, it passes evaluation rows only with
    ``--eval_strategy``, and never compute_metrics (``trl/scripts/sft.py: main``)."""
    given = flags.given
    if not method_of(flags.method).is_evaluated:
        return
    if given.get("eval_on_start") and not _evaluates(given):  # transformers/trainer.py: get_eval_dataloader
        yield (
            "--eval_on_start without --eval_strategy has no rows to evaluate, and would fail.",
            "Give --eval_strategy steps, or remove --eval_on_start.",
        )
    if given.get("include_for_metrics") and not METHODS[flags.method].is_online:
        yield (
            "--include_for_metrics needs compute_metrics, which a command does not have.",
            "Remove --include_for_metrics; a trainer of autotrain_mem in a script takes compute_metrics.",
        )


def _evaluates(given: Mapping[str, Any]) -> bool:
    return _text(given.get("eval_strategy")) not in ("", "no")


def _text(value: Any) -> str:
    return str(getattr(value, "value", value) or "")


def accepted_by_trl(flags: Flags) -> None:
    """Raises UsageError if TRL's dataclasses refuse the arguments, except for what the planner checks."""
    try:
        filled = _filled(flags)
    except (ValueError, TypeError, ImportError, OSError) as error:
        reason, hint = str(error).strip().rstrip("."), f"See autofit {flags.method} --help for the allowed values."
        raise UsageError(f"TRL refuses these arguments: {reason}.", hint=hint) from error
    if (absent := method_of(flags.method).missing(flags.given.get, to_train=False)) is not None:
        raise absent
    method_of(flags.method).check(filled)


def accepted_by_peft(flags: Flags) -> None:
    """Raises UsageError if PEFT refuses the given PEFT config."""
    if flags.given.get(PEFT_CONFIG) is None:
        return
    try:
        read_config(flags.given[PEFT_CONFIG], _filled(flags).model.lora_task_type)
    except (ValueError, TypeError, ImportError, KeyError) as error:
        reason = str(error).strip().rstrip(".")
        raise UsageError(
            f"PEFT refuses this --{PEFT_CONFIG}: {reason}.",
            hint="See the class of its peft_type in PEFT's documentation for its arguments.",
        ) from error


def _filled(flags: Flags) -> Any:
    values = copy.deepcopy(undivided(flags.given))
    return method_of(flags.method).configs({**on_cpu(values), "report_to": "none"})


def tracker_names(flags: Flags) -> Problems:
    """Refuses trackers that transformers does not support."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    known = ["none", "all", *sorted(INTEGRATION_TO_CALLBACK)]
    for name in words_of(flags.given.get("report_to")):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"Did you mean {near[0]}? " if near else ""
            yield f"--report_to {name}: transformers has no such tracker.", f"{meant}It has {', '.join(known)}."


def label_smoothing(flags: Flags) -> Problems:
    """Refuses label smoothing with the chunked loss of TRL 1.12: transformers then withholds the labels, which the loss
    counts (``trl/trainer/sft_trainer.py: compute_loss``, ``num_valid_tokens``). Later versions compute all logits."""
    if flags.given.get("label_smoothing_factor") and METHODS[flags.method].has_chunked_loss:
        loss_type = getattr(_filled(flags).training, "loss_type", None)
        if loss_type in (None, "chunked_nll") and not flags.given.get("use_liger_kernel"):
            yield (
                "--label_smoothing_factor does not work with this TRL's chunked loss: the first step would fail.",
                "Give --loss_type nll, which computes all logits at once, or remove --label_smoothing_factor.",
            )
