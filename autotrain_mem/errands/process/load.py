"""Loads what a run trained: the whole model, or its base with the adapter, where there is room for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from autotrain_mem.errands.errand import Errand
from autotrain_mem.support.errors import HostMemoryError, ModelNotFoundError, UsageError
from autotrain_mem.support.host import host_memory
from autotrain_mem.support.units import format_bytes

ROOM = 1.15
"""Of the weights' bytes, for what loading and computing take beside them: a layer's copy while a file is read
(``transformers/core_model_loading.py``), a short cache of keys and values."""


def model_class(errand: Errand) -> Any:
    """Return transformers' class for what was trained."""
    return AutoModelForSequenceClassification if errand.gives_score else AutoModelForCausalLM


def read_config(errand: Errand) -> Any:
    """Read the config of the whole model or of the base.

    Raises:
        ModelNotFoundError: there is none, or it cannot be reached.
        UsageError: the base is a quantized checkpoint.
    """
    name = errand.base or errand.folder
    try:
        labels = {"num_labels": 1} if errand.gives_score and errand.base else {}
        config = AutoConfig.from_pretrained(name, **labels, **_options(errand))
    except (OSError, ValueError) as error:
        raise missing(errand, error) from error
    if errand.base and getattr(config, "quantization_config", None):
        raise UsageError(
            f"The base model {name} is a quantized checkpoint, whose full weights are not in it.",
            hint="Give --base the model that it was quantized from.",
        )
    return config


def missing(errand: Errand, error: Exception) -> ModelNotFoundError:
    """The error of a base model, or of a run's own files, that cannot be loaded."""
    reason = " ".join(str(error).split())[:300]
    if errand.base is None:
        return ModelNotFoundError(f"The model in {errand.folder} cannot be loaded: {reason}")
    return ModelNotFoundError(
        f"The adapter in {errand.folder} belongs to the model {errand.base}, which cannot be loaded: {reason}",
        hint="Give --base the folder or the hub id where that model is now.",
    )


def weight_bytes(errand: Errand, config: Any) -> int:
    """Count the bytes of the weights in the checkpoint's own type, from their shapes alone."""
    with torch.device("meta"):
        model = model_class(errand).from_config(config, trust_remote_code=errand.trust_remote_code)
    dtype = getattr(config, "dtype", None) or torch.float32
    return int(sum(weight.numel() for weight in model.parameters()) * dtype.itemsize)


def check_memory(needed_bytes: int, what: str) -> None:
    """Refuse what would end the process.

    Raises:
        HostMemoryError: the host has less.
    """
    available_bytes = host_memory().available_bytes
    if needed_bytes > available_bytes:
        raise HostMemoryError(
            f"{what} takes {format_bytes(needed_bytes)} of host memory, and {format_bytes(available_bytes)} are "
            "available.",
            hint="Close other programs, or take a machine with more memory.",
        )


def load_model(errand: Errand, config: Any) -> Any:
    """Load the weights onto the host, in the checkpoint's own type, and lay the adapter over them."""
    name = errand.base or errand.folder
    try:
        model = model_class(errand).from_pretrained(name, config=config, dtype="auto", **_options(errand))
    except (OSError, ValueError) as error:
        raise missing(errand, error) from error
    if errand.base is None:
        return model
    from peft import PeftModel

    tokens = len(load_tokenizer(errand))
    if tokens > model.get_input_embeddings().weight.shape[0]:  # the training added some
        model.resize_token_embeddings(tokens)
    return PeftModel.from_pretrained(model, errand.folder)


def load_tokenizer(errand: Errand) -> Any:
    """Load the run's tokenizer, which the trainer saved beside the weights."""
    return AutoTokenizer.from_pretrained(errand.folder, trust_remote_code=errand.trust_remote_code)


def _options(errand: Errand) -> dict[str, Any]:
    of_base = {"revision": errand.revision} if errand.base and errand.revision else {}
    return {**of_base, "trust_remote_code": errand.trust_remote_code}
