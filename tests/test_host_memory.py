"""This machine's memory: the tightest limit of a container counts, and what the kernel can take back is free."""

from __future__ import annotations

import os
import pathlib
from types import SimpleNamespace

import psutil
import pytest

from autotrain_mem.host import container_limits, cores, host_memory, oom_kills
from autotrain_mem.units import GIB, MIB

UNLIMITED_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=48 * GIB))


def group(root: pathlib.Path, line: str, folder: str, files: dict[str, object]) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    with open(root / "proc/self/cgroup", "a") as file:
        file.write(line + "\n")
    limited(root, folder, files)


def limited(root: pathlib.Path, folder: str, files: dict[str, object]) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / folder / name).write_text(f"{content}\n")


def v2(limit: object, used: int, file_pages: int = 0) -> dict[str, object]:
    rows = f"anon 1\ninactive_file {file_pages // 2}\nactive_file {file_pages - file_pages // 2}\nslab 7"
    return {"memory.max": limit, "memory.current": used, "memory.stat": rows}


def v1(limit: int, used: int) -> dict[str, object]:
    rows = f"cache 5\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": rows}


def test_without_control_groups_the_machine_speaks(tmp_path: pathlib.Path) -> None:
    memory = host_memory(tmp_path)
    assert (memory.total_bytes, memory.available_bytes, memory.source) == (64 * GIB, 48 * GIB, "memory: psutil")


def test_a_container_has_its_limit_less_what_it_uses(tmp_path: pathlib.Path) -> None:
    group(tmp_path, "0::/", "sys/fs/cgroup", v2(8 * GIB, 3 * GIB))
    memory = host_memory(tmp_path)
    assert (memory.total_bytes, memory.available_bytes) == (8 * GIB, 5 * GIB)
    assert "container" in memory.source


def test_file_pages_can_be_taken_back(tmp_path: pathlib.Path) -> None:
    group(tmp_path, "0::/", "sys/fs/cgroup", v2(8 * GIB, 8 * GIB, file_pages=6 * GIB))
    assert host_memory(tmp_path).available_bytes == 6 * GIB


def test_a_limit_of_a_group_above_counts_too(tmp_path: pathlib.Path) -> None:
    group(tmp_path, "0::/user.slice/job", "sys/fs/cgroup/user.slice/job", v2("max", GIB))
    limited(tmp_path, "sys/fs/cgroup/user.slice", v2(4 * GIB, 2 * GIB))
    assert host_memory(tmp_path).available_bytes == 2 * GIB


def test_version_1_is_read_beside_version_2(tmp_path: pathlib.Path) -> None:
    group(tmp_path, "0::/", "sys/fs/cgroup/unified", {"cgroup.procs": 1})
    group(tmp_path, "4:cpu,memory:/docker/x", "sys/fs/cgroup/memory/docker/x", v1(UNLIMITED_V1, 2 * GIB))
    assert host_memory(tmp_path).source == "memory: psutil"
    limited(tmp_path, "sys/fs/cgroup/memory/docker", v1(16 * GIB, 2 * GIB))
    assert host_memory(tmp_path).available_bytes == 15 * GIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: pathlib.Path) -> None:
    group(tmp_path, "0::/", "sys/fs/cgroup", v2(GIB, 2 * GIB))
    assert host_memory(tmp_path).available_bytes == 0


@pytest.mark.parametrize("content", ["", "garbage", "-", "\n\n"])
def test_figures_that_cannot_be_read_are_no_limit(tmp_path: pathlib.Path, content: str) -> None:
    group(tmp_path, "0::/", "sys/fs/cgroup", {**v2(GIB, 0), "memory.max": content})
    assert list(container_limits(tmp_path)) == []


def test_a_limit_beyond_the_machine_changes_nothing(tmp_path: pathlib.Path) -> None:
    group(tmp_path, "0::/", "sys/fs/cgroup", v2(512 * GIB, 100 * MIB))
    assert host_memory(tmp_path).available_bytes == 48 * GIB


def test_the_cores_are_those_that_this_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == os.cpu_count()


def test_this_machine_can_be_read() -> None:
    assert all(limit.available_bytes <= limit.total_bytes for limit in container_limits())


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/job", "sys/fs/cgroup/job/memory.events", "low 0\noom 3\noom_kill 2"),
        ("4:memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2"),
        ("0::/", "proc/vmstat", "nr_free_pages 7\noom_kill 2"),
    ],
)
def test_what_the_kernel_killed_is_counted_by_group_or_machine(
    tmp_path: pathlib.Path, line: str, file: str, text: str
) -> None:
    path = pathlib.PurePath(file)
    group(tmp_path, line, str(path.parent), {path.name: text})
    assert oom_kills(tmp_path) == 2


def test_where_nothing_counts_nothing_was_killed(tmp_path: pathlib.Path) -> None:
    assert oom_kills(tmp_path) == 0
