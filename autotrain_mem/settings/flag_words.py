"""Writes settings as flags of ours and of TRL's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from autotrain_mem.settings.own import SWITCHES_OF_OURS


def flag_words(settings: Mapping[str, Any]) -> Iterator[str]:
    """Lists the words of a command, not quoted.

    >>> [*flag_words({"optimizer_offload": True, "packing": False, "max_length": None, "report_to": ["none"]})]
    ['--optimizer_offload', '--packing', 'false', '--max_length', 'none', '--report_to', 'none']
    """
    for name, value in settings.items():
        if name in SWITCHES_OF_OURS:  # TRL's take true or false
            yield from [f"--{name}"] * bool(value)
            continue
        yield f"--{name}"
        for each in value if isinstance(value, list | tuple) else [value]:
            yield each if isinstance(each, str) else "none" if each is None else json.dumps(each)
