"""Several processes act as one: events are merged, the rank that failed is named, and none is left over."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch.distributed as dist
from nouns import TRL_DEFAULTS
from place import write_rows
from safetensors.torch import load_file

from autotrain_mem.machine.catalog import named
from autotrain_mem.support import codec
from autotrain_mem.support.errors import InterruptedByUser, TrainingError, UsageError
from autotrain_mem.support.processes import ChildDied, ChildTimeout
from autotrain_mem.training import launch
from autotrain_mem.training import rank_processes as several
from autotrain_mem.training.checkpoint_kinds import form_of
from autotrain_mem.training.checkpoints import newest_start, processes_of
from autotrain_mem.training.environment import PORT, meeting_port, process_environment, rank_environments
from autotrain_mem.training.exit_causes import Cause, Ending, cause_of
from autotrain_mem.training.launch import PROBE_LOG_NAME, SCRATCH_NAME, Event, most_of, run_probe
from autotrain_mem.training.process import world
from autotrain_mem.training.pulses import ASLEEP_SECONDS, MUTE_SECONDS, Pulses
from autotrain_mem.training.rank_processes import RankDied, RankProcesses, RankTimeout
from autotrain_mem.training.task import Request, Task
from autotrain_mem.types import Job, MemoryReading, Phase, PhasePeak, Probe, Topology
from tests.forked import Forge

GONE = "The trainer raised RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:4242"

CHILD = """
import os, signal, sys
from autotrain_mem.support.processes import Channel
channel = Channel(ignore_interrupt=True)
request = channel.receive()
channel.send({"event": "said", "said": request["say"]})
if request["say"] == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
channel.receive()
"""


def pulse(moves: int, place: str = "in graph.py: _engine_run_backward") -> dict[str, Any]:
    return {"event": "pulse", "moves": moves, "place": place}


class Watched(Pulses):
    now = 0.0

    def __init__(self, ranks: int, silent_seconds: float) -> None:
        super().__init__(ranks, silent_seconds, lambda: self.now)

    def after(self, seconds: float, *beating: dict[str, Any]) -> Any:
        """Let the first ranks send the same pulse every second; returns the first that is overdue."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1
            for rank, message in enumerate(beating):
                self.see(rank, message)
            if (overdue := self.overdue()) is not None:
                return overdue
        return None


def test_a_rank_that_shows_no_sign_of_life_while_others_do_is_waited_for() -> None:
    pulses = Watched(2, 1800)
    assert pulses.after(500, pulse(0)) is None  # the other has not begun: it imports
    pulses.see(1, pulse(3))
    rank, why = pulses.after(500, pulse(3))
    assert (rank, why) == (1, f"its process has given no sign of life for {MUTE_SECONDS:.0f} s")


def test_of_ranks_that_live_and_do_not_move_the_one_behind_or_elsewhere_is_waited_for() -> None:
    pulses = Watched(2, 1800)
    assert pulses.after(2000, pulse(0), pulse(0)) is None  # loading has no limit
    rank, why = pulses.after(2000, pulse(7), pulse(6, "in dataloader.py: __next__"))
    assert (rank, pulses.now) == (1, pytest.approx(3800, abs=2))
    behind = "its progress count is 1 behind, and it is in dataloader.py: __next__"
    assert why == f"no progress on any rank for 1800 s, and {behind}"
    alone = Watched(1, 1800).after(2000, pulse(7))
    assert alone == (0, "no progress on any rank for 1800 s, and it is in graph.py: _engine_run_backward")
    busy = Watched(1, 100)
    assert [busy.after(60, pulse(7, place)) for place in "abab"] == [None] * 4
    alike, elsewhere = pulse(7), pulse(7, "in reward.py: score")
    rank, why = Watched(3, 1800).after(2000, elsewhere, alike, alike)
    assert (rank, why.partition("and ")[2][:34]) == (0, "it is in reward.py: score, while o")
    pulses = Watched(2, 100)  # nobody is waited for while something moves, nor after this process itself stood still
    for moves in range(20):
        assert pulses.after(50, pulse(moves), pulse(moves)) is None
    pulses.now += 10 * MUTE_SECONDS + ASLEEP_SECONDS
    pulses.see(0, pulse(30))
    assert pulses.overdue() is None


