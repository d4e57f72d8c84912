"""Asks NVML, NVIDIA's management library: the one way in which the parent learns about cards, since it opens none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class NvmlError(Exception):
    """Raised when NVML does not answer; the message says why."""


class NoNvml(NvmlError):
    """NVML is not here, or does not start: without NVIDIA's driver."""


@contextlib.contextmanager
def nvml_session() -> Iterator[Any]:
    """Starts and stops NVML around a block; pynvml's errors inside become :class:`NvmlError`."""
    try:
        import pynvml  # a machine without NVIDIA's driver does without it

        pynvml.nvmlInit()
    except ImportError as error:
        raise NoNvml("NVML is not installed") from error
    except pynvml.NVMLError as error:
        raise NoNvml(f"NVML does not start ({error})") from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise NvmlError(f"NVML does not answer ({error})") from error
    finally:
        pynvml.nvmlShutdown()


def ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Returns NVML's answer, or None if the card or the driver does not support the query."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def memory_of(nvml: Any, handle: Any) -> tuple[int, int]:
    """Returns the device's total and free bytes, as torch counts them.

    NVML's total is all that is soldered on; CUDA, and so torch, counts without what driver and firmware reserve. The
    second version of NVML's memory query tells that part: on a card of 12288 MiB with 380 MiB reserved, torch's OOM
    message said 11.63 GiB, which is 12288 - 380 (public notes, August 2026). Free is what neither the reserve nor any
    process holds. Both are 0 where the memory is the host's.
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
