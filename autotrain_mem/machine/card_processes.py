"""Lists the processes on a card with the memory of each, as NVML reports them.

In a container NVML lists the host's process ids, or none. On Windows it lists no memory.
"""

import contextlib
import pathlib
from typing import Any

from autotrain_mem.machine.nvml import NvmlError, memory_of, nvml_session
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Hardware
from autotrain_mem.types.experience import OtherProcess

STEADY_BYTES = 16 * MIB
"""A change of free memory up to this size is ignored: every CUDA context of a new process is larger."""
PLAUSIBLE_BYTES = range(16 * MIB, 8 * GIB)
"""The bytes that a process may hold outside torch's allocator. ``overhead`` gives 61 MiB for a MIG instance of 14 SMs;
the largest figure ever reported with all kernels loaded is 1.5 GiB. Any other figure is a measuring error."""
NOBODY = 0
"""The process id for memory that NVML lists for no process."""
UNNAMED_FROM_BYTES = 64 * MIB
"""The smallest amount of memory without a process that is reported. A context takes 61 MiB or more."""


def others_on(hardware: Hardware) -> tuple[OtherProcess, ...]:
    """Returns the processes on a detected card, largest first; call it before our own process starts.

    Memory that no listed process holds is reported as one nameless process.
    """
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
    """Returns bytes by process id; 0 if NVML lists a process without its bytes. A process that computes and draws is in
    both of NVML's lists, with the same bytes (``nvml.h: nvmlProcessInfo_t``)."""
    listed: dict[int, int] = {}
    for question in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        try:
            processes = getattr(nvml, question)(handle)
        except nvml.NVMLError:  # a MIG instance has no graphics
            continue
        for process in processes:
            listed[process.pid] = max(listed.get(process.pid, 0), process.usedGpuMemory or 0)
    return listed
