"""Tests what child processes answer, how they end, and that none is left over."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from autotrain_mem.support import processes
from autotrain_mem.support.errors import TrainingError
from autotrain_mem.support.processes import ENDING_SIGNALS, LOG_TAIL_CHARACTERS, Child, ChildDied, ChildTimeout

SOON = 20.0
"""Seconds within which a child must start, answer or end; far more than it takes, for a busy machine."""

CHILD = """
    import os, sys, time
    from autotrain_mem.support.processes import Channel

    channel = Channel(ignore_interrupt=True, on_loss=lambda error: channel.send({"lost": error.strerror}))
    while (request := channel.receive())["do"] != "return":
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

    def start(log: pathlib.Path | None = None, *, has_children: bool = False) -> Child:
        child = Child("some_child", {"PYTHONPATH": str(tmp_path)}, log, has_children=has_children)
        made.append(child)
        return child

    yield start
    for child in made:
        child.kill()
        child.stop()


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def ends(pid: int) -> bool:
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


def test_a_child_survives_a_full_log_and_reports_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "open_own", os.open)  # else a device is no log
    child = make(pathlib.Path("/dev/full"))
    for _ in range(3):
        child.send({"do": "print", "what": "out"})
    lost = [{"lost": "No space left on device"}] * 2
    assert [child.receive(SOON) for _ in range(5)] == [*lost, *[{"printed": True}] * 3]
    child.send({"do": "return"})
    assert death_of(child).code == 0


@contextmanager
def parent(code: str, **environment: str) -> Iterator[tuple[Any, list[int]]]:
    """Runs code that prints the process ids of its own children, which are killed with it in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    children = [int(pid) for pid in process.stdout.readline().split()]
    try:
        yield process, children
    finally:
        process.stdout.close()
        for pid in (process.pid, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_child_answers_in_order_ignores_ending_signals_logs_what_it_prints_and_can_fork(make: Make) -> None:
    child, values = make(), [1, "line\nbreak", "Grüße, 模型 \u2028", "x" * 3_000_000, None, {"a": [1.5, True]}]
    for value in values:
        child.send({"do": "echo", "what": value})
    assert [child.receive(SOON)["said"] for _ in values] == values
    child.interrupt()
    for number in ENDING_SIGNALS:
        os.kill(child.pid, number)
    assert ask(child, do="print", what="x" * (2 * LOG_TAIL_CHARACTERS)) == {"printed": True}
    assert ask(child, do="print", what='{"looks": "like an answer"}') == {"printed": True}
    tail = child.log_tail()
    assert len(tail) <= LOG_TAIL_CHARACTERS
    for text in ('{"looks": "like an answer"}', "from a grandchild", "and on stderr"):
        assert text in tail
    assert ask(child, do="fork") == {"code": 0}, "a fork does not wait for the thread that reads"


@pytest.mark.parametrize("code", [0, 3, -signal.SIGKILL])
def test_the_death_of_a_child_has_its_status_and_last_words_and_comes_after_all_answers(code: int, make: Make) -> None:
    child = make()
    child.send({"do": "echo", "what": 1})
    child.send({"do": "exit", "code": code} if code >= 0 else {"do": "sleep"})
    assert child.receive(SOON) == {"said": 1}
    if code < 0:
        os.kill(child.pid, -code)
    death = death_of(child)
    assert (death.code, death.log_tail) == (code, "last words" if code >= 0 else "")
    assert not child.alive
    assert death_of(child).code == code, "it can be asked again"
    with pytest.raises(ChildDied) as caught:
        child.send({"do": "echo", "what": "x" * 1_000_000})
    assert caught.value.code == code


def test_a_child_that_another_thread_stops_raises_in_the_waiting_one(make: Make) -> None:
    child = make()
    with ThreadPoolExecutor() as other:
        waiting = other.submit(child.receive, SOON)
        child.stop()
        assert isinstance(waiting.exception(SOON), ChildDied)
    with pytest.raises(ChildDied):  # its log is closed by now
        child.receive(SOON)


def test_a_busy_child_survives_a_timeout_and_exits_when_stopped(make: Make) -> None:
    child = make()
    child.send({"do": "sleep"})
    pid = child.pid
    with pytest.raises(ChildTimeout):
        child.receive(timeout_seconds=0.2)
    assert child.alive
    started = time.monotonic()
    child.stop()
    assert time.monotonic() - started < 9, "it exited by itself, before it would have been killed"
    assert not is_running(pid)
    child.stop()
    assert not child.alive


def test_a_killed_child_that_hangs_in_a_driver_is_given_up_and_reported(make: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr(processes, "DRIVER_SECONDS", 0.2)
    child = make()
    with monkeypatch.context() as kernel:
        kernel.setattr(child._process, "kill", lambda: None)  # nothing ends a process in state D
        kernel.setattr(child._process, "stdin", None)
        with pytest.raises(TrainingError, match=f"Process {child.pid} does not exit after SIGKILL"):
            child.stop(0.1)
        assert child.alive


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
    with parent(code, PYTHONPATH=str(tmp_path)) as (process, (child,)):
        assert is_running(child)
        process.kill()
        process.wait()
        assert ends(child)


def killed_by_the_system(child: Child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    death_of(child)  # although its own child keeps its stdout open


def killed(child: Child) -> None:
    child.kill()
    child.stop()


@pytest.mark.parametrize("end", [killed, Child.stop, killed_by_the_system], ids=lambda end: end.__name__)
def test_a_child_takes_its_own_children_with_it(end: Callable[[Child], None], make: Make) -> None:
    child = make(has_children=True)
    left: int = ask(child, do="leave")["left"]
    assert is_running(left)
    end(child)
    assert ends(left)
