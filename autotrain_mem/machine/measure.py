"""Measures what a training process holds outside torch's allocator, on the card that is here.

A child process does what a training step does, in small (``measure_process``), says what torch reserved, and holds
still; NVML says what it holds in all. This process never opens a CUDA context. The result is kept in the store, for
each card, driver, torch and way of loading kernels, so that it costs seconds once.

NVML's figure for the process is taken where it gives one. In a container it lists other process numbers than ours, or
none, and on Windows it lists no memory: there it is what was free before less what is free while the child holds still,
which counts only if all of it is free again once the child has ended; else another process came or went.

Who else is on a card is NVML's word too. It lists processes that compute and processes that draw; one that
does both is in both lists, with the same bytes (``nvml.h: nvmlProcessInfo_t``). What is taken and named by nobody is
told as one nameless process.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotrain_mem.machine.detect import NvmlError, memory_of, nvml_session
from autotrain_mem.machine.torch_child import NoAnswer, next_answer, torch_child
from autotrain_mem.support.store import Store
from autotrain_mem.support.units import GIB, MIB, format_bytes
from autotrain_mem.support.versions import installed_versions
from autotrain_mem.types.experience import OtherProcess
from autotrain_mem.types.hardware import Hardware

RELEASE_SECONDS = 10.0
"""How long the driver may take to give back what a process held."""
STEADY_BYTES = 16 * MIB
"""How much free memory may differ before and after the child: no context of another process is that small."""
PLAUSIBLE_BYTES = range(16 * MIB, 8 * GIB)
"""A MIG instance of 14 SMs holds 61 MiB by the rule, the largest figure ever reported with all kernels loaded 1.5 GiB;
outside of this something else was measured."""
KIND = "non_torch"
"""What the store calls these results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A child that has loaded its kernels and waits."""

    pid: int
    reserved_bytes: int
    """What torch's allocator holds of the card."""


Run = Callable[[Hardware], contextlib.AbstractContextManager[Loaded]]
"""Runs a child on a card: inside the context it holds still, after it the child has ended. Raises NoAnswer."""
_NOTHING: Mapping[str, str] = {}


def measured(
    hardware: Hardware, store: Store, run: Run | None = None, *, environment: Mapping[str, str] = _NOTHING
) -> Hardware:
    """Returns the card with the measured figure; with the table's if it cannot be measured, and why in ``source``.
    Raises UnreadableGpuError if torch cannot use the card.

    Args:
        run: Starts the child; None for the real one.
        environment: What is set for the training process, over this one's environment.
    """
    try:
        run = run or (lambda card: run_child(card, environment))
        non_torch_bytes = _measured_bytes(hardware, run, store, {**os.environ, **environment})
    except NoAnswer as reason:
        return replace(hardware, source=f"{hardware.source}, not measured: {reason}")
    known, _, _ = hardware.source.partition("; outside torch: ")
    return replace(hardware, non_torch_bytes=non_torch_bytes, source=f"{known}; outside torch: measured")


def _measured_bytes(hardware: Hardware, run: Run, store: Store, variables: Mapping[str, str]) -> int:
    try:
        with nvml_session() as nvml:
            try:
                driver = nvml.nvmlSystemGetDriverVersion()
            except nvml.NVMLError:
                driver = None
            key = {  # not the card's number: two cards of one kind need the same
                "card": hardware.name,
                "compute_capability": list(hardware.compute_capability or ()),
                "driver": driver,
                **installed_versions(("torch", "bitsandbytes")),
                "module_loading": variables.get("CUDA_MODULE_LOADING"),
            }
            kept = store.get(KIND, key)
            if isinstance(kept, int) and kept in PLAUSIBLE_BYTES:
                return kept
            outside_bytes = _measure(nvml, hardware, run)
    except NvmlError as error:
        raise NoAnswer(str(error)) from error
    if outside_bytes not in PLAUSIBLE_BYTES:
        raise NoAnswer(f"{format_bytes(outside_bytes)} cannot be right")
    store.put(KIND, key, outside_bytes)
    return outside_bytes


# -- the measurement -------------------------------------------------------------------------------------------------


def _measure(nvml: Any, hardware: Hardware, run: Run) -> int:
    handle = nvml.nvmlDeviceGetHandleByUUID(hardware.uuid)
    strangers = _listed(nvml, handle)
    total_bytes, free_before = memory_of(nvml, handle)
    with run(hardware) as loaded:
        own_bytes = None if loaded.pid in strangers else _listed(nvml, handle).get(loaded.pid) or None
        _, free_meanwhile = memory_of(nvml, handle)
    if own_bytes is None:
        if not total_bytes:
            raise NoAnswer("NVML tells no memory of it")
        deadline = time.monotonic() + RELEASE_SECONDS
        while abs(memory_of(nvml, handle)[1] - free_before) > STEADY_BYTES:
            if time.monotonic() > deadline:  # else the card is as it was before the child
                raise NoAnswer("another process took or freed memory meanwhile")
            time.sleep(0.1)
        own_bytes = free_before - free_meanwhile
    return own_bytes - loaded.reserved_bytes


@contextlib.contextmanager
def run_child(hardware: Hardware, environment: Mapping[str, str] = _NOTHING, **child: Any) -> Iterator[Loaded]:
    """The real child, which sees this one card; ``child`` is for ``torch_child``."""
    with torch_child(str(hardware.uuid), environment, **child) as (process, _):
        yield Loaded(pid=process.pid, reserved_bytes=int(next_answer(process)["reserved_bytes"]))


# -- the kept results ------------------------------------------------------------------------------------------------


# -- who else is on a card ---------------------------------------------------------------------------------------------

NOBODY = 0
"""The process number of what is taken by nobody that NVML names: no process has it."""
UNNAMED_FROM_BYTES = 64 * MIB
"""What is taken and named by nobody is told from this size on. No process that computes holds less: the smallest
context, on a MIG instance of 14 SMs, is 61 MiB (:data:`PLAUSIBLE_BYTES`) with nothing loaded into it."""


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
    listed = [OtherProcess(pid=pid, name=_name(pid), used_bytes=used) for pid, used in by_process.items()]
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


def _name(pid: int) -> str:
    """Reads the name from ``/proc`` (proc(5)); empty on other systems, or for another container's process."""
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
