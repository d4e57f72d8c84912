"""Detects the devices of this machine through NVML alone: a CUDA context would cost memory on every card.

NVML lists every card; CUDA exposes some of them to a process, in its own order. This module repeats CUDA's choice:

- ``CUDA_VISIBLE_DEVICES``: indices or prefixes of UUIDs, in the wanted order. The first entry that names no device ends
  the list: ``0,2,-1,1`` is 0 and 2 (CUDA Programming Guide, "CUDA Environment Variables"). The first entry decides
  between numbers and UUIDs, and a device named twice empties the list (``torch.cuda._parse_visible_devices``).
- ``CUDA_DEVICE_ORDER``: numbers count from the fastest card, or in NVML's order with ``PCI_BUS_ID`` (same guide). CUDA
  does not document its ranking; here it is cores x clock, and equal cards keep NVML's order.
- MIG: a card that is split exposes its instances instead of itself; CUDA opens only one instance, and no whole card
  beside it (NVIDIA Multi-Instance GPU User Guide, "Device Enumeration").

A card that NVML cannot read (``NVML_ERROR_GPU_IS_LOST``, ``NVML_ERROR_NO_PERMISSION``) keeps its number and exposes no
device. Its error is reported unless ``CUDA_VISIBLE_DEVICES`` selects a card that NVML can read, or no card.
"""

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotrain_mem.machine.catalog import catalog, rates_of, recognise
from autotrain_mem.machine.nvml import NoNvml, NvmlError, ask, memory_of, nvml_session
from autotrain_mem.machine.overhead import COMMUNICATOR_BYTES
from autotrain_mem.machine.usable import NoAnswer, examine_package
from autotrain_mem.support.errors import UnreadableGpuError
from autotrain_mem.support.host import host_memory
from autotrain_mem.support.units import MIB
from autotrain_mem.types.hardware import Hardware

HOST_NON_TORCH_BYTES = 768 * MIB
"""Host memory of a training process outside tensors. After the imports of ``training.process`` 482 MiB are resident
(VmRSS), of which 123 MiB are files. Two runs of two SFT steps with 146 M parameters peaked (VmHWM) 523 and 531 MiB
above the 2487 and 2364 MiB that rehearsals predict (torch 2.13, transformers 5.23, trl 1.12, Linux x86-64, November
2026, with ``training.environment.MMAP_FROM_BYTES``). The rest is an unmeasured allowance for larger tokenizers, dataset
pages and data loader workers."""

VISIBLE, ORDER = CHOOSE_CARDS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Variables that select the cards of a process."""
_UNANSWERED = """\
Run nvidia-smi for details; a lost GPU needs a reset or a reboot.
--gpu NAME --plan_only  plans for a card that is not here"""
HIDES_ALL = ("", "-1")
"""Values of ``CUDA_VISIBLE_DEVICES`` that hide every card."""
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class _Device:
    """A device that CUDA can open: a whole card or a MIG instance."""

    index: int
    """NVML's index of the card."""
    uuid: str
    handle: Any
    card: Any
    """The handle of the whole card, whose UUID is ``card_uuid``."""
    card_uuid: str

    @property
    def is_instance(self) -> bool:
        return self.uuid != self.card_uuid


_Cards = Sequence[Sequence[_Device]]
"""For each card the card itself, or its MIG instances; empty if NVML cannot read the card."""


def detect(
    environment: Mapping[str, str] = _NOTHING, on_unreadable: Callable[[str], None] = lambda reason: None
) -> tuple[Hardware, ...]:
    """Returns the GPUs that a torch process started now would see, in its order; none without a driver.
    ``environment``: variables of that process, which override this one's. ``on_unreadable``: called with a warning for
    each GPU that NVML cannot read, if it can read others.

    Raises:
        UnreadableGpuError: NVML can read none of the selected cards; or a card shares the host's memory, and torch,
            which must measure it, cannot use it.
    """
    try:
        with nvml_session() as nvml:
            shown, unanswered = _shown(nvml, environment)
            hardware = []
            for device in shown:
                try:
                    hardware.append(_hardware(nvml, device, environment))
                except nvml.NVMLError as error:
                    unanswered.append(f"GPU {device.index}: {error}")
    except NoNvml:
        return ()
    except NvmlError as error:
        raise UnreadableGpuError(f"{error}.", hint=_UNANSWERED) from error
    if unanswered and not hardware:
        raise UnreadableGpuError(f"NVML cannot read {', '.join(unanswered)}.", hint=_UNANSWERED)
    for reason in unanswered:
        on_unreadable(f"NVML cannot read {reason}. Another GPU is used.")
    return tuple(hardware)


