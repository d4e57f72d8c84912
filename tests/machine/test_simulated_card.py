"""A simulated card runs out of memory like the simulated allocator, and each requested fault occurs once in a run."""

import errno
import os
import pathlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.allocator.simulator import CachingAllocator, OutOfMemory
from autotrain_mem.machine.fault_injection import MARKS_NAME, VARIABLE, injected_faults, parse_mishaps
from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import MIB
from autotrain_mem.types import Hardware, Phase

CARD = Hardware(name="toy", origin="imagined", total_bytes=128 * MIB, free_bytes=110 * MIB, non_torch_bytes=10 * MIB)


class Died(BaseException):
    """Raised instead of killing this process."""


@pytest.fixture(autouse=True)
def _killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        raise Died

    monkeypatch.setattr(os, "kill", kill)


class Process:
    def __init__(self) -> None:
        self.gpu = SimulatedGpu(CARD)
        self.phase = Phase.FORWARD
        self._blocks = 0

    def allocate(self, count: int = 1, size_bytes: int = 512) -> None:
        for _ in range(count):
            self._blocks += 1
            self.gpu.allocate(self._blocks, size_bytes)

    def save(self, checkpoint: pathlib.Path) -> None:
        """Writes a checkpoint as transformers does, with weights and state around the optimizer."""
        before, self.phase = self.phase, Phase.SAVE
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_bytes(bytes(100_000))
        torch.save({"step": torch.zeros(1000)}, checkpoint / "optimizer.pt")
        (checkpoint / "trainer_state.json").write_text("{}")
        self.phase = before


@contextmanager
def process(text: str, folder: pathlib.Path) -> Iterator[Process]:
    started = Process()
    with injected_faults(started.gpu, {VARIABLE: text}, folder, lambda: started.phase):
        yield started


def test_the_named_allocation_of_a_phase_is_refused_as_by_torch_and_patches_are_undone(tmp_path: pathlib.Path) -> None:
    before = torch.save
    with process("oom:backward:3 kill:save:9", tmp_path) as run:
        assert torch.save is not before
        run.allocate(10)
        run.phase = Phase.BACKWARD
        run.allocate(2)
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 5\.00 MiB\. GPU 0"):
            run.allocate(size_bytes=5 * MIB)
        run.allocate(10)
    assert run.gpu.memory_stats()["num_ooms"] == 1
    assert torch.save is before
    with process("", tmp_path / "other") as run:
        assert run.gpu.before_allocation is None
    assert not (tmp_path / "other").exists()


def test_each_fault_occurs_once_and_a_second_kill_in_the_second_process(tmp_path: pathlib.Path) -> None:
    for done in (2, 4):
        with process("kill:5 kill:3", tmp_path) as run, pytest.raises(Died):
            run.allocate(10)
        assert run.gpu.reading().allocated_bytes == 512 * done
    with process("kill:5 kill:3", tmp_path) as last:
        last.allocate(10)


def test_another_process_takes_free_memory_also_after_a_restart(tmp_path: pathlib.Path) -> None:
    with process("taken:200MiB:2", tmp_path) as run:
        run.allocate(size_bytes=60 * MIB)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match=r"of which 0 bytes is free"):
                run.allocate(size_bytes=20 * MIB)
    tmp_path /= "killed"
    tmp_path.mkdir()
    with process("taken:90MiB:2 kill:3", tmp_path) as first, pytest.raises(Died):
        first.allocate(3)
    with process("taken:90MiB:2 kill:3", tmp_path) as second, pytest.raises(torch.OutOfMemoryError):
        second.allocate(size_bytes=20 * MIB)


@pytest.mark.parametrize(
    ("text", "ends"), [("kill:save:2", Died), ("disk:save:2", OSError), ("oom:save:2", torch.OutOfMemoryError)]
)
def test_writing_the_second_checkpoint_fails_in_the_middle_of_a_file(
    text: str, ends: type[BaseException], tmp_path: pathlib.Path
) -> None:
    with process(text, tmp_path) as run:
        run.save(tmp_path / "checkpoint-1")
        with pytest.raises(ends) as raised:
            run.save(tmp_path / "checkpoint-2")
    whole, half = ((tmp_path / name / "optimizer.pt").stat().st_size for name in ("checkpoint-1", "checkpoint-2"))
    assert half == pytest.approx(whole / 2, rel=0.02)  # torch names the file in it, and here there is none yet
    with pytest.raises(RuntimeError):
        torch.load(tmp_path / "checkpoint-2" / "optimizer.pt")
    assert not (tmp_path / "checkpoint-2" / "trainer_state.json").exists()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    if isinstance(raised.value, OSError):
        assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize(("text", "torn"), [("torn:save:1", "model.safetensors"), ("torn:save:1:optimizer.pt", "")])
