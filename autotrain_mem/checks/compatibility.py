"""Checks that a job's arguments work with its model, its card, and the installed packages."""

import importlib.util
from dataclasses import fields
from typing import Any

from autotrain_mem.checks.model_files import ModelOnCard
from autotrain_mem.methods.configs import is_in_mxfp4
from autotrain_mem.methods.interface import method_of
from autotrain_mem.settings.levers import SMALLER_IMAGES
from autotrain_mem.support.errors import UnsupportedModelError
from autotrain_mem.trainers.pretrained import FAMILIES
from autotrain_mem.types import Capability, Job, Problems


def quantization(subject: ModelOnCard) -> None:
    """Refuses a quantized checkpoint that is not rehearsed, would be quantized twice, or has no adapter to train."""
    from transformers import Mxfp4Config
    from trl import ModelConfig, get_quantization_config

    from autotrain_mem.trainers.model_support import checkpoint_quantization, refuse_unrehearsed

    job, config = subject.job, subject.config
    names = {field.name for field in fields(ModelConfig)}
    model = ModelConfig(**{name: value for name, value in job.arguments.items() if name in names})
    dequantized = Mxfp4Config(dequantize=True) if is_in_mxfp4(config) else None
    refuse_unrehearsed(config, get_quantization_config(model) or dequantized)
    stays_quantized = bool(checkpoint_quantization(config)) and not is_in_mxfp4(config)
    if stays_quantized and not job.arguments.get("use_peft"):
        raise UnsupportedModelError(
            "The checkpoint is quantized, and quantized weights cannot be trained.",
            hint="Add --use_peft to train an adapter on it, or use the checkpoint that it was quantized from.",
        )


def images(subject: ModelOnCard) -> Problems:
    """Refuses image flags for a model or a trainer that reads only text."""
    job = subject.job
    given = {"--max_pixels": job.arguments.get(SMALLER_IMAGES), "--image_sizes": job.images}
    flags = " and ".join(name for name, value in given.items() if value)
    if flags and not job.method_facts.reads_images:
        yield f"{flags}: TRL's {job.method_facts.trainer} reads no images.", f"Remove {flags}."
    elif flags and subject.config.model_type not in FAMILIES:
        model = f"{job.model} is a {subject.config.model_type} model"
        yield f"{flags}: {model}, and its images are not supported.", f"Remove {flags}."


def attention(subject: ModelOnCard) -> Problems:
    """Refuses attention kernels that do not support this card or this dtype, or are not rehearsed."""
    name = subject.job.arguments.get("attn_implementation")
    reason = None if name is None else _why_not(name, subject.job, subject.config, subject.compute_capability)
    if reason is not None:
        yield f"--attn_implementation {name}: {reason}.", "--attn_implementation sdpa runs everywhere."


FLASH = "flash_attention_2"


def flash_attention(job: Job, config: Any, compute_capability: Capability) -> str | None:
    """Returns the command that installs flash-attention; empty if it is installed, None if the card cannot run it."""
    if job.arguments.get("use_cpu") or _why_not(FLASH, job, config, compute_capability):
        return None
    return flash_package_missing(FLASH)


def _why_not(name: str, job: Job, config: Any, compute_capability: Capability) -> str | None:
    import torch

    from autotrain_mem.trainers.model_support import why_no_attention

    if job.arguments.get("fp16"):  # attention computes in autocast's dtype, else in the weights'
        dtype = torch.float16
    elif job.arguments.get("bf16") is not False:
        dtype = torch.bfloat16
    else:
        dtype = getattr(torch, str(job.arguments.get("dtype", "float32")), torch.float32)
    text = config.get_text_config()
    head_size = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return why_no_attention(name, compute_capability, dtype, head_size)


_FLASH_PACKAGES = {
    FLASH: (("flash_attn", "kernels"), "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": (("flash_attn_interface", "kernels"), "pip install kernels"),
}
"""Name -> the packages, one of which suffices, and how to install one. transformers loads the kernel from the hub if
only ``kernels`` is installed (``modeling_utils.py: _check_and_adjust_attn_implementation``)."""


def flash_package_missing(name: str) -> str:
    """Returns the command that installs the package of ``--attn_implementation name``; empty if it is installed."""
    if "flash" not in name:
        return ""
    packages, command = _FLASH_PACKAGES.get(name, (("kernels",), "pip install kernels"))
    return "" if any(importlib.util.find_spec(package) for package in packages) else command


_NOT_WITH_LIGER = (
    *("liger_kernel_config", "peft_config", "lora_target_modules", "lora_modules_to_save", "torch_compile"),
    *("use_kernels", "use_cpu"),
)
"""Arguments with which no plan chooses Liger. Its loss reads the weights of the model's head, not those of an adapter
of the head (``liger_kernel/transformers/model/llama.py: lce_forward``)."""


def takes_liger(job: Job, config: Any, compute_capability: Capability) -> bool:
    """Returns whether a plan can choose Liger: it is installed, and rehearsed for this trainer, model and card. A
    script's config has its ``loss_type`` already, so it must choose Liger itself."""
    from autotrain_mem.trainers.model_support import LIGER_MODELS

    given = job.arguments
    return (
        job.method_facts.has_chunked_loss
        and job.python_call is None
        and compute_capability >= (8, 0)
        and config.model_type in LIGER_MODELS
        and given.get("loss_type") in (None, "nll")
        and not any(given.get(name) for name in _NOT_WITH_LIGER)
        and importlib.util.find_spec("liger_kernel") is not None
    )


def liger(subject: ModelOnCard) -> Problems:
    """Refuses Liger for models and methods that are not rehearsed with it."""
    import trl
    from packaging.version import Version

    from autotrain_mem.trainers.model_support import why_not_liger

    job, config = subject.job, subject.config
    if not job.arguments.get("use_liger_kernel"):
        return
    reason = why_not_liger(config.get_text_config().model_type, job.arguments.get("liger_kernel_config"))
    if (since := method_of(job.method).liger_since) is None:
        reason = f"Liger's loss for {job.method} is not supported yet"
    elif since and Version(trl.__version__) < Version(since):
        reason = (
            f"trl {trl.__version__} computes the loss of {job.method} with liger-kernel's own, which is not rehearsed; "
            f"trl {since} computes it itself"
        )
    if reason is not None:
        yield f"--use_liger_kernel: {reason}.", "Remove --use_liger_kernel."
