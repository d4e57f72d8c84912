"""Child processes: what they answer, how they end, and that none is left over."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from nouns import TRL_DEFAULTS
from tiny import tiny_folder

from autotrain_mem.support import processes
from autotrain_mem.support.errors import ModelNotFoundError, WorkerDiedError, WorkerTimeoutError
from autotrain_mem.support.processes import ENDING_SIGNALS, LOG_TAIL_CHARACTERS, Child, ChildDied, ChildTimeout
from autotrain_mem.types import Counting, Job
from autotrain_mem.worker import client
from autotrain_mem.worker.client import Worker
from tests.forked import Forge

SOON = 20.0
"""Seconds within which a child must start, answer or end; far more than it takes, for a busy machine."""

CHILD = """
    import os, sys, time
    from autotrain_mem.support.processes import Channel

    channel = Channel(ignore_interrupt=True)
    while True:
        request = channel.receive()
        if request["do"] == "echo":
            channel.send({"said": request["what"]})
        elif request["do"] == "print":
            print(request["what"], flush=True)
            os.system("echo from a grandchild")
            sys.stderr.write("and on stderr\\n")
            channel.send({"printed": True})
        elif request["do"] == "exit":
            sys.stderr.write("last words\\n")
            sys.stderr.flush()
            os._exit(request["code"])
        elif request["do"] == "sleep":
            time.sleep(600)
        elif request["do"] == "leave":
            left = os.fork()  # holds stdout and stderr open
            if left == 0:
                time.sleep(600)
            channel.send({"left": left})
        elif request["do"] == "fork":
            import multiprocessing
            forked = multiprocessing.get_context("fork").Process(target=int)
            forked.start()
            forked.join(20)
            channel.send({"code": forked.exitcode})
