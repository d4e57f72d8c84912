"""Who is on a card, by NVML, and how much each process holds of it.

NVML lists processes that compute and processes that draw; one that does both is in both lists, with the same bytes
(``nvml.h: nvmlProcessInfo_t``). In a container it lists other process numbers than ours, or none, and on Windows it
lists no memory. What is taken and named by no process is reported as one nameless process.
"""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

from autotrain_mem.machine.nvml import NvmlError, memory_of, nvml_session
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types.experience import OtherProcess
from autotrain_mem.types.hardware import Hardware

STEADY_BYTES = 16 * MIB
"""How much free memory may differ while no process comes or goes: no context of another process is that small."""
PLAUSIBLE_BYTES = range(16 * MIB, 8 * GIB)
"""The bytes that a process may hold outside torch's allocator. A MIG instance of 14 SMs holds 61 MiB by the rule, the
largest figure ever reported with all kernels loaded is 1.5 GiB; outside of this something else was measured."""
NOBODY = 0
"""The process number for memory that NVML lists for no process: no process has it."""
UNNAMED_FROM_BYTES = 64 * MIB
"""Memory that NVML lists for no process is reported from this size on. No process that computes holds less: the
smallest context, on a MIG instance of 14 SMs, is 61 MiB (:data:`PLAUSIBLE_BYTES`) with nothing loaded into it."""


def others_on(hardware: Hardware) -> tuple[OtherProcess, ...]:
    """Returns the processes on a detected card, largest first; call it before a process of ours is there."""
    if not hardware.uuid:
        return ()
    try:
        with nvml_session() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(hardware.uuid)
            by_process, (total_bytes, free_bytes) = _listed(nvml, handle), memory_of(nvml, handle)
    except NvmlError:  # the card is lost, or hidden by now
        return ()
    listed = []
    for pid, used_bytes in by_process.items():
        name = ""  # on systems without proc(5), and for another container's process
        with contextlib.suppress(OSError):
            name = pathlib.Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
        listed.append(OtherProcess(pid=pid, name=name, used_bytes=used_bytes))
    unnamed_bytes = total_bytes - free_bytes - sum(other.used_bytes for other in listed)
    if unnamed_bytes >= UNNAMED_FROM_BYTES:
        listed.append(OtherProcess(pid=NOBODY, name="", used_bytes=unnamed_bytes))
    return tuple(sorted(listed, key=lambda other: (-other.used_bytes, other.pid)))


def held_by(hardware: Hardware, pid: int) -> int | None:
    """Returns the bytes that one process holds on a card; None if NVML does not report them."""
    with contextlib.suppress(NvmlError), nvml_session() as nvml:
        if hardware.uuid:
            return _listed(nvml, nvml.nvmlDeviceGetHandleByUUID(hardware.uuid)).get(pid) or None
    return None


def _listed(nvml: Any, handle: Any) -> dict[int, int]:
    """Returns bytes by process id; 0 if NVML lists a process without its bytes."""
    listed: dict[int, int] = {}
    for question in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        try:
            processes = getattr(nvml, question)(handle)
        except nvml.NVMLError:  # a MIG instance draws nothing
            continue
        for process in processes:
            listed[process.pid] = max(listed.get(process.pid, 0), process.usedGpuMemory or 0)
    return listed
