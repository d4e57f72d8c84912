"""This machine's memory: the tightest limit of a container counts, and what the kernel can take back is free."""

import os
import pathlib
from types import SimpleNamespace

import psutil
import pytest

from autotrain_mem.support.host import container_limits, cores, host_memory, oom_kills
from autotrain_mem.support.units import GIB

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
    assert oom_kills(tmp_path) == 0


@pytest.mark.parametrize(
    ("limit", "used", "file_pages", "total", "available"),
    [(8, 3, 0, 8, 5), (8, 8, 6, 8, 6), (1, 2, 0, 1, 0), (512, 1, 0, 64, 48)],
    ids=["limited", "file pages can be taken back", "over its limit", "beyond the machine"],
)
def test_a_container_has_its_limit_less_what_it_uses(
    tmp_path: pathlib.Path, limit: int, used: int, file_pages: int, total: int, available: int
) -> None:
    group(tmp_path, "0::/", "sys/fs/cgroup", v2(limit * GIB, used * GIB, file_pages * GIB))
    memory = host_memory(tmp_path)
    assert (memory.total_bytes, memory.available_bytes) == (total * GIB, available * GIB)
    assert ("container" in memory.source) is (total < 64)


def test_groups_above_count_and_version_1_is_read_beside_version_2(tmp_path: pathlib.Path) -> None:
    group(tmp_path / "2", "0::/user.slice/job", "sys/fs/cgroup/user.slice/job", v2("max", GIB))
    limited(tmp_path / "2", "sys/fs/cgroup/user.slice", v2(4 * GIB, 2 * GIB))
    assert host_memory(tmp_path / "2").available_bytes == 2 * GIB
    group(tmp_path, "0::/", "sys/fs/cgroup/unified", {"cgroup.procs": 1})
    group(tmp_path, "4:cpu,memory:/docker/x", "sys/fs/cgroup/memory/docker/x", v1(UNLIMITED_V1, 2 * GIB))
    assert host_memory(tmp_path).source == "memory: psutil"
    limited(tmp_path, "sys/fs/cgroup/memory/docker", v1(16 * GIB, 2 * GIB))
    assert host_memory(tmp_path).available_bytes == 15 * GIB


@pytest.mark.parametrize("content", ["", "garbage", "-", "\n\n"])
def test_figures_that_cannot_be_read_are_no_limit(tmp_path: pathlib.Path, content: str) -> None:
    group(tmp_path, "0::/", "sys/fs/cgroup", {**v2(GIB, 0), "memory.max": content})
    assert list(container_limits(tmp_path)) == []


def test_the_cores_are_those_that_this_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == os.cpu_count()


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
