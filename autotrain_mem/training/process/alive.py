"""What keeps a training alive, put around its trainer: the guard, the longest rows before the first step, the watch."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from autotrain_mem.spec import Incident, Learned
from autotrain_mem.spec.shortage import Shortage
from autotrain_mem.training.longest_batch.rows import LongestBatch
from autotrain_mem.training.process.build import Device
from autotrain_mem.training.process.oom_report import shortage_of
from autotrain_mem.training.request import Request
from autotrain_mem.training.watch.diagnose import Sign

Send = Callable[[Mapping[str, Any]], None]


class Alive:
    """All of it around one trainer, from before ``train()``. What comes of it is told as events.

    The guard is innermost: it splits the longest rows as it splits every other batch.
    """

    def __init__(self, trainer: Any, request: Request, device: Device, send: Send) -> None:
        from autotrain_mem.training.guard.attach import attach_guard
        from autotrain_mem.training.longest_batch.run import attach_longest_batch
        from autotrain_mem.training.watch.callback import MemoryWatch

        self._trainer, self._device, self._send = trainer, device, send
        self._shortage: Shortage | None = None
        attach_guard(trainer, learned=request.learned, on_incident=self._tell_incident)
        attach_longest_batch(trainer, self._tell_worst_batch, on_error=self._keep_shortage)
        watch = MemoryWatch(
            read=device.read,
            phases=device.phase_peaks,
            predicted=request.predicted,
            total_bytes=request.hardware.total_bytes,
            told=self._tell_sign,
        )
        trainer.add_callback(watch)

    def shortage(self, error: BaseException) -> Shortage | None:
        """What there was to see when the error came. Of the longest rows it was noted then: since, all was put back.

        None where it could not be read, which is no reason to lose the error itself: it decides what comes next.
        """
        if self._shortage is None:
            self._keep_shortage(error)
        return self._shortage

    def _keep_shortage(self, error: BaseException) -> None:
        try:
            self._shortage = shortage_of(error, self._trainer, self._device)
        except Exception:  # the log has it; what ends the training is the other one
            traceback.print_exc()

    def _tell_incident(self, incident: Incident, learned: Learned) -> None:
        self._send({"event": "incident", "incident": incident.to_json(), "learned": learned.to_json()})

    def _tell_worst_batch(self, batch: LongestBatch) -> None:
        self._send({"event": "worst_batch", **batch.to_json()})

    def _tell_sign(self, sign: Sign) -> None:
        self._send({"event": "sign", "message": sign.message})
