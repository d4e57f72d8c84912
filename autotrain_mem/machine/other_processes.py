"""Asks who else holds memory on a card, and how much of it a process of ours does: NVML's word, without a CUDA context.
Of an AMD card it is amdsmi's.

NVML lists processes that compute and processes that draw; one that does both is in both lists, with the same bytes. In
a container it lists other process numbers than ours, or none, and on Windows it lists no bytes
(``nvml.h: nvmlProcessInfo_t``). What is taken and named by nobody is told as one nameless process.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from autotrain_mem.machine.amd import processes_on, taken_bytes
from autotrain_mem.machine.detect import nvml_session
from autotrain_mem.support.units import MIB
from autotrain_mem.types.experience import OtherProcess
from autotrain_mem.types.hardware import Hardware

NOBODY = 0
"""The process number of what is taken by nobody that NVML names: no process has it."""
UNNAMED_FROM_BYTES = 64 * MIB
"""What is taken and named by nobody is told from this size on. No process that computes holds less: the smallest
context, on a MIG instance of 14 SMs, is 61 MiB (``machine.measure.PLAUSIBLE_BYTES``) with nothing loaded into it."""


def others_on(hardware: Hardware) -> tuple[OtherProcess, ...]:
    """Everybody on a detected card, largest first. Ask before a process of ours is there; empty for any other card."""
    told = _of_amd(hardware) if hardware.architecture else _of_nvidia(hardware)
    if told is None:
        return ()
    by_process, all_bytes = told
    listed = [OtherProcess(pid=pid, name=_name(pid), used_bytes=used) for pid, used in by_process.items()]
    unnamed_bytes = all_bytes - sum(other.used_bytes for other in listed)
    if unnamed_bytes >= UNNAMED_FROM_BYTES:
        listed.append(OtherProcess(pid=NOBODY, name="", used_bytes=unnamed_bytes))
    return tuple(sorted(listed, key=lambda other: (-other.used_bytes, other.pid)))


def held_by(hardware: Hardware, pid: int) -> int | None:
    """All that one process holds of a card; None where NVML, or amdsmi, does not tell."""
    if hardware.architecture:
        return (processes_on(hardware) or {}).get(pid) or None
    with _opened(hardware) as opened:
        return None if opened is None else _listed(*opened).get(pid) or None


def _of_amd(hardware: Hardware) -> tuple[dict[int, int], int] | None:
    """Bytes by process, and all that is taken; what the driver keeps for itself is told as nobody's."""
    by_process = processes_on(hardware)
    return None if by_process is None else (by_process, taken_bytes(hardware))


def _of_nvidia(hardware: Hardware) -> tuple[dict[int, int], int] | None:
    with _opened(hardware) as opened:
        return None if opened is None else (_listed(*opened), _taken_bytes(*opened))


@contextlib.contextmanager
def _opened(hardware: Hardware) -> Iterator[tuple[Any, Any] | None]:
    """NVML, and the card in its words; None where there is no such card, it does not answer, or there is no NVML."""
    with nvml_session() as nvml:
        opened = None
        if not isinstance(nvml, str) and hardware.uuid:
            with contextlib.suppress(nvml.NVMLError):  # the card is lost, or hidden by now
                opened = nvml, nvml.nvmlDeviceGetHandleByUUID(hardware.uuid)
        yield opened


def _listed(nvml: Any, handle: Any) -> dict[int, int]:
    """Bytes by process number; 0 where NVML knows of a process but not of its bytes."""
    listed: dict[int, int] = {}
    for question in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        try:
            processes = getattr(nvml, question)(handle)
        except nvml.NVMLError:  # a MIG instance draws nothing
            continue
        for process in processes:
            listed[process.pid] = max(listed.get(process.pid, 0), process.usedGpuMemory or 0)
    return listed


def _taken_bytes(nvml: Any, handle: Any) -> int:
    """Counts what processes hold without the driver's reserve; 0 where it does not tell that (``detect._memory``)."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        return 0
    return int(memory.total - memory.reserved - memory.free)


def _name(pid: int) -> str:
    """Reads the name as Linux tells it (``proc(5)``); empty for another system's process, or another container's."""
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
