"""Takes a config of PEFT's own (``--peft_config``) into a wish, as words of the user's like flags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotrain_mem.settings.adapter_config import (
    PEFT_CONFIG,
    SAID,
    arguments_of,
    canonical,
    kind_of,
    needs_data_first,
    why_not_quantized,
)
from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.settings.words import CHECKPOINTING, RECOMPUTES
from autotrain_mem.support.errors import UsageError

if TYPE_CHECKING:
    from autotrain_mem.planning.wish import Wish

FLAG = f"--{PEFT_CONFIG}"
FILE = "adapter_config.json"
"""``peft/utils/constants.py: CONFIG_NAME``."""


def with_peft_config(wish: Wish) -> Wish:
    """The wish with its config of PEFT's read, so that a plan holds what it says and not where it was.

    It may be asked for twice, as of the point of a sweep.

    Raises:
        UsageError: the config cannot be read, or contradicts flags; all that does.
    """
    given = wish.autofit.peft_config
    if given is None:
        return wish
    text = canonical(_content(given))
    if problems := [*_problems(wish, text)]:
        reasons, cures = zip(*problems, strict=True)
        raise UsageError(f"{'; '.join(reasons)}.", hint="\n".join(cures))
    return replace(wish, autofit=replace(wish.autofit, peft_config=text))


def _content(given: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    text = str(given)
    if not text.lstrip().startswith("{"):
        text = _read(Path(text))
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{FLAG} {given} is no JSON: {error}.", hint=_WANTED) from error
    if not isinstance(content, Mapping) or not isinstance(content.get("peft_type"), str):
        raise UsageError(f"{FLAG} {given} names no peft_type, as every config of PEFT's does.", hint=_WANTED)
    return content


_WANTED = f"It takes the {FILE} that PEFT's save_pretrained writes, or the folder that holds it."


def _read(path: Path) -> str:
    file = path / FILE if path.is_dir() else path
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"{FLAG} {path} cannot be read: {file}: {reason}.", hint=_WANTED) from error


def _problems(wish: Wish, text: str) -> Iterator[tuple[str, str]]:
    kind = kind_of(text)
    if function := needs_data_first(text):
        yield (
            f"{FLAG}: its init_lora_weights needs peft's {function}, which no trainer calls",
            "Call it in a script of yours, with a trainer of autotrain_mem; or remove init_lora_weights.",
        )
    if wish.names("use_peft") and not wish.argument("use_peft"):
        yield f"--use_peft false and {FLAG} contradict each other", "Remove one."
    if twice := [name for name in SAID[1:] if wish.names(name)]:
        flags = ", ".join(f"--{name}" for name in twice)
        yield f"{flags} and {FLAG} both say what the adapter is", f"Remove {flags}, or write it into the config."
    why = why_not_quantized(text)
    for name in BASE_BITS:
        if why and wish.argument(name):
            yield f"--{name} does not go with {kind}: {why}", f"Remove --{name}, or take LoRA."
    if arguments_of(text).get(CHECKPOINTING) is False and any(map(wish.argument, RECOMPUTES)):
        yield (
            f"--gradient_checkpointing does not go with {kind}: a layer that is computed again has no prefix",
            "Remove --gradient_checkpointing.",
        )
