"""Stands for ``torch.cuda`` where FSDP2 asks for a device's module: what is made inside a stream is born on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autotrain_mem.rehearsal.trace.recorder import Recorder


class _Event:
    """An event of a stream. Memory does not depend on it: FSDP2 keeps whatever is in use by a reference."""

    def record(self, *_: Any) -> _Event:
        return self

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Stream:
    def __init__(self, number: int) -> None:
        self.number = number

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class Streams:
    """``torch.cuda`` as FSDP2 uses it.

    Args:
        recorder: Is told on which stream blocks are born.
    """

    Event = _Event

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._streams = recorder, 0
        self._now = self.default = _Stream(0)

    def Stream(self, *_: Any, **__: Any) -> _Stream:  # torch's own name
        """Make a stream, numbered from 1 as they are made."""
        self._streams += 1
        return _Stream(self._streams)

    def current_stream(self, *_: Any) -> _Stream:
        return self._now

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """Whatever is made inside is born on this stream."""
        before, self._now = self._now, stream
        with self._recorder.on_stream(stream.number):
            try:
                yield
            finally:
                self._now = before

    def current_device(self) -> Any:
        return 0

    def synchronize(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)  # whatever else is asked is the CPU's
