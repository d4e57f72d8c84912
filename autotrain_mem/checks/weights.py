"""Looks for a model's weights: how many there are, and how much of them is still to be downloaded."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from autotrain_mem.types.preflight import Download

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
FORMATS = (".safetensors", ".bin")
"""Endings of files of weights; those of the first kind alone are downloaded where there are some
(``transformers/modeling_utils.py: _get_resolved_checkpoint_files``)."""
HUB_SECONDS = 3.0
"""For which the hub is waited for: a figure that is missing costs less than a plan that is late."""


def parameters_on_disk(model: str, config: Any, revision: str | None = None) -> int | None:
    """Counts a model's parameters by the size of its weights' files and the config's dtype.

    None where no whole set of files is on this disk, and for a quantized checkpoint, whose bytes say little of its
    parameters.
    """
    if getattr(config, "quantization_config", None) is not None:
        return None
    if pathlib.Path(model).is_dir():
        size_bytes = sum(file.stat().st_size for file in pathlib.Path(model).glob("*.safetensors"))
    else:
        size_bytes = _cached_bytes(model, revision)
    return size_bytes // item_bytes(config) if size_bytes else None


def item_bytes(config: Any) -> int:
    """Returns the bytes of a saved weight: transformers writes the dtype that it saves."""
    return int(getattr(getattr(config, "dtype", None), "itemsize", 4))


def download(model: str, config: Any, revision: str | None = None) -> Download | None:
    """Says what training will download of a hub model's weights, and to where; None where that is nothing.

    By what the hub says of its files; where it does not answer in time, by the config's parameters and dtype.
    """
    from huggingface_hub import constants

    if pathlib.Path(model).is_dir() or _cached_bytes(model, revision):
        return None
    size_bytes = _bytes_on_hub(model, revision)
    if size_bytes is None:
        size_bytes = _parameters_of(config) * item_bytes(config)
    return Download(size_bytes=size_bytes, folder=constants.HF_HUB_CACHE) if size_bytes else None


def _cached_bytes(model: str, revision: str | None) -> int:
    """Reads the size of a hub model's weights from its index, else from its one file.

    0 when it was not downloaded whole, or is no hub id at all.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        index = try_to_load_from_cache(model, INDEX, revision=revision)
        weights = try_to_load_from_cache(model, WEIGHTS, revision=revision)
    except HFValidationError:
        return 0
    if isinstance(index, str):
        written = json.loads(pathlib.Path(index).read_text(encoding="utf-8"))
        shards = {*written.get("weight_map", {}).values()}
        has_all = all(isinstance(try_to_load_from_cache(model, shard, revision=revision), str) for shard in shards)
        return int(written.get("metadata", {}).get("total_size", 0)) if has_all else 0
    return pathlib.Path(weights).stat().st_size if isinstance(weights, str) else 0


def _bytes_on_hub(model: str, revision: str | None) -> int | None:
    """Sums up the files of weights; None where nothing answers, or has none."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        files = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=HUB_SECONDS).siblings or []
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, TimeoutError):
        return None
    for ending in FORMATS:
        # Folders within hold other forms of the same weights, such as the makers' own.
        sizes = [file.size or 0 for file in files if file.rfilename.endswith(ending) and "/" not in file.rfilename]
        if sizes:
            return sum(sizes)
    return None


def _parameters_of(config: Any) -> int:
    """Counts the weights of a config's model, which is built without any; 0 where there is no such model."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError):
        return 0
    return sum(weight.numel() for weight in model.parameters())