"""

Make = Callable[..., Child]


@pytest.fixture
def make(tmp_path: pathlib.Path) -> Iterator[Make]:
    """Starts children that run the module above; ends whatever a test leaves running."""
    (tmp_path / "some_child.py").write_text(textwrap.dedent(CHILD))
    made: list[Child] = []

    def start(*, has_children: bool = False) -> Child:
        child = Child("some_child", {"PYTHONPATH": str(tmp_path)}, has_children=has_children)
        made.append(child)
        return child

    yield start
    for child in made:
        child.kill()
        child.stop()


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ends(pid: int) -> bool:
    """Whether a process ends soon."""
    deadline = time.monotonic() + SOON
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def ask(child: Child, **request: Any) -> dict[str, Any]:
    child.send(request)
    return child.receive(SOON)


def death_of(child: Child) -> ChildDied:
    with pytest.raises(ChildDied) as caught:
        child.receive(SOON)
    return caught.value


def test_a_child_whose_log_takes_no_more_goes_on_and_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "open_own", os.open)  # else a device is no log
    code = """
        import sys
        from autotrain_mem.support.processes import Channel

        channel = Channel(ignore_interrupt=True, on_loss=lambda error: channel.send({"lost": error.strerror}))
        for _ in range(3):
            print("out")
            sys.stderr.write("err\\n")
        channel.send({"steps": 3})
    """
    (tmp_path / "full_log.py").write_text(textwrap.dedent(code))
    child = Child("full_log", {"PYTHONPATH": str(tmp_path)}, pathlib.Path("/dev/full"))
    assert [child.receive(SOON) for _ in range(3)] == [{"lost": "No space left on device"}] * 2 + [{"steps": 3}]
    assert death_of(child).code == 0
    child.stop()


def test_what_ends_a_run_ends_no_child_by_itself(make: Make) -> None:
    child = make()
    ask(child, do="echo", what="ready")
    for number in ENDING_SIGNALS:
        os.kill(child.pid, number)
    assert ask(child, do="echo", what="here") == {"said": "here"}


@contextmanager
def parent(code: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that runs this code and prints the id of a child of its own; whatever happens, that one is ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process, child
    finally:
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_child_answers_in_the_order_it_is_asked_with_any_value_that_json_knows(make: Make) -> None:
    child, values = make(), [1, "line\nbreak", "Grüße, 模型 \u2028", "x" * 3_000_000, None, {"a": [1.5, True]}]
    for value in values:
        child.send({"do": "echo", "what": value})
    assert [child.receive(SOON)["said"] for _ in values] == values


def test_what_a_child_prints_goes_to_its_log_and_never_into_an_answer(make: Make) -> None:
    child = make()
    assert ask(child, do="print", what="x" * (2 * LOG_TAIL_CHARACTERS)) == {"printed": True}
    assert ask(child, do="print", what='{"looks": "like an answer"}') == {"printed": True}
    tail = child.log_tail()
    assert len(tail) <= LOG_TAIL_CHARACTERS
    assert '{"looks": "like an answer"}' in tail
    assert "from a grandchild" in tail
    assert "and on stderr" in tail


@pytest.mark.parametrize("code", [0, 3])
def test_a_child_that_ends_is_a_death_with_its_status_and_last_words_after_all_its_answers(
    code: int, make: Make
) -> None:
    child = make()
    for request in ({"do": "echo", "what": 1}, {"do": "echo", "what": 2}, {"do": "exit", "code": code}):
        child.send(request)
    assert [child.receive(SOON), child.receive(SOON)] == [{"said": 1}, {"said": 2}]
    death = death_of(child)
    assert (death.code, death.log_tail) == (code, "last words")
    assert not child.alive
    assert death_of(child).code == code, "asked again it is the same death"


def test_a_child_that_is_killed_is_a_death_by_that_signal_for_who_waits_and_who_sends(make: Make) -> None:
    child = make()
    child.send({"do": "sleep"})
    os.kill(child.pid, signal.SIGKILL)
    assert death_of(child).code == -signal.SIGKILL
    with pytest.raises(ChildDied) as caught:
        child.send({"do": "echo", "what": "x" * 1_000_000})
    assert caught.value.code == -signal.SIGKILL


def test_who_waits_while_another_thread_stops_the_child_hears_of_its_end(make: Make) -> None:
    child = make()
    heard: list[Exception] = []

    def wait() -> None:
        try:
            child.receive(SOON)
        except Exception as error:
            heard.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    child.stop()
    waiting.join(SOON)
    assert isinstance(heard[0], ChildDied)
    with pytest.raises(ChildDied):  # its log is closed by now
        child.receive(SOON)


def test_a_busy_child_lives_on_after_a_timeout_leaves_interrupts_to_its_parent_and_ends_when_stopped(
    make: Make,
) -> None:
    child = make()
    ask(child, do="echo", what=1)
    child.interrupt()
    assert ask(child, do="echo", what=2) == {"said": 2}
    child.send({"do": "sleep"})
    pid, started = child.pid, time.monotonic()
    with pytest.raises(ChildTimeout):
        child.receive(timeout_seconds=0.2)
    assert time.monotonic() - started < 5
    assert child.alive
    started = time.monotonic()
    child.stop()
    assert time.monotonic() - started < 9, "it ended by itself, before it would have been killed"
    assert not is_running(pid)
    child.stop()
    assert not child.alive


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_child_ends_when_its_parent_is_killed(busy: bool, tmp_path: pathlib.Path) -> None:
    (tmp_path / "some_child.py").write_text(textwrap.dedent(CHILD))
    code = f"""
        import time
        from autotrain_mem.support.processes import Child
        child = Child("some_child", {{}})
        child.send({{"do": "echo", "what": 1}})
        child.receive({SOON})
        if {busy}:
            child.send({{"do": "sleep"}})
        print(child.pid, flush=True)
        time.sleep(600)
    """
    with parent(code, PYTHONPATH=str(tmp_path)) as (process, child):
        assert is_running(child)
        process.kill()
        process.wait()
        assert ends(child)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tiny_folder(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")
    return Job(method="sft", model=str(folder), dataset=None)


KNOBS = dataclasses.replace(TRL_DEFAULTS, per_device_train_batch_size=1, max_length=16, gradient_checkpointing=False)


@pytest.fixture(scope="module")
def worker(forge: Forge) -> Iterator[Worker]:
    """One for the tests below in their order. The second of them ends it."""
    with Worker() as started:
        with forge.children():
            started.start()
        yield started


@pytest.mark.slow
def test_an_error_in_the_worker_is_raised_here_and_the_worker_lives_on_and_leaves_nothing(
    job: Job, worker: Worker, tmp_path: pathlib.Path
) -> None:
    first = worker.pid
    with pytest.raises(ModelNotFoundError) as caught:
        worker.describe(Job(method="sft", model=str(tmp_path), dataset=None), (8, 0))
    assert "Traceback" in str(caught.value.__cause__), "for --debug"
    assert worker.describe(job, (8, 0)).context_length
    assert worker.pid == first
    assert names_in(scratch(worker)) == []


@pytest.mark.slow
def test_an_interrupted_counting_leaves_no_process_and_no_folder(worker: Worker, tmp_path: pathlib.Path) -> None:
    model, data = tiny_folder(tmp_path / "model", "qwen2"), tmp_path / "rows.jsonl"
    data.write_text('{"text": "12 and 30 are 42"}\n' * 20_000, encoding="utf-8")
    job = Job(method="sft", model=str(model), dataset=str(data), arguments={"dataset_num_proc": 2})

    def interrupt(counting: Counting) -> None:
        if 0 < counting.done < counting.rows and counting.doing.startswith("Tokenizing"):
            raise KeyboardInterrupt

    folder = scratch(worker)
    with worker:
        with pytest.raises(KeyboardInterrupt):
            worker.profile(job, interrupt)
        assert len(members(worker.pid)) >= 3, "the worker and the two that count, or this test tests nothing"
        assert names_in(folder) != [], "nor without the interrupted question's folder"
    assert all(ends(pid) for pid in members(worker.pid))
    assert not folder.exists()


@pytest.mark.slow
def test_a_worker_that_is_killed_or_takes_too_long_says_so_and_the_next_question_gets_a_new_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Worker() as worker:
        worker.start()
        killed = worker.pid
        killer = threading.Timer(0.1, os.kill, (killed, signal.SIGKILL))  # its imports take longer
        killer.start()
        with pytest.raises(WorkerDiedError, match="signal 9") as caught:
            worker.rehearse(job, KNOBS, 16, (8, 0))
        killer.join()
        assert "host running out of memory" in caught.value.hint
        monkeypatch.setattr(client, "TIME_LIMIT_SECONDS", 2.0)  # enough to begin, not enough to import TRL
        with pytest.raises(WorkerTimeoutError, match="longer than 2 s"):
            worker.rehearse(job, KNOBS, 16, (8, 0))
        assert worker.pid != killed
        assert not is_running(killed)
        assert ends(worker.pid)


def members(group: int) -> list[int]:
    """Processes of a group, dead ones that nobody has waited for included."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[2]) == group:
                found.append(int(folder.name))
    return found


