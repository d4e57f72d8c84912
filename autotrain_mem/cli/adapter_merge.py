"""Merges a trained adapter into its base model, on the host."""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from autotrain_mem.cli.trained_run import TrainedRun
from autotrain_mem.support.errors import HostMemoryError, ModelNotFoundError, OutputFolderError, UsageError
from autotrain_mem.support.host import free_disk_bytes, host_memory
from autotrain_mem.support.units import format_bytes

ROOM = 1.15
"""Memory to load and merge a model, as a multiple of its weights' bytes: each layer is copied while it is read."""
CARD_NAME = "README.md"


def merge_adapter(run: TrainedRun, target: Path, note: Callable[[str], None], *, trust_remote_code: bool) -> str:
    """Merges the adapter into a new folder, completely or not at all. Returns size and dtype, which is the base's.

    Raises:
        HostMemoryError, OutputFolderError: memory or disk space does not suffice, or the folder exists already.
        ModelNotFoundError: the base is missing or cannot be reached.
        UsageError: the base is a quantized checkpoint, or the adapter does not change weights.
    """
    code: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options, is_scorer = {"revision": run.revision or "main", **code}, run.method.has_score_head
    model_class = AutoModelForSequenceClassification if is_scorer else AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(run.base, **({"num_labels": 1} if is_scorer else {}), **options)
    except (OSError, ValueError) as error:
        raise not_loaded(run, error) from error
    if getattr(config, "quantization_config", None):
        raise UsageError(
            f"The base model {run.base} is a quantized checkpoint, which does not hold the full weights.",
            hint="Give --base the model that it was quantized from.",
        )
    with torch.device("meta"):
        parameters = list(model_class.from_config(config, **code).parameters())
    weight_bytes = sum(each.numel() for each in parameters) * (getattr(config, "dtype", None) or torch.float32).itemsize
    check_room(weight_bytes, target.absolute().parent)
    note(f"loading {run.base} ({format_bytes(weight_bytes)}) and its adapter")
    try:
        model = model_class.from_pretrained(run.base, config=config, dtype="auto", **options)
    except (OSError, ValueError) as error:
        raise not_loaded(run, error) from error
    tokenizer = AutoTokenizer.from_pretrained(run.folder, **code)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:  # the training added tokens
        model.resize_token_embeddings(len(tokenizer))
    adapted = PeftModel.from_pretrained(model, run.folder)
    check_merges(adapted)
    note("merging")
    merged = adapted.merge_and_unload(safe_merge=True)  # raises for weights that are NaN
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    unfinished.mkdir()
    try:
        merged.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        card = run.folder / CARD_NAME
        if card.is_file():
            text = card.read_text(encoding="utf-8", errors="replace").replace("library_name: peft\n", "")
            (unfinished / CARD_NAME).write_text(text, encoding="utf-8")
        if target.exists():  # created meanwhile
            raise OutputFolderError(f"{target} exists already.", hint="Give --out a new folder.")
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return f"{format_bytes(weight_bytes)} in {str(merged.dtype).split('.')[-1]}"


def not_loaded(run: TrainedRun, error: Exception) -> ModelNotFoundError:
    """Returns the error for a base model that cannot be loaded, with the reason."""
    reason = " ".join(str(error).split())[:300]
    return ModelNotFoundError(
        f"The adapter in {run.folder} belongs to the model {run.base}, which cannot be loaded: {reason}",
        hint="Give --base the folder or the hub id where that model is now.",
    )


def check_room(weight_bytes: int, folder: Path) -> None:
    """Raises HostMemoryError or OutputFolderError if the merge would run out of host memory or of disk space."""
    available_bytes, free_bytes = host_memory().available_bytes, free_disk_bytes(folder)
    if ROOM * weight_bytes > available_bytes:
        raise HostMemoryError(
            f"Merging takes {format_bytes(int(ROOM * weight_bytes))} of host memory, but only "
            f"{format_bytes(available_bytes)} are available.",
            hint="Close other programs, or use a machine with more memory.",
        )
    if weight_bytes > free_bytes:
        raise OutputFolderError(
            f"The merged model takes {format_bytes(weight_bytes)}, but the disk of {folder} has only "
            f"{format_bytes(free_bytes)} free.",
            hint="Give --out a folder on another disk.",
        )


def check_merges(model: Any) -> None:
    """Raises UsageError for an adapter that does not change weights, such as prompt tuning, and so has no merge."""
    if not hasattr(model, "merge_and_unload"):
        kind = next(iter(model.peft_config.values())).peft_type.value
        raise UsageError(
            f"A {kind} adapter cannot be merged: it adds tokens or states, and changes no weight.",
            hint="Load it together with its base model, with PEFT's AutoPeftModelForCausalLM.",
        )