def heard(*says: tuple[int, Mapping[str, Any] | ChildDied], count: int = 2, silent: float = 1800) -> RankProcesses:
    ranks = RankProcesses("module", [], [], names=[f"rank {rank}" for rank in range(count)], silent_seconds=silent)
    deaths = {rank: said for rank, said in says if isinstance(said, ChildDied)}
    ranks._children = [Mock(**{"death.return_value": deaths.get(rank, ChildDied(0, ""))}) for rank in range(count)]  # type: ignore[misc]
    for rank, said in says:
        ranks._put(rank, None if isinstance(said, ChildDied) else json.dumps(said))
    return ranks


READING = {"allocated_bytes": 1, "peak_allocated_bytes": 5, "reserved_bytes": 1, "peak_reserved_bytes": 5}
READING["num_alloc_retries"] = 0


def test_the_first_ranks_events_are_passed_on_and_of_others_what_it_does_not_say_itself() -> None:
    note, own = {"event": "note", "message": "the disk is full"}, {"event": "note", "message": "the card is hot"}
    step = {"event": "step", "step": 1, "memory": READING}
    incident = {"event": "incident", "incident": {"step": 1, "phase": "backward", "remedy": "split", "message": "full"}}
    ranks = heard(
        *((0, note), (1, note), (1, own), (1, pulse(1)), (1, {"event": "log", "step": 1, "logs": {}})),
        *((1, step | {"memory": READING | {"peak_reserved_bytes": 9}}), (0, step), (1, incident), (0, incident)),
        *((1, {"event": "end"}), (1, ChildDied(0, "")), (0, {"event": "end"})),
    )
    events = [ranks.receive() for _ in range(5)]
    assert events[:2] == [note, own | {"message": "rank 1: the card is hot"}]
    assert events[2]["memory"] == READING | {"peak_reserved_bytes": 9}  # the most of any
    assert events[3]["incident"]["message"] == "rank 1: full"
    assert events[4] == {"event": "end"}


def test_the_rank_that_failed_is_named_and_not_the_one_that_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "CULPRIT_SECONDS", 0.05)
    left = (0, TrainingError(GONE).to_json())
    with pytest.raises(RankDied) as killed:
        heard(left, (1, ChildDied(-9, ""))).receive()
    assert (killed.value.rank, killed.value.code) == (1, -9)
    raised = heard(left, (1, TrainingError("The trainer raised KeyError: 'text'").to_json())).receive()
    assert (raised["rank"], raised["message"]) == (1, "The trainer raised KeyError: 'text'")
    assert heard(left).receive()["rank"] == 0  # nobody else says anything
    with pytest.raises(RankTimeout, match=r"rank 1: its progress count is 2 behind, and it is in reward.py: score"):
        heard((0, pulse(7)), (1, pulse(5, "in reward.py: score")), left).receive()
    with pytest.raises(RankTimeout, match=r"for 0 s, and it is in graph\.py"):
        heard((0, pulse(3)), count=1, silent=0).receive()
    died = heard((0, ChildDied(-6, f"terminate: {GONE}")), (1, ChildDied(-11, "")))
    with pytest.raises(RankDied) as crashed:
        died.receive()
    assert (crashed.value.rank, crashed.value.code) == (1, -11)


def test_a_probe_of_several_ranks_has_the_most_of_each_figure_and_a_refusal_first() -> None:
    small, large = (PhasePeak(allocated_bytes=each, reserved_bytes=each) for each in (1, 2))
    one = Probe(
        knobs=TRL_DEFAULTS,
        fits=True,
        measured=codec.from_json(MemoryReading, READING),
        phases={Phase.LOAD: large, Phase.FORWARD: small},
        non_torch_bytes=3,
        step_seconds=0.5,
    )
    phases = {Phase.LOAD: small, Phase.FORWARD: large, Phase.BACKWARD: large}
    other = replace(one, phases=phases, non_torch_bytes=7, fits=False, step_seconds=None, refused="rank 1: full")
    most = most_of([one, other])
    assert most.phases == {Phase.LOAD: large, Phase.FORWARD: large, Phase.BACKWARD: large}
    assert (most.fits, most.refused, most.non_torch_bytes, most.step_seconds) == (False, "rank 1: full", 7, 0.5)


