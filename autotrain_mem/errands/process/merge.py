"""Writes an adapter into its base model's weights, and the whole as a new folder."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

from autotrain_mem.errands.errand import Errand, Receive, Send
from autotrain_mem.errands.process.load import (
    ROOM,
    check_memory,
    load_model,
    load_tokenizer,
    read_config,
    weight_bytes,
)
from autotrain_mem.support.errors import OutputFolderError, UsageError
from autotrain_mem.support.host import free_disk_bytes
from autotrain_mem.support.units import format_bytes

CARD_NAME = "README.md"


def merge(errand: Errand, send: Send, receive: Receive) -> dict[str, Any]:
    """Merge in the base's own type, on the host; the folder appears whole or not at all.

    Raises:
        HostMemoryError, OutputFolderError: there is no room for it, in memory or on the disk.
        ModelNotFoundError, UsageError: of the base model.
    """
    config, target = read_config(errand), Path(errand.to)
    written_bytes = weight_bytes(errand, config)
    check_memory(int(ROOM * written_bytes), "Merging")
    _check_disk(target, written_bytes)
    send({"event": "note", "message": f"loading {errand.base} ({format_bytes(written_bytes)}) and its adapter"})
    model = load_model(errand, config)
    check_merges(model)
    send({"event": "note", "message": "merging"})
    merged = model.merge_and_unload(safe_merge=True)  # refuses weights that are no numbers
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    unfinished.mkdir()
    try:
        merged.save_pretrained(unfinished)
        load_tokenizer(errand).save_pretrained(unfinished)
        card = Path(errand.folder, CARD_NAME)
        if card.is_file():
            text = card.read_text(encoding="utf-8", errors="replace").replace("library_name: peft\n", "")
            (unfinished / CARD_NAME).write_text(text, encoding="utf-8")
        _appear(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {"event": "end", "path": str(target), "bytes": written_bytes, "dtype": str(merged.dtype).split(".")[-1]}


def check_merges(model: Any) -> None:
    """Refuses an adapter that is no change of weights, such as prompts (``peft/peft_model.py: PeftModel.__getattr__``
    hands the question on to the base model, which knows no merging).

    Raises:
        UsageError: it cannot be merged.
    """
    if not hasattr(model, "merge_and_unload"):
        kind = next(iter(model.peft_config.values())).peft_type.value
        raise UsageError(
            f"An adapter of the kind {kind} is not merged: it adds tokens or states, and changes no weight.",
            hint="Use it beside its base model, as autofit chat does.",
        )


def _check_disk(target: Path, written_bytes: int) -> None:
    folder = target.absolute().parent
    free_bytes = free_disk_bytes(folder)
    if written_bytes > free_bytes:
        raise OutputFolderError(
            f"The merged model takes {format_bytes(written_bytes)}, and the disk of {folder} has "
            f"{format_bytes(free_bytes)} free.",
            hint="Give --out a folder on another disk.",
        )


def _appear(unfinished: Path, target: Path) -> None:
    if target.exists():  # meanwhile
        raise OutputFolderError(f"{target} exists by now, and is not written over.", hint="Give --out a new folder.")
    unfinished.rename(target)
