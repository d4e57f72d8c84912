"""Checks that LoRA finds the modules that it is to adapt, in the model that the trainer will build."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import Any

from autotrain_mem.checks.collect import Problems
from autotrain_mem.checks.model import model_without_weights
from autotrain_mem.checks.preflight import Setup
from autotrain_mem.methods.configs import has_experts, peft_config, trusts_remote_code
from autotrain_mem.types import Job
from autotrain_mem.types.preflight import Finding

NAMED_AT_MOST = 12
"""Kinds of modules that an error lists; a transformer layer has seven."""


def unmatched_targets(setup: Setup) -> Problems:
    """Yields an error when ``--lora_target_modules`` matches nothing, a warning for names of a list that match nothing.

    A mixture of experts is passed over where a name may be that of fused experts, which PEFT adapts as parameters.
    """
    job, filled, config = setup.job, setup.filled, setup.config
    if job.python_call is not None:
        return  # PEFT looks at the script's own config, and at its model
    asked = filled.model.lora_target_modules if job.arguments.get("use_peft") else None
    if not asked:
        return
    if asked == "all-linear" or has_experts(config):
        return
    layers = _adaptable(job)
    lora = peft_config(filled.model, job.model, own=filled.adapter, trust_remote_code=trusts_remote_code(filled))
    names = [asked] if isinstance(asked, str) else list(asked)  # a regular expression is one name
    missing = [name for name in names if not _matches(lora, name, list(layers))]
    if not missing:
        return
    none = len(missing) == len(names)
    yield Finding(
        kind="error" if none else "warning",
        message=f"--lora_target_modules {' '.join(missing)} {'match' if len(missing) > 1 else 'matches'} no module of "
        f"{job.model}{'' if none else ', and only the others are adapted'}.",
        cure=_cure(missing, _last_names(layers)),
    )


def _cure(missing: Sequence[str], names: Sequence[str]) -> str:
    """PEFT reads a single name as a regular expression for a module's whole name (``trl/trainer/model_config.py:
    __post_init__`` makes a text of a list of one)."""
    *first, last = names
    some = f"Give some of {', '.join(first)} and {last}, two at least; all-linear takes them all."
    if len(missing) == 1 and missing[0] in names:
        return f"Give '.*{missing[0]}': a single name is a regular expression for a module's whole name.\n{some}"
    return some


def _matches(lora: Any, name: str, layers: list[str]) -> bool:
    """Asks PEFT's own rule."""
    from peft.tuners.tuners_utils import check_target_module_exists

    one = copy(lora)
    one.target_modules = name if isinstance(lora.target_modules, str) else {name}
    return any(check_target_module_exists(one, layer) for layer in layers)  # what is excluded is an object, and false


def _adaptable(job: Job) -> dict[str, Any]:
    """Layers that LoRA has a form for (``peft/tuners/lora/model.py: _create_new_module``), by their names."""
    import torch
    from transformers.pytorch_utils import Conv1D

    model = model_without_weights(job)
    kinds = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, Conv1D)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _last_names(layers: dict[str, Any]) -> list[str]:
    """``["q_proj", "k_proj", ...]``: what repeats in every layer; of a model of one layer, all but the embeddings."""
    import torch

    names = Counter(name.split(".")[-1] for name, layer in layers.items() if not isinstance(layer, torch.nn.Embedding))
    often = [name for name, times in names.items() if times > 1] or list(names)
    return often[:NAMED_AT_MOST]
