"""Queries NVML, NVIDIA's management library, from the parent, which creates no CUDA context.

In a container NVML lists the host's process ids, or none. On Windows it lists no memory of processes.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Hardware
from autotrain_mem.types.experience import OtherProcess


class NvmlError(Exception):
    """Raised when a query of NVML fails; the message says why."""


class NoNvml(NvmlError):
    """Raised when NVML is not installed or does not start: there is no NVIDIA driver."""


_started_in: int | None = None
"""The process that started NVML, whose state a forked child does not inherit (NVIDIA/cuCascade#138)."""


@contextlib.contextmanager
def nvml_session() -> Iterator[Any]:
    """Yields pynvml; its errors inside the block become :class:`NvmlError`, and stop NVML.

    NVML is started once per process and stays started, as in ``torch.cuda._get_pynvml_handler``. Without persistence
    mode, the first query of each card takes 1 to 3 s, again after a stop (NVIDIA Driver Persistence, "Overview").
    """
    global _started_in
    try:
        import pynvml

        if _started_in != os.getpid():
            pynvml.nvmlInit()
            _started_in = os.getpid()
    except ImportError as error:
        raise NoNvml("NVML is not installed") from error
    except pynvml.NVMLError as error:
        raise NoNvml(f"NVML does not start ({error})") from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        _started_in = None  # so that the card can be reset, and the next query starts anew
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        raise NvmlError(f"NVML does not answer ({error})") from error


def ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Returns NVML's answer, or None if the card or the driver does not support the query."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def memory_of(nvml: Any, handle: Any) -> tuple[int, int]:
    """Returns the device's total and free bytes, as torch counts them; both are 0 for a card that shares host memory.

    NVML's total includes what driver and firmware reserve, torch's does not. The second version of NVML's query reports
    the reserve: torch's OOM message said 11.63 GiB on a card of 12288 MiB with 380 MiB reserved (public notes, August
    2026).
    """
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError_NotSupported:
        return 0, 0
    return memory.total - memory.reserved, memory.free


def nvidia_driver() -> tuple[str, int | None, str]:
    """Returns the driver's version, the newest major version of CUDA that it supports, and NVML's error, if any."""
    try:
        with nvml_session() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlSystemGetCudaDriverVersion()) // 1000, ""
    except NvmlError as error:
        return "", None, str(error)


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
