"""Parses ``PYTORCH_ALLOC_CONF``, the settings of the CUDA caching allocator.

Names and limits follow torch 2.13: ``c10/core/AllocatorConfig.h`` and ``.cpp``, ``c10/cuda/CUDAAllocatorConfig.h``.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import MIB

LARGE_SEGMENT_BYTES = 20 * MIB
"""``c10/core/AllocatorConfig.h: large_segment_size_``."""
_SMALLEST_SEGMENT_MIB = 11
"""A segment must be larger than the largest request that may share it, which is below 10 MiB."""

NEWER_VARIABLE, OLDER_VARIABLE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""If both are set, torch reads the older one (``CUDAAllocatorConfig.h: instance``; seen with torch 2.13's library)."""

_PLACES_NOTHING = (
    *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "graph_capture_record_stream_reuse"),
    *("pinned_use_cuda_host_register", "pinned_use_hip_host_register", "pinned_num_register_threads"),
    *("pinned_use_background_threads", "pinned_reserve_segment_size_mb", "pinned_free_catch_all"),
    *("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb", "throw_on_cudamalloc_oom"),
)
"""Accepted options for locks, pinned host memory and graphs, which do not affect device memory, and one that makes a
request that exceeds the whole device fail without a retry: a run that needs one does not fit in any case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """Holds the allocator's parsed settings; the defaults are torch's."""

    grows: bool = False
    """Segments are expandable: one for each stream and pool, which grows page by page."""
    max_split_bytes: int | None = None
    """Blocks of at least this size are never split (``max_split_size_mb``); None for no limit."""
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """Unsplittable blocks serve requests at most this many bytes below their size (``max_non_split_rounding_mb``)."""
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    """Size of the segment that requests from 1 to 10 MiB share (``large_segment_size_mb``)."""
    garbage_collection_threshold: float = 0.0
    """Share of the allowed memory above which old cached blocks are released; 0 for never."""
    per_process_memory_fraction: float = 1.0
    """Share of the device's memory that the process may reserve; 1 is no limit."""


def variable_that_counts(environment: Mapping[str, str]) -> str:
    """Returns the name of the variable from which torch reads its settings."""
    return OLDER_VARIABLE if environment.get(OLDER_VARIABLE) else NEWER_VARIABLE


def parse_settings(text: str) -> AllocatorSettings:
    """Parses ``"expandable_segments:True,max_split_size_mb:64"``; an option's last value counts. Raises ValueError
    for an option that is unknown or not simulated, or a value that torch refuses."""
    settings = AllocatorSettings()
    packed = re.sub(r"\s", "", text)
    for option in filter(None, re.split(r",(?![^\[]*\])", packed)):  # commas in brackets do not count
        name, separator, value = option.partition(":")
        if not separator or not value:
            raise ValueError(f"{name} needs a value: {name}:VALUE")
        if name in _READERS:
            field, read = _READERS[name]
            settings = replace(settings, **{field: read(name, value)})
        elif name == "backend" and value != "native":
            raise ValueError(f"backend:{value} is another allocator; only backend:native is simulated")
        elif name == "roundup_power2_divisions":
            raise ValueError(f"{name} is not supported; remove it")
        elif name not in (*_PLACES_NOTHING, "backend"):
            raise ValueError(f"{name} is not an option of the allocator")
    smallest = settings.large_segment_bytes  # parseMaxSplitSize, parseMaxNonSplitRoundingSize
    limits = {"max_split_size_mb": settings.max_split_bytes}
    if settings.max_non_split_rounding_bytes != LARGE_SEGMENT_BYTES:
        limits["max_non_split_rounding_mb"] = settings.max_non_split_rounding_bytes
    for name, limit in limits.items():
        if limit is not None and limit < smallest:
            raise ValueError(f"{name} must be {smallest // MIB} or more, not {limit // MIB}")
    return settings


def _switch(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{name} is True or False, not {value}")
    return value == "True"


def _mib(name: str, value: str, smallest: int = 0) -> int:
    if not re.fullmatch(r"\d+", value):
        raise ValueError(f"{name} takes a whole number, not {value}")
    if int(value) < smallest:
        raise ValueError(f"{name} must be {smallest} or more, not {value}")
    return int(value) * MIB


def _fraction(name: str, value: str, *, whole: bool) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= 1.0 or (not whole and number in (0.0, 1.0)):
        raise ValueError(f"{name} takes a share {'from 0 to 1' if whole else 'between 0 and 1'}, not {value}")
    return number


_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("grows", _switch),
    "max_split_size_mb": ("max_split_bytes", _mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mib),
    "large_segment_size_mb": ("large_segment_bytes", partial(_mib, smallest=_SMALLEST_SEGMENT_MIB)),
    "garbage_collection_threshold": ("garbage_collection_threshold", partial(_fraction, whole=False)),
    "per_process_memory_fraction": ("per_process_memory_fraction", partial(_fraction, whole=True)),
}
"""Option -> its field, and the function that parses its value (option, text)."""


def environment_settings(environment: Mapping[str, str]) -> AllocatorSettings:
    """Returns the settings of this process's environment, overridden by a job's ``env:`` block. Raises UsageError if
    torch would reject them, or they select another allocator."""
    text = environment_setting(environment)
    try:
        return parse_settings(text)
    except ValueError as error:
        raise UsageError(
            f"The environment sets torch's CUDA allocator to {text!r}, which autofit cannot simulate: {error}.",
            hint=f"Correct or unset {NEWER_VARIABLE} (or {OLDER_VARIABLE}), in the shell or in the recipe's env block.",
        ) from error


def environment_setting(environment: Mapping[str, str], *, grows: bool = False) -> str:
    """Returns the text of the variable that torch reads; empty if unset. ``grows`` adds expandable segments, which
    overrides the user's value, since an option's last value counts (``AllocatorConfig.cpp: parseArgs``)."""
    merged = {**os.environ, **environment}
    given = merged.get(variable_that_counts(merged), "")
    added = "expandable_segments:True" if grows else ""
    return ",".join(filter(None, (given, added)))
