"""A stream for what is printed along the way: what cannot be written is dropped, and ends nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TextIO


class LossyStream:
    """Stands in for a text stream whose disk may be full, whose terminal may close, whose reader may have ended.

    Args:
        stream: All else is its own.
        on_loss: Is called with the first error, and not in processes that are forked later.
    """

    def __init__(self, stream: TextIO, on_loss: Callable[[OSError], None] = lambda error: None) -> None:
        self._stream = stream
        self._on_loss = on_loss
        self._has_lost = False
        self._process = os.getpid()

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        if not self._has_lost and os.getpid() == self._process:
            self._has_lost = True
            self._on_loss(error)
