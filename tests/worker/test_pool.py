"""Tests one worker and several at once: results, failures, interrupts, and that nothing is left over."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Self
from unittest.mock import Mock

import psutil
import pytest
import torch
from nouns import TRL_DEFAULTS

from autotrain_mem.support import codec
from autotrain_mem.support.errors import ModelNotFoundError, RehearsalError, WorkerDiedError, WorkerTimeoutError
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Counting, Job
from autotrain_mem.worker import client, pool
from autotrain_mem.worker.client import Worker
from autotrain_mem.worker.pool import Workers
from autotrain_mem.worker.server import OPERATIONS, answer, uncompiled
from tests.forked import Forge
from tests.support.test_processes import ends, parent


class FakeWorker:
    def __init__(self) -> None:
        self.asked_by: list[int] = []
        self.over = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        pass

    def kill(self) -> None:
        self.over.set()

    def ask(self, seconds: float = 0.0) -> None:
        assert self._lock.acquire(blocking=False), "one question at a time"
        try:
            self.asked_by.append(threading.get_ident())
            if self.over.wait(seconds):
                raise WorkerDiedError("killed")
        finally:
            self._lock.release()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(pool, "Worker", FakeWorker)
    before = threading.active_count()
    with Workers(2) as two:
        yield two
    assert threading.active_count() <= before  # a thread of an earlier test may end meanwhile


def asking(number: int, seconds: float = 0.0, fails: str = "") -> Callable[[Worker], int]:
    def call(worker: Worker) -> int:
        worker.ask(seconds)  # type: ignore[attr-defined]
        if fails:
            raise RehearsalError(fails)
        return number

    return call


def test_calls_run_at_once_each_with_its_own_worker_and_results_keep_their_order(workers: Workers) -> None:
    meeting = threading.Barrier(2, timeout=10)

    def call(worker: Worker) -> int:
        meeting.wait()
        return id(worker)

    assert len(set(workers.map([call, call]))) == 2
    assert workers.map([asking(1, 0.1), asking(2), asking(3), asking(4, 0.1)]) == [1, 2, 3, 4]
    begun = workers.begin(asking(1, 0.2))
    assert workers.map([asking(2), asking(3)]) == [2, 3]
    assert not begun.done()
    assert workers.result(begun) == 1


def test_two_pools_at_once_answer_threads_that_start_more(workers: Workers) -> None:
    answers: list[list[int]] = []

    def ask(pool: Workers) -> None:
        inner = threading.Thread(target=lambda: answers.append(pool.map([asking(1, 0.01), asking(2)])), daemon=True)
        inner.start()
        answers.append(pool.map([asking(1), asking(2, 0.01)]))
        inner.join(10)

    with Workers(2) as others:
        threads = [threading.Thread(target=ask, args=(each,), daemon=True) for each in (workers, others) * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert answers == [[1, 2]] * 12


def test_a_result_is_yielded_before_later_ones_and_closing_lets_no_further_call_begin(workers: Workers) -> None:
    heard, asked = threading.Event(), list[int]()

    def call(number: int) -> Callable[[Worker], int]:
        def run(worker: Worker) -> int:
            asked.append(number)
            assert number == 1 or heard.wait(10)
            return number

        return run

    results = workers.each([call(number) for number in range(1, 7)])
    assert next(results) == 1
    heard.set()
    assert next(results) == 2
    results.close()
    asked_by_then = len(asked)
    assert workers.map([asking(7)]) == [7]
    assert len(asked) == asked_by_then


def test_the_first_error_in_order_is_raised_once_running_calls_finish_and_no_other_begins(workers: Workers) -> None:
    done: list[int] = []
    slow = asking(3, 0.2)

    def finishing(worker: Worker) -> int:
        done.append(slow(worker))
        return 3

    with pytest.raises(RehearsalError, match="first"):
        workers.map([asking(0, 0.1, "first"), finishing, asking(3), asking(4)])
    assert done == [3]
    assert sum(len(worker.asked_by) for worker in workers._all) == 2  # type: ignore[attr-defined]
    with pytest.raises(RehearsalError, match="earlier in the list"):
        workers.map([asking(0, 0.1, "earlier in the list"), asking(0, 0.0, "faster")])
    with pytest.raises(RehearsalError, match="begun"):
        workers.result(workers.begin(asking(0, fails="begun")))
    assert workers.map([asking(5), asking(6)]) == [5, 6]


def test_a_second_worker_needs_a_core_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Worker", FakeWorker)
    for cores, gib, expected in ((1, 64, 1), (2, 64, 2), (64, 64, 2), (8, 3, 1), (8, 0, 1)):
        monkeypatch.setattr(pool, "cores", Mock(return_value=cores))
        monkeypatch.setattr(pool, "host_memory", Mock(return_value=SimpleNamespace(available_bytes=gib * GIB)))
        assert len(Workers()) == expected, (cores, gib)


@pytest.fixture
def job(qwen: pathlib.Path) -> Job:
    return Job(method="sft", model=str(qwen), dataset=None)


def context_length(job: Job) -> Callable[[Worker], int | None]:
    return lambda worker: worker.describe(job, (8, 0)).context_length


@pytest.mark.slow
def test_a_dying_worker_fails_its_own_call_and_is_replaced(job: Job, tmp_path: pathlib.Path, forge: Forge) -> None:
    answered: list[int | None] = []
    begun = threading.Event()  # a call that fails lets no further one begin

    def answering(worker: Worker) -> None:
        begun.set()
        answered.append(context_length(job)(worker))

    def dying(worker: Worker) -> int | None:
        assert begun.wait(60)
        os.kill(worker.pid, signal.SIGKILL)
        return worker.describe(job, (8, 0)).context_length

    def missing(worker: Worker) -> int | None:
        return worker.describe(Job(method="sft", model=str(tmp_path), dataset=None), (8, 0)).context_length

    with forge.children(), Workers(2) as workers:
        before = {worker.pid for worker in workers._all}
        with pytest.raises(WorkerDiedError, match="signal 9") as killed:
            workers.map([dying, answering])
        assert "that host memory ran out" in killed.value.hint
        assert answered[0]
        with pytest.raises(ModelNotFoundError):  # each error with its kind
            workers.map([context_length(job), missing])
        assert workers.map([context_length(job)] * 2) == answered * 2
        after = {worker.pid for worker in workers._all}
        assert len(before - after) == 1
    assert not [pid for pid in before | after if psutil.pid_exists(pid)]


INTERRUPTED = """
    import signal, threading
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a suite in the background does not hear
    from autotrain_mem.worker.pool import Workers
    from autotrain_mem.support import codec
    from autotrain_mem.types import Job, Knobs
    job, knobs = codec.from_json(Job, {job!r}), codec.from_json(Knobs, {knobs!r})
    def call(worker):
        for _ in range(100):
            worker.rehearse(job, knobs, 16, (8, 0))
    try:
        with Workers(2) as workers:
            print(*[worker.pid for worker in workers._all], flush=True)
            workers.map([call, call, call])
    except KeyboardInterrupt:
        print("interrupted with", threading.active_count(), "threads", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("wait_seconds", [0.2, 2.5], ids=["while they start", "while they rehearse"])
def test_ctrl_c_leaves_no_process_and_no_thread(job: Job, tmp_path: pathlib.Path, wait_seconds: float) -> None:
    code = INTERRUPTED.format(job=codec.to_json(job), knobs=codec.to_json(TRL_DEFAULTS))
    with parent(code, TMPDIR=str(tmp_path)) as (process, pids):
        time.sleep(wait_seconds)
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does
        started = time.monotonic()
        output = process.stdout.read()
        process.wait(30)
        assert time.monotonic() - started < 5
        # A thread for each worker's pipe may outlive it for a moment.
        assert output.startswith("interrupted with ")
        assert int(output.split()[2]) <= 3
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        assert list(tmp_path.iterdir()) == []


KNOBS = dataclasses.replace(TRL_DEFAULTS, per_device_train_batch_size=1, max_length=16, gradient_checkpointing=False)


@pytest.mark.slow
def test_a_workers_error_is_raised_here_and_an_interrupted_counting_leaves_no_process_and_no_folder(
    job: Job, tmp_path: pathlib.Path, forge: Forge
) -> None:
    (tmp_path / "nothing").mkdir()
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "12 and 30 are 42"}\n' * 20_000, encoding="utf-8")
    large = dataclasses.replace(job, dataset=str(data), arguments={"dataset_num_proc": 2})

    def interrupt(counting: Counting) -> None:
        if 0 < counting.done < counting.rows and counting.doing.startswith("Tokenizing"):
            raise KeyboardInterrupt

    with Worker() as worker:
        with forge.children():
            worker.start()
        first, folder = worker.pid, pathlib.Path(worker.scratch)
        with pytest.raises(ModelNotFoundError) as caught:
            worker.describe(Job(method="sft", model=str(tmp_path / "nothing"), dataset=None), (8, 0))
        assert "Traceback" in str(caught.value.__cause__), "for --debug"
        assert worker.describe(job, (8, 0)).context_length
        assert worker.pid == first
        assert [*folder.iterdir()] == []
        with pytest.raises(KeyboardInterrupt):
            worker.profile(large, interrupt)
        assert len(members(first)) >= 3, "the worker and the two that count, or this test tests nothing"
        assert [*folder.iterdir()] != [], "nor without the interrupted question's folder"
    assert all(ends(pid) for pid in members(first))
    assert not folder.exists()


