"""Describes this machine except its cards: memory, cores, disks, network, compiler.

Memory is limited by the tightest limit of this process's control group and its parents, from the kernel's files:

- version 2, ``memory.max``, ``memory.current`` and ``memory.stat``: kernel, Documentation/admin-guide/cgroup-v2.rst,
  "Memory Interface Files";
- version 1, ``memory.limit_in_bytes``, ``memory.usage_in_bytes`` and ``memory.stat``: cgroup-v1/memory.rst.

File pages can be reclaimed, so they count as free, as in ``MemAvailable`` (``mm/show_mem.c: si_mem_available``).
``ulimit -v``, swap and swap limits are ignored: swapped memory is too slow for training.
"""

import contextlib
import itertools
import os
import pathlib
import shlex
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotrain_mem.support.units import format_bytes

ROOT = pathlib.Path("/")


def existing(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def free_disk_bytes(folder: str | pathlib.Path) -> int:
    """Returns the free bytes of the disk that a folder, which need not exist, would be on."""
    return shutil.disk_usage(existing(pathlib.Path(folder))).free


def lacks_inodes(folder: str | pathlib.Path) -> bool:
    """Returns whether a disk can hold no more files, whatever bytes are free: the system then reports a full disk
    (statvfs(3); ``f_files`` is 0 on a disk without a limit, such as of btrfs)."""
    status = os.statvfs(existing(pathlib.Path(folder)))
    return bool(status.f_files) and not status.f_favail


NO_INODES = "the disk has no inode left for another file (see df -i)"


def free_room(folder: str | pathlib.Path) -> str:
    """Returns the free room of a folder's disk as the end of a sentence: ``whose disk has 2.00 GiB free``."""
    free = f"whose disk has {format_bytes(free_disk_bytes(folder))} free"
    return f"{free}, but {NO_INODES}" if lacks_inodes(folder) else free


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Holds the total memory and what is available without swapping, in bytes."""

    total_bytes: int
    available_bytes: int
    source: str
    """The source of the figures, for the user."""


_MOUNTS = {
    "": ("sys/fs/cgroup", "sys/fs/cgroup/unified"),
    "memory": ("sys/fs/cgroup/memory",),
    "cpu": ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct"),
}
"""Controller -> the folders at which its groups may be mounted. Lines of ``/proc/self/cgroup``
(``number:controllers:path``) name controllers only in version 1; the empty name stands for version 2."""


def host_memory(root: pathlib.Path = ROOT) -> HostMemory:
    """Returns the memory of the machine, or of its container if that has less. ``root`` holds ``/proc``, ``/sys``."""
    import psutil  # takes 20 ms

    memory = psutil.virtual_memory()
    limits = list(container_limits(root))
    total_bytes = min([memory.total, *(limit.total_bytes for limit in limits)])
    available_bytes = min([memory.available, *(limit.available_bytes for limit in limits)])
    machine = (memory.total, memory.available) == (total_bytes, available_bytes)
    return HostMemory(
        total_bytes=total_bytes,
        available_bytes=available_bytes,
        source="memory: psutil" if machine else "memory: the limit of this container (control group)",
    )


def container_limits(root: pathlib.Path = ROOT) -> Iterator[HostMemory]:
    """Yields the limits of this process's control group and its parents. ``max`` or a huge number means no limit."""
    versions = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    for folder in itertools.chain.from_iterable(_groups(root)):
        for limit, usage, prefix in versions:
            with contextlib.suppress(OSError, ValueError):
                limit_bytes, used_bytes = (int((folder / name).read_text(encoding="ascii")) for name in (limit, usage))
                rows = _rows(folder / "memory.stat")
                used_bytes -= sum(int(rows.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
                free_bytes = max(0, limit_bytes - max(0, used_bytes))
                yield HostMemory(total_bytes=limit_bytes, available_bytes=free_bytes, source=limit)
                break


def oom_kills(root: pathlib.Path = ROOT) -> int:
    """Counts the kernel's OOM kills in this control group, or else on the machine: ``memory.events`` (cgroup-v2.rst),
    ``memory.oom_control`` (cgroup-v1/memory.rst), or ``/proc/vmstat``."""
    counts = [own / name for own, *_ in _groups(root) for name in ("memory.events", "memory.oom_control")]
    for file in (*counts, root / "proc/vmstat"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(_rows(file)["oom_kill"])
    return 0


def _rows(file: pathlib.Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in file.read_text(encoding="ascii").splitlines())


def cores(root: pathlib.Path = ROOT) -> int:
    """Counts the cores that this process may use: a batch system, or a container's quota of processor time, may limit
    them (cgroup-v2.rst, ``cpu.max``; scheduler/sched-bwc.rst for version 1, where -1 is no limit)."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    for folder in itertools.chain.from_iterable(_groups(root)):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):
                texts = [(folder / name).read_text(encoding="ascii") for name in names]
                quota, period = map(int, " ".join(texts).split())  # "max" is not a number
                if quota > 0:
                    count = min(count, max(1, quota // period))
    return count


def _groups(root: pathlib.Path) -> Iterator[list[pathlib.Path]]:
    """Yields the folder of this process's cgroup of each version, where it may be mounted, and those of its parents."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for controller, mounts in _MOUNTS.items():
        paths = [path for _, names, path in (x.split(":", 2) for x in lines) if controller in names.split(",")]
        for mount in mounts if paths else ():
            group = pathlib.PurePosixPath(paths[0].lstrip("/"))
            yield [root / mount / each for each in (group, *group.parents)]


def interface_to(address: str) -> str | None:
    """Returns the network interface to an address, such as ``eth0``; None if it cannot be reached. Sends nothing."""
    import psutil

    try:
        family, kind, _, _, there = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as datagrams:
            datagrams.connect(there)
            here = datagrams.getsockname()[0]
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, held in interfaces if here in {each.address.partition("%")[0] for each in held}), None)


def missing_to_compile(environment: Mapping[str, str]) -> list[str]:
    """Returns the tools that the training's ``PATH`` lacks to compile DeepSpeed's operators for the host
    (``torch/utils/cpp_extension.py: verify_ninja_availability, get_cxx_compiler``)."""
    compiler = shlex.split(environment.get("CXX", "c++"))[:1] or ["c++"]
    return [name for name in ("ninja", *compiler) if shutil.which(name, path=environment.get("PATH")) is None]
