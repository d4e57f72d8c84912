"""Several workers at once: they import together while the parent does other things, and share what is to be asked."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from typing import TypeVar

from autotrain_mem.host import cores, host_memory
from autotrain_mem.units import GIB
from autotrain_mem.worker.client import TIME_LIMIT_SECONDS, Worker

T = TypeVar("T")

MOST = 2
"""A search asks for two rehearsals at a time; a third worker would import for seconds and wait."""
WORKER_BYTES = 2 * GIB
"""What a worker is given of the host's memory."""
LOOK_SECONDS = 0.5
"""How long the main thread waits at a time: on Windows Ctrl-C is heard only in between."""


class Workers:
    """Worker processes, all started at once.

    ``with Workers() as workers: traces = workers.map([lambda worker: worker.rehearse(...), ...])``.

    Args:
        count: How many; None for as many as cores and memory allow, at most ``MOST`` and at least one.
        time_limit_seconds: For each question.
    """

    def __init__(self, count: int | None = None, time_limit_seconds: float = TIME_LIMIT_SECONDS) -> None:
        if count is None:
            room = host_memory().available_bytes // WORKER_BYTES
            count = max(1, min(MOST, room)) if cores() >= MOST else 1
        self._all = tuple(Worker(time_limit_seconds) for _ in range(count))

    @classmethod
    def holding(cls, *workers: Worker) -> Workers:
        """Workers that were made elsewhere."""
        self = cls.__new__(cls)
        self._all = workers
        return self

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        with contextlib.ExitStack() as stack:
            for worker in self._all:
                stack.enter_context(worker)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def first(self) -> Worker:
        """The one for questions that need only one: flags, the model's config, the data."""
        return self._all[0]

    def kill(self) -> None:
        """Ends all of them at once, and for good: whoever waits for an answer is told that its worker died."""
        for worker in self._all:
            worker.kill()

    def map(self, calls: Sequence[Callable[[Worker], T]]) -> list[T]:
        """Every call's result, in the calls' order; each call has a worker to itself.

        A call that fails lets no further one begin, and those under way come to an end; then the error of the first
        call that failed is raised. What interrupts the waiting itself, Ctrl-C above all, kills the workers for good.
        """
        if len(calls) < 2 or len(self) < 2:
            return [call(self.first) for call in calls]
        free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._all:
            free.put(worker)
        stopped = threading.Event()

        def run(call: Callable[[Worker], T]) -> T:
            worker = free.get()
            try:
                if stopped.is_set():
                    raise CancelledError
                return call(worker)
            except BaseException:
                stopped.set()
                raise
            finally:
                free.put(worker)

        with ThreadPoolExecutor(min(len(calls), len(self)), thread_name_prefix="autofit-worker") as threads:
            try:
                futures = [threads.submit(run, call) for call in calls]
                while wait(futures, timeout=LOOK_SECONDS).not_done:
                    pass
            except BaseException:
                stopped.set()
                self.kill()
                raise
        for future in futures:
            error = future.exception()
            if error is not None and not isinstance(error, CancelledError):
                raise error
        return [future.result() for future in futures]
