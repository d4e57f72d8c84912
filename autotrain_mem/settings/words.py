"""Defines the words that settings accept besides numbers: how much harm a plan may do, row lengths, sizes and times."""

import argparse
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from autotrain_mem.support.units import parse_bytes

Fit = Literal["all", "rounding", "lossless"]
"""What a plan may change: only speed (``lossless``), also rounding (``rounding``), or anything (``all``)."""

FITS: tuple[Fit, ...] = ("all", "rounding", "lossless")

MAX_SLOWDOWN = 4.0
"""Default of ``--max_slowdown``."""

RESTARTS = 3
"""How many times in a row a run is resumed: if it fails once more without progress, the cause is not chance."""

EPOCHS = 3.0
"""transformers' default of ``num_train_epochs`` (``training_args.py: TrainingArguments``)."""

AUTO = "auto"
"""Stands for the length of the longest row."""
MOST = "max"
"""Stands for the largest value that fits."""
MAX_LENGTH = "max_length"
MOST_TOKENS = 99_999_999
"""A longer row is a typing error: the longest context of a published model is 10,485,760 tokens (Llama 4 Scout)."""
MAXIMIZED = (MAX_LENGTH, "per_device_train_batch_size", "lora_r", "num_generations", "max_completion_length")
"""Arguments that may be ``max``; each is a knob."""

CHECKPOINTING = "gradient_checkpointing"
SAME_ARGUMENT = {"activation_checkpointing": CHECKPOINTING}
"""transformers 5.23 renames the argument; TRL's configs and this project still use the old name."""
RECOMPUTES = (CHECKPOINTING, *SAME_ARGUMENT)

_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")


def is_image_size(text: str) -> bool:
    """Returns whether a text is an image's size: ``1024x768``.

    >>> is_image_size("1024x768"), is_image_size("1024"), is_image_size("0x5")
    (True, False, False)
    """
    return re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d{0,4}", text) is not None


def read_length(text: str) -> int | str | None:
    """Parses a length: ``512``, ``auto``, ``p99.9``, ``max``, or ``none``, for which it returns None: no limit. Raises
    ValueError, with a message for the user, if the text is anything else."""
    if (word := text.strip().lower()) == "none":
        return None
    if word in (AUTO, MOST):
        return word
    if match := _PERCENTILE.fullmatch(word):
        if not 0 < float(match[1]) <= 100:
            raise ValueError(f"{text!r} is not a percentile of row lengths: it must be above p0, and at most p100")
        return word
    if not word.isdigit() or not word.strip("0"):
        raise ValueError(f"{text!r} is neither a number of tokens, nor auto, nor max, nor a percentile such as p99.9")
    if len(word) > len(str(MOST_TOKENS)):
        raise ValueError(f"{text!r} is more tokens than any model reads: give {MOST_TOKENS:,} or fewer")
    return int(word)


def words_of(value: Any) -> list[str]:
    """Returns the names in the value of an argument that takes several: a list, or a text with blanks."""
    return value.split() if isinstance(value, str) else list(value or ())


def is_maximized(value: Any) -> bool:
    """Returns whether the value is still to be found: ``auto`` or a percentile in the data, ``max`` by a search."""
    return isinstance(value, str) and (value in (AUTO, MOST) or _PERCENTILE.fullmatch(value) is not None)


def wished_share(value: Any) -> float:
    """Returns the share of rows that must keep all their tokens: 0.999 for ``p99.9``, 1 for ``auto``."""
    match = _PERCENTILE.fullmatch(value) if isinstance(value, str) else None
    return 1.0 if match is None else float(match[1]) / 100


def without_maximized(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that TRL accepts: those whose value is a word such as ``max`` are left out."""
    return {name: value for name, value in arguments.items() if name not in MAXIMIZED or not is_maximized(value)}


def read_counts(text: str) -> int | tuple[int, ...]:
    """Reads a number of GPUs, such as ``8``, or several numbers to compare, such as ``1,2,4,8``."""
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs; --gpu names a card") from None
    return counts[0] if len(counts) == 1 else tuple(counts)


def read_tokens(text: str) -> int:
    """Reads a number of tokens, such as ``300000``, ``20M`` or ``1.5B``."""
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower())) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 300000, 20M or 1.5B")
    return round(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2]])


def size_or_share(text: str, total_bytes: int) -> int | None:
    """Reads ``"8%"`` of the device, or ``"500MiB"``, as bytes; None for anything else."""
    try:
        if not text.endswith("%"):
            return parse_bytes(text)
        share = float(text[:-1]) / 100
    except ValueError:
        return None
    return int(total_bytes * share) if math.isfinite(share) else None


_UNIT_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def read_seconds(text: str) -> float | None:
    """Reads ``"8h"``, ``"90min"`` or ``"2d"`` as seconds; None for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|m|h|d)\s*", text, re.IGNORECASE)
    seconds = 0.0 if match is None else float(match[1]) * _UNIT_SECONDS[match[2].lower()]
    return seconds or None