def request(processes: int, **arguments: Any) -> Request:
    topology = Topology(devices=processes, uuids=tuple(f"GPU-{number}" for number in range(processes)))
    return Request(
        task="train",
        job=Job(method="sft", model="m", dataset=None, arguments=arguments),
        knobs=replace(TRL_DEFAULTS, processes=processes, sharding="fsdp2"),
        hardware=replace(named("300MiB"), uuid="GPU-0", topology=topology),
        simulate=False,
        output_dir=".",
    )


def test_each_rank_finds_its_place_its_device_and_what_accelerate_launch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("autotrain_mem.training.environment.cores", lambda: 8)
    asked = request(2, bf16=False)
    common = process_environment(asked.hardware, asked.knobs, {}, simulate=False)
    assert common == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1", "OMP_NUM_THREADS": "4"}
    first, second = rank_environments(asked, common, 4711)
    assert first["ACCELERATE_USE_FSDP"] == "true"
    assert first["ACCELERATE_MIXED_PRECISION"] == "no"
    assert {name: second[name] for name in second if second[name] != first[name]} == {"RANK": "1", "LOCAL_RANK": "1"}
    assert [asked.of_rank(rank).hardware.uuid for rank in (0, 1)] == ["GPU-0", "GPU-1"]
    alone = request(1)  # DeepSpeed finds a group where it is alone, and nobody else does
    alone = replace(alone, knobs=replace(alone.knobs, sharding="zero3"))
    (environment,) = rank_environments(alone, {}, 4711)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "4711", "ACCELERATE_USE_DEEPSPEED": "true"}
    assert place.items() <= environment.items()
    with meeting_port(alone, {}) as port:
        assert port > 0
    single = replace(alone, knobs=replace(alone.knobs, sharding=None))
    assert rank_environments(single, {"A": "1"}, 0) == [{"A": "1"}]


def test_a_port_of_the_users_that_is_taken_is_refused_and_one_that_is_held_is_for_the_first_rank_alone() -> None:
    asked = request(2)
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = str(taken.getsockname()[1])
        with (
            pytest.raises(UsageError, match=f"cannot meet at {PORT}={port}: Address already in use") as refused,
            meeting_port(asked, {PORT: port}),
        ):
            pass
    assert "Unset MASTER_PORT" in refused.value.hint
    configured = replace(asked, job=replace(asked.job, accelerate={"main_process_port": int(port)}))
    with meeting_port(configured, {}) as held:
        assert held == int(port)
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind(("", held))
        assert dist.TCPStore("127.0.0.1", held, 1, is_master=True).num_keys() >= 0
    for environment in ({}, {PORT: "4711"}):  # as launchers set it to where the machines join
        with meeting_port(configured, environment, 4711) as free:
            assert free not in (int(port), 4711)
    with meeting_port(configured, {PORT: port}, 4711) as named:
        assert named == int(port)


def test_all_ranks_end_together_in_the_grace_even_stopped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "GRACE_SECONDS", 1.0)
    (tmp_path / "rank.py").write_text(CHILD)
    names = ["rank 0", "rank 1", "rank 2"]
    logs, environments = [tmp_path / name for name in names], [{"PYTHONPATH": str(tmp_path)}] * 3
    ranks = RankProcesses("rank", environments, logs, names=names, silent_seconds=1800)
    started = [psutil.Process(child.pid) for child in ranks._children]  # this process may have others
    try:
        ranks.send([{"say": "go"}, {"say": "stop"}, {"say": "stop"}])
        answers = [ranks._next(20) for _ in range(3)]
        assert sorted((rank, said["said"]) for rank, said in answers) == [(0, "go"), (1, "stop"), (2, "stop")]
        with pytest.raises(ChildTimeout):
            ranks.receive(0.1)
        os.kill(started[0].pid, signal.SIGKILL)
        with pytest.raises(RankDied) as death:
            ranks.receive(20)
        assert (death.value.rank, death.value.code) == (0, -9)
    finally:
        began = time.monotonic()
        ranks.stop()
    assert time.monotonic() - began < 2  # one after the other they would take two graces
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started)