@pytest.mark.slow
def test_a_worker_that_is_too_slow_is_reported_and_replaced(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker() as worker:
        worker.start()
        first = worker.pid
        monkeypatch.setattr(client, "TIME_LIMIT_SECONDS", 1.0)  # less than importing TRL takes
        with pytest.raises(WorkerTimeoutError, match="longer than 1 s"):
            worker.rehearse(job, KNOBS, 16, (8, 0))
        assert ends(first)
        worker.start()
        assert worker.pid != first


def members(group: int) -> list[int]:
    """Returns the processes of a group, zombies included."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                found.append(pid)
    return found


@pytest.mark.slow
def test_a_worker_whose_parent_is_killed_exits_and_removes_its_folder(tmp_path: pathlib.Path) -> None:
    code = """
        import pathlib, time
        from autotrain_mem.worker.client import Worker
        worker = Worker()
        worker.start()
        pathlib.Path(worker.scratch, "call").write_text("rows")
        print(worker.pid, flush=True)
        time.sleep(600)
    """
    with parent(code, TMPDIR=str(tmp_path)) as (process, (worker,)):
        assert len([*tmp_path.glob("*/call")]) == 1
        process.kill()
        process.wait()
        assert ends(worker)
        assert [*tmp_path.iterdir()] == []


def test_an_env_block_is_set_during_its_jobs_requests_alone_and_shows_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names = ("CUDA_VISIBLE_DEVICES", "HF_TOKEN_OF_JOB")
    monkeypatch.setitem(OPERATIONS, "check", ("Looking", lambda: [os.environ.get(name) for name in names]))
    block = dict(zip(names, ("1", "secret"), strict=True))
    first, second = (Job(method="sft", model="m", dataset=None, environment=each) for each in (block, {}))
    asked = [{"environment": block}, {"job": codec.to_json(first)}, {"job": codec.to_json(second)}]
    seen = [answer({"operation": "check", **each})["ok"] for each in asked]
    assert seen == [["", "secret"], ["", "secret"], ["", None]]


def test_a_function_is_left_uncompiled_while_libraries_are_imported() -> None:
    compile_now = torch.compile
    with uncompiled():
        assert torch.compile(abs) is torch.compile(dynamic=False)(abs) is abs
    assert torch.compile is compile_now
