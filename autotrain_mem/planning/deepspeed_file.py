"""Takes a user's own config of DeepSpeed into a wish, as words of the user's like flags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotrain_mem.settings.own import OF_DEEPSPEED
from autotrain_mem.support.errors import UsageError

if TYPE_CHECKING:
    from autotrain_mem.parallel.config import Zero
    from autotrain_mem.planning.wish import Wish

_FLAG = "deepspeed"


def with_deepspeed(wish: Wish) -> Wish:
    """The wish with the stage and the offload of its config of DeepSpeed, whose content goes to TRL as it is.

    Numbers that are TRL's arguments too become these, and ``auto``, which transformers fills in from them.

    Raises:
        UsageError: the config cannot be read or planned with, or contradicts flags.
    """
    given = wish.argument(_FLAG)
    if given is None:
        return wish
    from autotrain_mem.parallel.config import read_deepspeed, with_auto  # most have no such config

    content = deepspeed_content(given)
    is_file = isinstance(given, str) and not given.startswith("{")
    zero = read_deepspeed(content, str(given) if is_file else f"--{_FLAG}")
    if problems := [*_contradictions(wish, zero)]:
        reasons, cures = zip(*problems, strict=True)
        raise UsageError(f"{'; '.join(reasons)}.", hint="\n".join(dict.fromkeys(cures)))
    offload = {name: getattr(zero, name) or getattr(wish.autofit, name) for name in OF_DEEPSPEED}
    left, said = with_auto(content)
    return replace(
        wish,
        argv=_without(wish.argv),
        config={**said, **wish.config, _FLAG: left},
        autofit=replace(wish.autofit, sharding=zero.sharding, **offload),
    )


def deepspeed_content(given: Any) -> Mapping[str, Any]:
    """Returns what a config of DeepSpeed's says: a path, the JSON itself (TRL's parser takes both), or its keys.

    Raises:
        UsageError: it cannot be read.
    """
    if isinstance(given, Mapping):
        return given
    path = str(given)
    try:
        content = json.loads(path if path.startswith("{") else Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--{_FLAG} {path} cannot be read: {error.strerror}.", hint="Give a JSON file.") from error
    except ValueError as error:
        raise UsageError(f"--{_FLAG} {path} is no JSON: {error}.", hint="Give DeepSpeed's own JSON.") from error
    if not isinstance(content, dict):
        raise UsageError(f"--{_FLAG} {path} holds no keys.", hint="Give DeepSpeed's own JSON.")
    return content


def _contradictions(wish: Wish, zero: Zero) -> Iterator[tuple[str, str]]:
    if wish.autofit.sharding not in (None, zero.sharding):
        yield (
            f"--sharding {wish.autofit.sharding} and the {zero.sharding} of --{_FLAG} contradict each other",
            "Remove one.",
        )
    if wish.autofit.accelerate_config is not None or wish.accelerate is not None:
        yield f"--accelerate_config and --{_FLAG} both say how processes share the model", "Remove one."
    for name in OF_DEEPSPEED:
        if getattr(wish.autofit, name) not in (None, getattr(zero, name)):
            yield f"--{name} is not what --{_FLAG} says", "Remove the flag, or write it into the file."


def _without(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Flags but this one: its content stands in the wish's keys."""
    kept: list[str] = []
    is_value = False
    for token in argv:
        if token == f"--{_FLAG}":
            is_value = True
        elif not is_value and not token.startswith(f"--{_FLAG}="):
            kept.append(token)
        else:
            is_value = False
    return tuple(kept)