DEAF = """
import signal, time
from autotrain_mem.support.processes import Channel

signal.signal(signal.SIGINT, signal.SIG_IGN)
channel = Channel(ignore_interrupt=False)
channel.receive()
channel.send({"event": "start", "step": 0, "total_steps": 9})
time.sleep(0.2)
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
while not asked:
    time.sleep(0.01)
channel.send({"event": "end", "interrupted": True})
"""
"""Ignores interrupts for a while, as a process does that a shell's ``&`` started, until it has imported its modules."""


def alone(task: Task, folder: Path) -> Request:
    return replace(
        request(1), task=task, simulate=True, hardware=named("300MiB"), knobs=TRL_DEFAULTS, output_dir=str(folder)
    )


def test_a_process_that_was_deaf_to_the_first_interrupt_is_asked_again_and_an_exit_with_status_0_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    (tmp_path / "quits.py").write_text(DEAF.replace("time.sleep(0.2)", "raise SystemExit(0)"))
    monkeypatch.setattr(launch, "SIMULATED_PROCESS", "deaf")
    monkeypatch.setattr(launch, "INTERRUPT_SECONDS", 0.05)

    def interrupt(event: Event) -> None:
        if event["event"] == "start":
            raise KeyboardInterrupt

    asked, environment = alone("train", tmp_path), {"PYTHONPATH": str(tmp_path)}
    assert launch.train(asked, environment, tmp_path / "log", interrupt) == {"event": "end", "interrupted": True}
    monkeypatch.setattr(launch, "SIMULATED_PROCESS", "quits")
    ended = launch.train(asked, environment, tmp_path / "log", lambda event: None)
    assert isinstance(ended, Ending)
    assert ended.error.message == "The training process ended too early: exit status 0."
    assert ended.error.hint.startswith("A callback, a reward function or a library called exit().")
    assert cause_of(ended) == Cause(name="ended", why="exit status 0")


class FakeRanks(RankProcesses):
    """One that answers with what it is told to, once it has written a checkpoint."""

    says: list[Mapping[str, Any] | BaseException]
    calls: list[str]

    def __init__(self, module: str, environments: Any, logs: list[Path], *, names: list[str], **more: Any) -> None:
        super().__init__(module, [], [], names=names, silent_seconds=1.0)

    def send(self, requests: Sequence[Mapping[str, Any]]) -> None:
        scratch = Path(requests[0]["output_dir"])
        assert [*scratch.iterdir()] == []
        (scratch / "checkpoint-2").mkdir()
        self.calls.append(scratch.name)

    def _next(self, wait_seconds: float) -> tuple[int, Event]:
        said = self.says.pop(0)
        if isinstance(said, BaseException):
            raise said
        return 0, {**said}

    def kill(self) -> None:
        self.calls.append("kill")

    def stop(self) -> None:
        self.calls.append("stop")


def run(folder: Path, *says: Mapping[str, Any] | BaseException) -> Probe:
    FakeRanks.says, FakeRanks.calls = [*says], []
    (folder / SCRATCH_NAME / "checkpoint-1").mkdir(parents=True)  # left by one that was killed
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "RankProcesses", FakeRanks)
            return run_probe(alone("probe", folder), {}, folder)
    finally:
        assert not (folder / SCRATCH_NAME).exists()
        assert FakeRanks.calls == [SCRATCH_NAME, "kill", "stop"]


def test_a_childs_error_is_raised_with_the_place_of_its_log_and_a_full_card_is_an_answer(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="The trainer raised ValueError") as raised:
        run(tmp_path, TrainingError("The trainer raised ValueError: no", hint="Change the flag.").to_json())
    place = f"The trainer's output is in {tmp_path / PROBE_LOG_NAME}."
    assert raised.value.hint.splitlines() == ["Change the flag.", place]
    words = "Error out of memory at line 89 in file /src/csrc/pythonInterface.cpp"
    made = run(tmp_path, RankDied(0, ChildDied(1, f"step 1\n{words}\n")))
    assert (made.fits, made.refused, made.measured) == (False, words, None)


