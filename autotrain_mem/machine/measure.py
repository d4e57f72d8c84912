"""Measures what a training process holds outside torch's allocator, on the card that is here.

A child process does what a training step does, in small (``measure_process``), says what torch reserved, and holds
still; NVML says what it holds in all. This process never opens a CUDA context. The result is kept in the store, for
each card, driver, torch and way of loading kernels, so that it costs seconds once.

NVML's figure for the process is taken where it gives one. In a container it lists other process numbers than ours, or
none, and on Windows it lists no memory: there it is what was free before less what is free while the child holds still,
which counts only if all of it is free again once the child has ended; else another process came or went.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotrain_mem.machine.detect import nvml_session
from autotrain_mem.processes import Child, ChildDied, ChildTimeout
from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.store import Store
from autotrain_mem.units import GIB, MIB, format_bytes
from autotrain_mem.versions import installed_version

CHILD_MODULE = "autotrain_mem.machine.measure_process"
TIME_LIMIT_SECONDS = 120.0
"""Importing torch takes most of it: 5 s from a warm disk, a minute from a network's."""
RELEASE_SECONDS = 10.0
"""How long the driver may take to give back what a process held."""
STEADY_BYTES = 16 * MIB
"""How much free memory may differ before and after the child: no context of another process is that small."""
PLAUSIBLE_BYTES = range(16 * MIB, 8 * GIB)
"""A MIG instance of 14 SMs holds 61 MiB by the rule, the largest figure ever reported with all kernels loaded 1.5 GiB;
outside of this something else was measured."""
KIND = "non_torch"
"""What the store calls these results."""


class NotMeasured(Exception):
    """Why there is no figure, in a few words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A child that holds still."""

    pid: int
    reserved_bytes: int
    """What torch's allocator holds of the card."""


Run = Callable[[Hardware], contextlib.AbstractContextManager[Loaded]]
"""Runs a child on a card: inside the context it holds still, after it the child has ended. Raises NotMeasured."""


def measured(hardware: Hardware, store: Store, run: Run | None = None) -> Hardware:
    """The same card with the measured figure; with the table's where it cannot be measured, and why in ``source``.

    Args:
        store: Where results are kept.
        run: Starts the child; None for the real one.
    """
    try:
        non_torch_bytes = _measured_bytes(hardware, run or run_child, store)
    except NotMeasured as reason:
        return replace(hardware, source=f"{hardware.source}, not measured: {reason}")
    known, _, _ = hardware.source.partition("; outside torch: ")
    return replace(hardware, non_torch_bytes=non_torch_bytes, source=f"{known}; outside torch: measured")


def _measured_bytes(hardware: Hardware, run: Run, store: Store) -> int:
    with nvml_session() as nvml:
        if isinstance(nvml, str):
            raise NotMeasured(nvml)
        key = _key(nvml, hardware)
        kept = store.get(KIND, key)
        if isinstance(kept, int) and kept in PLAUSIBLE_BYTES:
            return kept
        try:
            outside_bytes = _measure(nvml, hardware, run)
        except nvml.NVMLError as error:
            raise NotMeasured(f"NVML does not answer ({error})") from error
    if outside_bytes not in PLAUSIBLE_BYTES:
        raise NotMeasured(f"{format_bytes(outside_bytes)} cannot be right")
    store.put(KIND, key, outside_bytes)
    return outside_bytes


# -- the measurement -------------------------------------------------------------------------------------------------


def _measure(nvml: Any, hardware: Hardware, run: Run) -> int:
    handle = nvml.nvmlDeviceGetHandleByUUID(hardware.uuid)
    strangers = _by_process(nvml, handle)
    free_before = _free_bytes(nvml, handle)
    with run(hardware) as loaded:
        own_bytes = None if loaded.pid in strangers else _by_process(nvml, handle).get(loaded.pid)
        taken_bytes = free_before - _free_bytes(nvml, handle)
    if own_bytes is None:
        deadline = time.monotonic() + RELEASE_SECONDS
        while abs(_free_bytes(nvml, handle) - free_before) > STEADY_BYTES:
            if time.monotonic() > deadline:  # else the card is as it was before the child
                raise NotMeasured("another process took or freed memory meanwhile")
            time.sleep(0.1)
        own_bytes = taken_bytes
    return own_bytes - loaded.reserved_bytes


def _by_process(nvml: Any, handle: Any) -> Mapping[int, int | None]:
    """Bytes by process number, None where NVML knows of the process but not of its bytes."""
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return {}
    return {process.pid: process.usedGpuMemory or None for process in processes}


def _free_bytes(nvml: Any, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).free)  # the same in both versions of the query: detect._memory


@contextlib.contextmanager
def run_child(
    hardware: Hardware, module: str = CHILD_MODULE, limit_seconds: float = TIME_LIMIT_SECONDS
) -> Iterator[Loaded]:
    """The real child, which sees this one card."""
    child = Child(module, {"CUDA_VISIBLE_DEVICES": str(hardware.uuid)})
    try:
        answer = child.receive(limit_seconds)
        if "error" in answer:
            raise NotMeasured(str(answer["error"]))
        yield Loaded(pid=child.pid, reserved_bytes=int(answer["reserved_bytes"]))
    except ChildTimeout as timeout:
        raise NotMeasured(f"no answer within {limit_seconds:.0f} s") from timeout
    except ChildDied as death:
        raise NotMeasured(f"the process ended with status {death.code}") from death
    finally:
        child.kill()  # it holds nothing that needs saving
        child.stop()


# -- the kept results ------------------------------------------------------------------------------------------------


def _key(nvml: Any, hardware: Hardware) -> dict[str, Any]:
    """All that the figure depends on. Not the card's number: two cards of one kind hold the same."""
    try:
        driver = nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError:
        driver = None
    return {
        "card": hardware.name,
        "compute_capability": list(hardware.compute_capability or ()),
        "driver": driver,
        "torch": installed_version("torch"),
        "bitsandbytes": installed_version("bitsandbytes"),
        "module_loading": os.environ.get("CUDA_MODULE_LOADING"),
    }