def scratch(worker: Worker) -> pathlib.Path:
    """Where whatever the worker writes is."""
    return pathlib.Path(worker._scratch.name)


def names_in(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_a_worker_ends_when_its_parent_is_killed_and_removes_what_that_one_left(tmp_path: pathlib.Path) -> None:
    """Here while it imports for seconds; above a child that waits, and one that does something else."""
    code = """
        import pathlib, tempfile, time
        from autotrain_mem.worker.client import Worker
        worker = Worker()
        worker.start()
        call = pathlib.Path(tempfile.mkdtemp(prefix="autofit-"), "call")
        call.write_text("rows")
        worker._child.send({"operation": "describe", "job": {"python_call": {"path": str(call)}}})
        print(worker.pid, flush=True)
        time.sleep(600)
    """
    with parent(code, TMPDIR=str(tmp_path)) as (process, worker):
        assert len(names_in(tmp_path)) == 2, "the worker's folder and the script's, or this test tests nothing"
        process.kill()
        process.wait()
        assert ends(worker)
        assert names_in(tmp_path) == []


def killed_from_outside(child: Child) -> None:
    """As by the host that runs out of memory: the death is told though one of its own holds its stdout."""
    os.kill(child.pid, signal.SIGKILL)
    death_of(child)


def killed(child: Child) -> None:
    child.kill()
    child.stop()


@pytest.mark.parametrize("end", [killed, Child.stop, killed_from_outside], ids=lambda end: end.__name__)
def test_a_child_that_ends_takes_its_own_children_with_it(end: Callable[[Child], None], make: Make) -> None:
    child = make(has_children=True)
    left: int = ask(child, do="leave")["left"]
    assert is_running(left)
    end(child)
    assert ends(left)


def test_a_fork_of_a_child_does_not_wait_for_the_thread_that_reads(make: Make) -> None:
    assert ask(make(), do="fork") == {"code": 0}
