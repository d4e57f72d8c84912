"""AMD's cards on this machine: which ones there are torch says, how much of them is free amdsmi does.

torch for ROCm calls them ``cuda``, and makes up a compute capability for each; what counts here is ``gcnArchName``. A
process sees those that HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES leave, in HIP's order, which
is not amdsmi's: a card is found again by its PCI address. Each die of an MI250 is a card of its own for both.

amdsmi comes with ROCm (``/opt/rocm/share/amd_smi``) and as a package of that name; without it what is free is what
torch found, and nobody else on the card is known by name. None of this was ever run on such a card.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autotrain_mem.machine.catalog import rates_of, recognise
from autotrain_mem.machine.overhead import AMD_BYTES, COMMUNICATOR_BYTES
from autotrain_mem.machine.torch_child import HIP_VISIBLE, HipDevice, NoAnswer, seen
from autotrain_mem.support.errors import UnreadableGpuError
from autotrain_mem.support.units import MIB
from autotrain_mem.types.hardware import ARCHITECTURES, Hardware, architecture_name

_OTHERWISE = """\
rocminfo and amd-smi say more: a user of GPUs must be in the groups render and video.
--gpu NAME --plan_only  plans for a card that is not here"""
_NOTHING: Mapping[str, str] = {}


def amd_cards(
    environment: Mapping[str, str] = _NOTHING, on_unreadable: Callable[[str], None] = lambda reason: None
) -> tuple[Hardware, ...]:
    """The cards that a process started now would see, in torch's order, as far as their architecture is known.

    Args:
        environment: What is set for that process, over this one's environment.
        on_unreadable: Hears why a card is left out, where others can be planned for.

    Raises:
        UnreadableGpuError: torch does not tell them, or there are only some that nothing is known of.
    """
    try:
        devices = seen(environment).hip
    except NoAnswer as reason:
        raise UnreadableGpuError(f"torch for ROCm does not tell its GPUs: {reason}.", hint=_OTHERWISE) from reason
    # What HIP_VISIBLE_DEVICES must hold for each of these devices alone. HIP treats an empty value as unset.
    variables = {**os.environ, **environment}
    listed = variables.get(HIP_VISIBLE) or variables.get("CUDA_VISIBLE_DEVICES") or ""
    names = [each.strip() for each in listed.split(",") if each.strip()]
    if len(names) < len(devices):
        names = [str(index) for index in range(len(devices))]
    known = [(index, each) for index, each in enumerate(devices) if _architecture(each) in ARCHITECTURES]
    unknown = [f"{each.name} ({_architecture(each)})" for each in devices if _architecture(each) not in ARCHITECTURES]
    if unknown and not known:
        raise UnreadableGpuError(
            f"Nothing is known of AMD's architecture of {', '.join(unknown)}: known are {', '.join(ARCHITECTURES)}.",
            hint="--gpu NAME --plan_only  plans for another card (autofit gpus lists them)\n"
            "--use_cpu               trains on the CPU",
        )
    for name in unknown:
        on_unreadable(f"Nothing is known of the architecture of {name}. Another GPU is taken.")
    return tuple(_hardware(device, index, names[index]) for index, device in known)


def free_bytes_of(card: Hardware) -> int | None:
    """Reads what is free of a detected card now; None where amdsmi does not tell."""
    with _opened(_address(card)) as smi:
        return None if smi is None else _free_bytes(card.total_bytes, *smi)


def processes_on(card: Hardware) -> dict[int, int] | None:
    """Bytes by process number; None where amdsmi does not tell.

    Up to ROCm 5.7 the list holds no more than handles, and from 6 on a dictionary for each (amd_smi's
    ``py-interface/amdsmi_interface.py: amdsmi_get_gpu_process_list``).
    """
    with _opened(_address(card)) as smi:
        if smi is None:
            return None
        amdsmi, handle = smi
        try:
            listed = amdsmi.amdsmi_get_gpu_process_list(handle)
        except amdsmi.AmdSmiException:
            return None
    held: dict[int, int] = {}
    for process in listed:
        if isinstance(process, Mapping):
            usage = process.get("memory_usage") or {}
            pid = int(process["pid"])
            held[pid] = max(held.get(pid, 0), _number(usage.get("vram_mem", process.get("mem"))))
    return held


def taken_bytes(card: Hardware) -> int:
    """Counts what is taken of a card by anybody, with what the driver keeps; 0 where amdsmi does not tell."""
    free = free_bytes_of(card)
    return 0 if free is None else card.total_bytes - free


def why_no_amdsmi() -> str:
    """Why amdsmi cannot be asked, in a few words; empty where it can."""
    with _session() as amdsmi:
        return amdsmi if isinstance(amdsmi, str) else ""


@contextlib.contextmanager
def _opened(address: str) -> Iterator[tuple[Any, Any] | None]:
    """amdsmi, and the card in its words; None where it does not know it, or is not there."""
    with _session() as amdsmi:
        handle = None if isinstance(amdsmi, str) or not address else _handle(amdsmi, address)
        yield None if handle is None else (amdsmi, handle)


@contextlib.contextmanager
def _session() -> Iterator[Any]:
    """Starts amdsmi and ends it; gives the module, or a text that says why there is none."""
    try:
        import amdsmi
    except (ImportError, OSError, KeyError, AttributeError):  # its wrapper raises the last three without its library
        yield "amdsmi is not installed"
        return
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException as error:
        yield f"amdsmi does not start ({error})"
        return
    try:
        yield amdsmi
    finally:
        amdsmi.amdsmi_shut_down()


def _address(card: Hardware) -> str:
    return (card.uuid or "").partition("@")[2]


def _handle(amdsmi: Any, address: str) -> Any:
    try:
        for handle in amdsmi.amdsmi_get_processor_handles():
            if str(amdsmi.amdsmi_get_gpu_device_bdf(handle)).lower() == address:
                return handle
    except amdsmi.AmdSmiException:
        return None
    return None


def _free_bytes(total_bytes: int, amdsmi: Any, handle: Any) -> int | None:
    """``vram_used`` is in MiB (``torch.cuda._get_amdsmi_device_memory_used``), with all that the driver keeps."""
    try:
        used = amdsmi.amdsmi_get_gpu_vram_usage(handle)["vram_used"]
    except amdsmi.AmdSmiException:
        return None
    return max(0, total_bytes - _number(used) * MIB)


def _number(value: Any) -> int:
    """0 for ``"N/A"``, as amdsmi says what it does not know."""
    return int(value) if isinstance(value, int | float) else 0


def _architecture(device: HipDevice) -> str:
    return architecture_name(device.gcn_arch_name)


def _hardware(device: HipDevice, index: int, name: str) -> Hardware:
    known = recognise(device.name, device.total_bytes)
    with _opened(device.address) as smi:
        now_bytes = None if smi is None else _free_bytes(device.total_bytes, *smi)
    speed = f"catalog, {known.name}" if known else "unknown"
    return Hardware(
        name=device.name,
        origin="detected",
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes if now_bytes is None else now_bytes,
        non_torch_bytes=AMD_BYTES,
        architecture=_architecture(device),
        **rates_of(known),
        communicator_bytes=COMMUNICATOR_BYTES,
        index=index,
        uuid=f"{name}@{device.address}",
        source=f"memory: torch{'' if now_bytes is None else ', free by amdsmi'}; speed: {speed}; "
        "outside torch: as an MI300X had, not measured",
    )
