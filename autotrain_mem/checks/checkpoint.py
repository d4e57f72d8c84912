"""How many parameters lie on this disk, by the files of a model that is here or was downloaded before."""

from __future__ import annotations

import json
import pathlib
from typing import Any

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


def parameters_on_disk(model: str, config: Any, revision: str | None = None) -> int | None:
    """From the size of the weights and the config's dtype; None where no whole set of files is here.

    Of a checkpoint that is quantized, too: its bytes say little of its parameters.
    """
    item_bytes = getattr(getattr(config, "dtype", None), "itemsize", 4)  # transformers writes the dtype that it saves
    if getattr(config, "quantization_config", None) is not None:
        return None
    if pathlib.Path(model).is_dir():
        size_bytes = sum(file.stat().st_size for file in pathlib.Path(model).glob("*.safetensors"))
    else:
        size_bytes = _cached_bytes(model, revision)
    return size_bytes // item_bytes if size_bytes else None


def _cached_bytes(model: str, revision: str | None) -> int:
    """Of a hub id: by its index, else by its one file; 0 when it was not downloaded, or is no id at all."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        index = try_to_load_from_cache(model, INDEX, revision=revision)
        weights = try_to_load_from_cache(model, WEIGHTS, revision=revision)
    except HFValidationError:
        return 0
    if isinstance(index, str):
        written = json.loads(pathlib.Path(index).read_text(encoding="utf-8"))
        return int(written.get("metadata", {}).get("total_size", 0))
    return pathlib.Path(weights).stat().st_size if isinstance(weights, str) else 0
