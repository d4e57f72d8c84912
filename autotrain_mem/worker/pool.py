"""Runs several workers, which import TRL in the background and share the requests."""

import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self, TypeVar

from autotrain_mem.support.host import cores, host_memory
from autotrain_mem.support.units import GIB
from autotrain_mem.worker.client import Worker

T = TypeVar("T")

MOST = 2
"""A search runs two rehearsals at a time; a third worker would spend seconds on imports and then wait."""
WORKER_BYTES = 2 * GIB
"""Host memory of a worker."""
LOOK_SECONDS = 0.5
"""Longest single wait of the main thread: Windows handles Ctrl-C only between waits."""


class Workers:
    """Runs worker processes, which start together: with the first request, or earlier with :meth:`start`.

    ``with Workers() as workers: traces = workers.map([lambda worker: worker.rehearse(...), ...])``. ``count``: their
    number; None for as many as cores and memory allow, at most ``MOST``. ``started``: workers to use, not new ones.
    """

    def __init__(self, count: int | None = None, *, started: Sequence[Worker] = ()) -> None:
        if count is None:
            room = host_memory().available_bytes // WORKER_BYTES
            count = max(1, min(MOST, room)) if cores() >= MOST else 1
        self._all = started or [Worker() for _ in range(count)]
        self.are_started = bool(started)
        self._threads = ThreadPoolExecutor(len(self._all), thread_name_prefix="autofit-worker")
        # Last in, first out: a worker that has just answered a similar request is faster.
        self._free: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in reversed(self._all):
            self._free.put(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        with contextlib.ExitStack() as stack:
            for worker in self._all:
                stack.enter_context(worker)
        self._threads.shutdown()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def first(self) -> Worker:
        """Returns one worker, for requests about flags, model config and data. Starts all, for requests that follow."""
        self.start()
        return self._all[0]

    @property
    def scratch(self) -> str:
        """Returns a folder for the workers' files, as ``Worker.scratch``; starts no worker."""
        return self._all[0].scratch

    def start(self) -> None:
        """Starts all workers."""
        if not self.are_started:
            self.are_started = True
            for worker in self._all:
                worker.start()

    def kill(self) -> None:
        """Kills all workers; callers that wait for an answer get an error."""
        for worker in self._all:
            worker.kill()

    def map(self, calls: Sequence[Callable[[Worker], T]]) -> list[T]:
        """Returns the results of all calls, in their order (see :meth:`each`)."""
        return list(self.each(calls))

    def each(self, calls: Sequence[Callable[[Worker], T]]) -> Iterator[T]:
        """Yields all results in the calls' order, each as soon as it is ready; each call has a worker to itself.

        After a call fails, no further call begins, running ones finish, and the first failed call's error is raised. An
        interruption, such as Ctrl-C, kills the workers for good.
        """
        futures = [self.begin(call) for call in calls]

        def stop(done: Future[T]) -> None:
            if not done.cancelled() and done.exception() is not None:
                for each in futures:
                    each.cancel()

        try:
            for future in futures:
                future.add_done_callback(stop)
            for future in futures:
                yield self.result(future)
        finally:
            for future in futures:
                future.cancel()
            self._wait(futures)

    def begin(self, call: Callable[[Worker], T]) -> Future[T]:
        """Passes a call to the next free worker; :meth:`result` waits for its result."""
        self.start()

        def run() -> T:
            worker = self._free.get()
            try:
                return call(worker)
            finally:
                self._free.put(worker)

        return self._threads.submit(run)

    def result(self, begun: Future[T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Returns a call's result, or raises its error. Ctrl-C kills the workers, as in :meth:`each`. ``meanwhile``:
        called now and then until the result is there."""
        self._wait([begun], meanwhile)
        return begun.result()

    def _wait(self, futures: Sequence[Future[T]], meanwhile: Callable[[], None] = lambda: None) -> None:
        try:
            while wait(futures, timeout=LOOK_SECONDS).not_done:
                meanwhile()
        except BaseException:
            self.kill()
            raise
