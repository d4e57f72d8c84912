"""What cannot go together: a job's arguments with its model, with the card, and with the installed TRL."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autotrain_mem.checks.model import check_reward_model
from autotrain_mem.errors import MissingExtraError, UnsupportedModelError, UsageError
from autotrain_mem.spec import Job


def check_compatible(job: Job, config: Any, compute_capability: tuple[int, int]) -> None:
    """Refuse before minutes of planning what would fail, or be mispredicted, in every rehearsal.

    Raises:
        UsageError: kernels that do not run on this card or with this dtype, or are not rehearsed.
        UnsupportedModelError: a model that is quantized already, in a way that is not rehearsed or twice.
        ModelError: a reward model that is not there, or cannot judge.
    """
    check_reward_model(job)
    _check_quantization(job, config)
    _check_attention(job, config, compute_capability)
    if job.arguments.get("use_liger_kernel"):
        _check_liger(job, config)


_PACKAGES = {"use_liger_kernel": ("liger_kernel", "pip install 'autotrain_mem[liger]'")}
"""Argument -> the package that it needs to train, though not to be rehearsed, and how to install it."""


def check_installed(given: Mapping[str, Any]) -> None:
    """A plan can be made without a package that the training needs.

    Raises:
        MissingExtraError: names it.
    """
    for name, (package, command) in _PACKAGES.items():
        if given.get(name) and importlib.util.find_spec(package) is None:
            raise MissingExtraError(
                f"--{name} needs the package {package} to train.", hint=f"{command}, or leave it away."
            )


def _check_quantization(job: Job, config: Any) -> None:
    from trl import ModelConfig, get_quantization_config

    from autotrain_mem.rehearsal.model.quantized import checkpoint_quantization, refuse_unrehearsed

    names = {field.name for field in fields(ModelConfig)}
    model = ModelConfig(**{name: value for name, value in job.arguments.items() if name in names})
    refuse_unrehearsed(config, get_quantization_config(model))
    if checkpoint_quantization(config) and not job.arguments.get("use_peft"):
        raise UnsupportedModelError(
            "The checkpoint is quantized, and rounded weights take no gradient steps.",
            hint="Add --use_peft to train an adapter on it, or take the checkpoint that it was quantized from.",
        )


def _check_attention(job: Job, config: Any, compute_capability: tuple[int, int]) -> None:
    name = job.arguments.get("attn_implementation")
    reason = None if name is None else _why_not(name, job, config, compute_capability)
    if reason is not None:
        raise UsageError(f"--attn_implementation {name}: {reason}.", hint="--attn_implementation sdpa runs everywhere.")


FLASH = "flash_attention_2"


def why_no_flash_attention(job: Job, config: Any, compute_capability: tuple[int, int]) -> str:
    """Why a plan for a card of this machine may not choose flash-attention by itself; empty when it may."""
    if job.arguments.get("use_cpu"):
        return "flash-attention runs on a GPU only"
    if command := flash_package_missing(FLASH):
        return f"flash-attention is not installed here ({command})"
    return _why_not(FLASH, job, config, compute_capability) or ""


def _why_not(name: str, job: Job, config: Any, compute_capability: tuple[int, int]) -> str | None:
    from autotrain_mem.rehearsal.cuda.attention import why_not

    return why_not(name, compute_capability, _computed_in(job), _head_size(config.get_text_config()))


def _computed_in(job: Job) -> Any:
    """The dtype of attention's products: autocast's where there is one, else that of the weights."""
    import torch

    if job.arguments.get("fp16"):
        return torch.float16
    if job.arguments.get("bf16") is not False:
        return torch.bfloat16
    return getattr(torch, str(job.arguments.get("dtype", "float32")), torch.float32)


_FLASH_PACKAGES = {
    FLASH: (("flash_attn", "kernels"), "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": (("flash_attn_interface", "kernels"), "pip install kernels"),
}
"""Name -> packages of which any one will do, and how to install one. transformers takes the kernel from the hub where
``kernels`` is installed and the package is not (``modeling_utils.py: _check_and_adjust_attn_implementation``)."""
_FROM_HUB = (("kernels",), "pip install kernels")


def flash_package_missing(name: str) -> str:
    """The command that installs what ``--attn_implementation name`` needs to train; empty when it is here."""
    if "flash" not in name:
        return ""
    packages, command = _FLASH_PACKAGES.get(name, _FROM_HUB)
    return "" if any(importlib.util.find_spec(package) for package in packages) else command


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def _check_liger(job: Job, config: Any) -> None:
    """The model's own kernels are rehearsed; of TRL's chunked losses, only those that it computes itself (1.16)."""
    import trl
    from packaging.version import Version

    from autotrain_mem.rehearsal.cuda.liger import why_not_liger

    reason = why_not_liger(config.get_text_config().model_type, job.arguments.get("liger_kernel_config"))
    since = job.method_facts.liger_since
    if since and Version(trl.__version__) < Version(since):
        reason = f"Liger's loss for {job.method} is not rehearsed with trl {trl.__version__}"
    if reason is not None:
        raise UsageError(
            f"--use_liger_kernel: {reason}, so that no plan can be made with it.", hint="Leave --use_liger_kernel away."
        )
