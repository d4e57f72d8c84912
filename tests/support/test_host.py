"""This machine's memory, its network, and what DeepSpeed compiles on it."""

import os
import pathlib
from types import SimpleNamespace

import psutil
import pytest

from autotrain_mem.support.host import container_limits, cores, host_memory, interface_to, missing_to_compile, oom_kills
from autotrain_mem.support.units import GIB
from autotrain_mem.training.process import world

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


def test_without_control_groups_the_machines_memory_counts(tmp_path: pathlib.Path) -> None:
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


def test_parent_groups_count_both_versions_are_read_and_what_cannot_be_is_no_limit(tmp_path: pathlib.Path) -> None:
    group(tmp_path / "2", "0::/user.slice/job", "sys/fs/cgroup/user.slice/job", v2("max", GIB))
    limited(tmp_path / "2", "sys/fs/cgroup/user.slice", v2(4 * GIB, 2 * GIB))
    assert host_memory(tmp_path / "2").available_bytes == 2 * GIB
    group(tmp_path, "0::/", "sys/fs/cgroup/unified", {"cgroup.procs": 1})
    group(tmp_path, "4:cpu,memory:/docker/x", "sys/fs/cgroup/memory/docker/x", v1(UNLIMITED_V1, 2 * GIB))
    assert host_memory(tmp_path).source == "memory: psutil"
    limited(tmp_path, "sys/fs/cgroup/memory/docker", v1(16 * GIB, 2 * GIB))
    assert host_memory(tmp_path).available_bytes == 15 * GIB
    group(tmp_path / "odd", "0::/", "sys/fs/cgroup", v2(GIB, 0))
    for content in ("", "garbage", "-", "\n\n"):
        (tmp_path / "odd/sys/fs/cgroup/memory.max").write_text(content)
        assert list(container_limits(tmp_path / "odd")) == [], content


def test_the_cores_are_those_that_this_process_may_use(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7, 9}, raising=False)
    assert cores(tmp_path) == 4
    group(tmp_path / "2", "0::/pod/job", "sys/fs/cgroup/pod/job", {"cpu.max": "max 100000"})
    assert cores(tmp_path / "2") == 4
    limited(tmp_path / "2", "sys/fs/cgroup/pod", {"cpu.max": "250000 100000"})
    assert cores(tmp_path / "2") == 2
    files = {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100_000}
    group(tmp_path / "1", "4:cpu,cpuacct:/job", "sys/fs/cgroup/cpu,cpuacct/job", files)
    assert cores(tmp_path / "1") == 4
    limited(tmp_path / "1", "sys/fs/cgroup/cpu,cpuacct", {**files, "cpu.cfs_quota_us": 50_000})
    assert cores(tmp_path / "1") == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores(tmp_path) == os.cpu_count()


@pytest.mark.parametrize(
    ("line", "folder", "file", "text"),
    [
        ("0::/job", "sys/fs/cgroup/job", "memory.events", "low 0\noom 3"),
        ("4:memory:/job", "sys/fs/cgroup/memory/job", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0"),
        ("0::/", "proc", "vmstat", "nr_free_pages 7"),
    ],
)
def test_oom_kills_are_counted_by_group(tmp_path: pathlib.Path, line: str, folder: str, file: str, text: str) -> None:
    group(tmp_path, line, folder, {file: f"{text}\noom_kill 2"})
    assert oom_kills(tmp_path) == 2


def test_the_interface_to_an_address() -> None:
    assert interface_to("127.0.0.1") == world.LOOPBACK
    assert interface_to("no-such-host.invalid") is None
    for name, held in psutil.net_if_addrs().items():
        own = [each.address for each in held if each.family.name == "AF_INET"]
        assert [interface_to(address) for address in own] in ([name] * len(own), [world.LOOPBACK] * len(own))


def test_gloo_uses_the_interface_to_the_first_machine_unless_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is taken back, whatever is set meanwhile
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    for found in (None, world.LOOPBACK):
        monkeypatch.setattr(world, "interface_to", lambda address, found=found: found)
        world.find_other_machines()
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setattr(world, "interface_to", lambda address: "ib0" if address == "10.0.0.1" else None)
    world.find_other_machines()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    world.find_other_machines()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_missing_compilers_are_named(tmp_path: pathlib.Path) -> None:
    for name in ("ninja", "clang++"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    assert missing_to_compile({"PATH": str(tmp_path)}) == ["c++"]
    assert missing_to_compile({"PATH": str(tmp_path), "CXX": "clang++ -O2"}) == []
    assert missing_to_compile({"PATH": str(tmp_path / "none")}) == ["ninja", "c++"]