def cuda_device(index: int) -> Hardware | None:
    """Returns this process's ``cuda:index``; None if NVML does not list it. Raises UnreadableGpuError if NVML fails."""
    try:
        with nvml_session() as nvml:
            shown, _ = _shown(nvml, _NOTHING)
            return _hardware(nvml, shown[index], _NOTHING) if index < len(shown) else None
    except NoNvml:
        return None
    except NvmlError as error:
        raise UnreadableGpuError(f"cuda:{index}: {error}.", hint=_UNANSWERED) from error


def numbers_in_pci_order(uuids: Sequence[str]) -> tuple[str, ...] | None:
    """Returns the number of each device under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, which is NVML's order too.

    None if a device has no number (a number selects only the first MIG instance of its card), or if NVML cannot read a
    card, since CUDA may then count without it.
    """
    with contextlib.suppress(NvmlError), nvml_session() as nvml:
        cards, unanswered = _cards(nvml)
        numbers = {devices[0].uuid: str(number) for number, devices in enumerate(cards) if devices}
        is_sure = not unanswered and set(uuids) <= numbers.keys()
        return tuple(numbers[uuid] for uuid in uuids) if is_sure else None
    return None


def as_now(card: Hardware) -> Hardware:
    """Returns a detected card with the bytes that are free now; the same card if NVML does not report them."""
    with contextlib.suppress(NvmlError), nvml_session() as nvml:
        if card.uuid is not None:
            total_bytes, now_bytes = memory_of(nvml, nvml.nvmlDeviceGetHandleByUUID(card.uuid))
            return replace(card, free_bytes=now_bytes) if total_bytes else card
    return card


def _shown(nvml: Any, environment: Mapping[str, str]) -> tuple[tuple[_Device, ...], list[str]]:
    """Returns the devices that CUDA exposes, and NVML's errors to report for other cards."""
    variables = {**os.environ, **environment}
    cards, unanswered = _cards(nvml)
    if variables.get(ORDER) != "PCI_BUS_ID":
        cards = _fastest_first(nvml, cards)
    wanted = variables.get(VISIBLE)
    listed: list[_Device] = [devices[0] for devices in cards if devices]
    if wanted is not None:
        entries, listed = [entry.strip() for entry in wanted.split(",")], []
        for entry in entries:
            if (device := _device_called(cards, entry, entries[0][:4])) is None:
                break
            if device in listed:
                listed = []
                break
            listed.append(device)
    shown = tuple([device for device in listed if device.is_instance][:1] or listed)
    if wanted is not None and (shown or wanted.strip() in HIDES_ALL):
        unanswered = []  # the user selected a readable card, or none
    return shown, unanswered


def host() -> Hardware:
    """Returns this machine's memory, or its container's, as a device."""
    memory = host_memory()
    return Hardware(
        name="cpu",
        origin="cpu",
        total_bytes=memory.total_bytes,
        free_bytes=memory.available_bytes,
        non_torch_bytes=HOST_NON_TORCH_BYTES,
        source=memory.source,
    )


def _cards(nvml: Any) -> tuple[_Cards, list[str]]:
    """Returns the devices of each card, and NVML's errors for cards that it cannot read."""
    cards: list[Sequence[_Device]] = []
    unanswered = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            mode = ask(nvml, nvml.nvmlDeviceGetMigMode, handle)  # [now, after the next reset]; None without MIG
            handles = [handle]
            if mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE:
                places = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))  # some may be empty
                made = (ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place) for place in places)
                handles = [each for each in made if each is not None]
            cards.append([_Device(index, nvml.nvmlDeviceGetUUID(each), each, handle, uuid) for each in handles])
        except nvml.NVMLError as error:
            cards.append([])
            unanswered.append(f"GPU {index}: {error}")
    return cards, unanswered


