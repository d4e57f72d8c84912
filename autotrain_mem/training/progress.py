"""Follows the events of a training's first process, to say how far it came (in the parent)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.host import host_memory, oom_kills
from autotrain_mem.training.exit_causes import Ending

HOST_SECONDS = 1.0
"""How often the host's memory is looked at while a run tells of its steps: reading it takes 0.1 ms."""

Event = dict[str, Any]


class Progress:
    """Follows a process's events, to say how far it came where it ends without an ``end`` event."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._kills = oom_kills()
        self._looked = 0.0
        self._host_left_share = 1.0
        self._began_at = self._step = 0
        self._saving = ""
        self._peak_reserved_bytes: int | None = None

    def follow(self, event: Event) -> None:
        """Take the next event, and pass it on."""
        match event["event"]:
            case "start":
                self._began_at = self._step = event["step"]
            case "step":
                self._step = event["step"]
                self._peak_reserved_bytes = event["memory"] and event["memory"]["peak_reserved_bytes"]
            case "saving":
                self._saving = event["path"]
            case "checkpoint" | "save_failed":
                self._saving = ""
        if time.monotonic() - self._looked >= HOST_SECONDS:
            self._looked, memory = time.monotonic(), host_memory()
            self._host_left_share = min(self._host_left_share, memory.available_bytes / memory.total_bytes)
        self._on_event(event)

    def ending(self, error: AutofitError, **more: Any) -> Ending:
        """Say how far the training came.

        Args:
            more: What else an ending has.
        """
        return Ending(
            error=error,
            step=self._step,
            began_at=self._began_at,
            saving=self._saving,
            host_kills=oom_kills() - self._kills,
            host_left_share=self._host_left_share,
            peak_reserved_bytes=self._peak_reserved_bytes,
            **more,
        )