def test_a_complete_checkpoint_is_truncated(text: str, torn: str, tmp_path: pathlib.Path) -> None:
    with process(text, tmp_path) as run:
        run.allocate(5)
        run.save(tmp_path / "checkpoint-1")
        sizes = {path.name: path.stat().st_size for path in (tmp_path / "checkpoint-1").iterdir()}
        with pytest.raises(Died):
            run.allocate()
    after = {path.name: path.stat().st_size for path in (tmp_path / "checkpoint-1").iterdir()}
    name = torn or "optimizer.pt"
    assert after == sizes | {name: sizes[name] // 2}


def test_the_disk_is_full_except_for_checkpoints_until_the_training_ends(tmp_path: pathlib.Path) -> None:
    def write(name: str) -> None:
        (tmp_path / name).write_text("line")

    with process("disk:3", tmp_path) as run:
        run.allocate(2)
        write("memory.jsonl")
        run.allocate()
        for act in (lambda: write("plan.json"), lambda: os.write(2, b"line")):
            with pytest.raises(OSError, match="No space left on device"):
                act()
        run.save(tmp_path / "checkpoint-1")
    with process("disk:3", tmp_path) as another:
        another.allocate(5)
        write("run.json")
    os.write(2, b"")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [MARKS_NAME, "checkpoint-1", "memory.jsonl", "run.json"]


def test_unknown_faults_are_listed_with_the_syntax_and_a_mark_is_the_users_own_word() -> None:
    wrong = ["oom:sideways:3", "kill:0", "taken:3GB:5", "torn:save:1:../x"]
    with pytest.raises(UsageError) as raised:
        parse_mishaps(" ".join([*wrong, "kill:7"]))
    assert raised.value.message == f"{VARIABLE} holds unknown faults: {', '.join(wrong)}."
    assert "taken:SIZE:N " in raised.value.hint
    text = "oom:optimizer_step:4 taken:1048576B:5 taken:7B:5 kill:2 oom:save:2 kill:save:1 torn:save:3:a.pt "
    text += "rot:save:2 rot:save:1:a.pt disk:7"
    assert " ".join(fault.text for fault in parse_mishaps(f"{text} count rank:1:kill:2", rank=0)) == text


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60 * MIB)), max_size=20), st.booleans())
def test_it_behaves_like_the_allocator_and_raises_its_message(program: list[tuple[bool, int]], grows: bool) -> None:
    chosen = AllocatorSettings(grows=grows)
    gpu = SimulatedGpu(CARD, chosen)
    allocator = CachingAllocator(100 * MIB, chosen, total_bytes=128 * MIB, outside_bytes=10 * MIB)
    addresses: dict[int, int] = {}
    for number, (frees, size) in enumerate(program):
        said = None
        try:
            addresses[number] = allocator.malloc(size)
        except OutOfMemory as error:
            said = str(error)
        if said is None:
            gpu.allocate(number, size)
        else:
            with pytest.raises(torch.OutOfMemoryError) as raised:
                gpu.allocate(number, size)
            assert str(raised.value) == said
        if frees and number in addresses:
            allocator.free(addresses[number])
        if frees:
            gpu.free(number)
        assert gpu.memory_stats() == allocator.memory_stats()


def test_refused_and_unknown_blocks_may_be_freed_and_other_streams_keep_up() -> None:
    full = SimulatedGpu(replace(CARD, free_bytes=CARD.non_torch_bytes - 1))
    with pytest.raises(torch.OutOfMemoryError):
        full.allocate(1, 1)
    gpu = SimulatedGpu(CARD)
    with pytest.raises(torch.OutOfMemoryError):
        gpu.allocate(1, 101 * MIB)
    gpu.allocate(2, 30 * MIB)
    gpu.record_stream(2, 1)
    for number in (1, 2, 2, 3):
        gpu.free(number)
    assert gpu.reading().allocated_bytes == 0
    gpu.allocate(4, 30 * MIB)
    assert gpu.reading().reserved_bytes == 30 * MIB


def test_a_block_that_is_freed_during_an_allocation_waits_for_its_end_as_another_threads_allocation_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, malloc, seen = SimulatedGpu(CARD), CachingAllocator.malloc, list[bool]()
    gpu.allocate(0, MIB)
    allocating = threading.Thread(target=gpu.allocate, args=(2, MIB))

    def interrupted(allocator: CachingAllocator, size_bytes: int, stream: int = 0) -> int:
        if not seen:
            gpu.free(0)
            assert allocator.allocated_bytes == MIB  # not yet
            elsewhere = threading.Thread(target=gpu.free, args=(1,))
            for thread, seconds in ((elsewhere, 10), (allocating, 0.05)):
                thread.start()
                thread.join(seconds)
                seen.append(thread.is_alive())
        return malloc(allocator, size_bytes, stream)

    monkeypatch.setattr(CachingAllocator, "malloc", interrupted)
    gpu.allocate(1, MIB)
    allocating.join(10)
    assert seen == [False, True]
    assert gpu.reading().allocated_bytes == MIB, "of the other thread"
