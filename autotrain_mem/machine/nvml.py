"""Queries NVML, NVIDIA's management library, from the parent, which creates no CUDA context."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any


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