def _fastest_first(nvml: Any, cards: _Cards) -> _Cards:
    """Sorts the cards as CUDA does; keeps NVML's order if the cards are equal or one does not report its speed."""
    handles = [devices[0].card for devices in cards if devices]
    if len(handles) < len(cards) or len({nvml.nvmlDeviceGetName(handle) for handle in handles}) == 1:
        return cards
    cores = [ask(nvml, nvml.nvmlDeviceGetNumGpuCores, handle) for handle in handles]
    clocks = [ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM) for handle in handles]
    if None in cores or None in clocks:
        return cards
    return [cards[i] for i in sorted(range(len(cards)), key=lambda i: -cores[i] * clocks[i])]


def _device_called(cards: _Cards, entry: str, kind: str) -> _Device | None:
    """Finds a device by a unique prefix of its UUID if ``kind`` is ``GPU-`` or ``MIG-``, else by number."""
    if kind not in ("GPU-", "MIG-"):
        digits = re.match(r"\+?(\d+)", entry)  # "1gpu" is 1 too: C's strtoul reads as far as the digits go
        named = [*cards][int(digits[1]) :][:1] if digits else []
    elif not entry.startswith(kind):
        return None
    elif kind == "GPU-":
        named = [devices for devices in cards if devices and devices[0].card_uuid.startswith(entry)]
    else:
        named = [[each] for devices in cards for each in devices if each.is_instance and each.uuid.startswith(entry)]
    return next(iter(named[0]), None) if len(named) == 1 else None


def _memory_by_torch(uuid: str, environment: Mapping[str, str]) -> tuple[int, int, str]:
    """Returns total and free bytes and their source for a card whose memory NVML does not report: GB10 and Jetson share
    the host's. ``cudaMemGetInfo`` omits file pages that the kernel can reclaim, ``MemAvailable`` includes them (NVIDIA
    DGX Spark User Guide, "Known Issues")."""
    try:
        torch = examine_package("torch", {**environment, VISIBLE: uuid})
    except NoAnswer as reason:
        message = f"Neither NVML nor torch reports the memory of GPU {uuid}: {reason}."
        raise UnreadableGpuError(message, hint=_UNANSWERED) from reason
    if torch.problem:
        raise UnreadableGpuError(torch.problem, hint=torch.fix)
    if not torch.is_integrated:
        return torch.total_bytes, torch.free_bytes, "torch, since NVML does not report it"
    available_bytes = min(torch.total_bytes, max(torch.free_bytes, host_memory().available_bytes))
    return torch.total_bytes, max(0, available_bytes - HOST_NON_TORCH_BYTES), "torch, the host's own"


def _hardware(nvml: Any, device: _Device, environment: Mapping[str, str]) -> Hardware:
    total_bytes, free_bytes = memory_of(nvml, device.handle)
    source = "NVML, without the driver's reserve"
    if not total_bytes:
        total_bytes, free_bytes, source = _memory_by_torch(device.uuid, environment)
    name = ask(nvml, nvml.nvmlDeviceGetName, device.handle) or f"MIG instance {device.uuid}"
    capability = ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, device.card)
    known = recognise(name, total_bytes)
    # An unknown card gets the largest value in the catalog, until a probe measures its own.
    non_torch_bytes = known.non_torch_bytes if known else max(card.non_torch_bytes for card in catalog())
    return Hardware(
        name=name,
        origin="detected",
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        non_torch_bytes=non_torch_bytes,
        compute_capability=capability,
        **rates_of(known),
        communicator_bytes=COMMUNICATOR_BYTES,
        index=device.index,
        uuid=device.uuid,
        source=f"memory: {source}; speed: {f'catalog, {known.name}' if known else 'unknown'}; "
        f"outside torch: {'estimated from multiprocessors' if known else 'unknown, the largest in the catalog'}",
    )