def test_any_other_end_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(InterruptedByUser, match="no step was trained"):
        run(tmp_path, KeyboardInterrupt())
    with pytest.raises(TrainingError, match=r"ended too early: it was killed by signal 9\.") as raised:
        run(tmp_path, RankDied(0, ChildDied(-9, "loading\n")))
    assert "that host memory ran out" in raised.value.hint
    assert raised.value.hint.endswith("loading")
    with pytest.raises(TrainingError, match="exit status 3"):
        run(tmp_path, RankDied(0, ChildDied(3, "")))


@pytest.mark.parametrize(("ranks", "polled_ranks", "rounds"), [(1, 32, 1), (3, 32, 25), (3, 1, 8)])
def test_ranks_stop_after_the_same_step_and_ask_each_other_about_once_a_second_or_less_often_if_they_are_many(
    ranks: int, polled_ranks: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = dist.HashStore(), []
    monkeypatch.setattr(world, "POLLED_RANKS", polled_ranks)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(world, "POLL_SECONDS", 0.1)

    def stopped_after(rank: int) -> int:
        here = world.World(SimpleNamespace(process_index=rank, world_size=ranks, ddp_timeout=20))
        for step in range(1, 1000):
            time.sleep(0.002 * (rank + 1))
            if here.poll(step >= 100 and rank == ranks - 1):
                return step
            asked.append(here._last_poll)
        raise AssertionError("no rank heard of it")

    with ThreadPoolExecutor(ranks) as pool:
        steps = set(pool.map(stopped_after, range(ranks)))
    assert len(steps) == 1
    assert {100} == steps if ranks == 1 else 100 <= min(steps) < (160 if polled_ranks > ranks else 260)
    assert len(set(asked)) <= rounds


STEPS = 6
ROWS = 4


@pytest.mark.slow
def test_ranks_that_hold_shards_end_after_the_same_step_go_on_and_train_as_one_process_does(
    qwen: Path, tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = {"max_steps": STEPS, "logging_steps": 1, "save_steps": 100, "bf16": False, "report_to": "none"}
    job = Job(method="sft", model=str(qwen), dataset=str(tmp_path / "data.jsonl"), arguments=given)

    def train(processes: int, folder: str, on_event: Callable[[Event], None], **more: Any) -> list[float]:
        (tmp_path / folder).mkdir(exist_ok=True)
        knobs = replace(TRL_DEFAULTS, per_device_train_batch_size=ROWS // processes, max_length=64)
        knobs = replace(knobs, processes=processes, sharding="fsdp2" if processes > 1 else None)
        hardware = replace(named("1GiB"), topology=Topology(devices=processes))
        asked = replace(alone("train", tmp_path / folder), knobs=knobs, hardware=hardware)
        asked = replace(asked, job=replace(job, arguments=job.arguments | more))
        environment, losses = process_environment(hardware, knobs, {}, simulate=True), []

        def hear(event: Event) -> None:
            losses.extend([event["logs"]["loss"]] if "loss" in event.get("logs", ()) else [])
            on_event(event)

        with forge.children():
            ended = launch.train(asked, environment, tmp_path / folder / "train.log", hear)
        assert isinstance(ended, dict), ended
        return losses

    def interrupt(event: Event) -> None:
        if event["event"] == "step" and event["step"] == 1:
            raise KeyboardInterrupt

    first = train(2, "two", interrupt)
    checkpoint = newest_start(tmp_path / "two")
    assert checkpoint is not None
    assert checkpoint.step == len(first) < STEPS
    assert (form_of(checkpoint.path), processes_of(checkpoint.path)) == ("shards", 2)
    rest = train(2, "two", lambda event: None, resume_from_checkpoint=str(checkpoint.path))
    undivided = train(1, "one", lambda event: None)
    assert [*first, *rest] == pytest.approx(undivided, rel=1e-5)  # sums of two halves
    two, one = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert one.keys() <= two.keys()  # a tied head is written beside the embedding that it is
    assert all((two[name] - weight).abs().max() < 1e-4 for name, weight in one.items())
