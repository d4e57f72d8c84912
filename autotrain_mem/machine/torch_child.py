"""Asks torch in a process of its own: about one card, since a context of CUDA costs memory and cannot be closed again,
and about what it sees beside NVIDIA's cards.

The child of a card (``measure_process``) says first what torch sees of it, or why it cannot use it, and later what it
holds of it. AMD's, Apple's and Intel's GPUs only torch knows for sure, and to ask costs its import, 5 seconds: so it is
asked only where the installed build, or the system, is one that can have them (this module's ``main`` answers). That
answer is kept for as long as this process lives.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autotrain_mem.support import codec
from autotrain_mem.support.errors import from_json
from autotrain_mem.support.processes import Channel, Child, ChildDied, ChildTimeout
from autotrain_mem.support.units import format_bytes

CHILD_MODULE = "autotrain_mem.machine.measure_process"
TIME_LIMIT_SECONDS = 120.0
"""Importing torch takes most of it: 5 s from a warm disk, a minute from a network's."""


class NoAnswer(Exception):
    """Why the child told nothing, in a few words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchDevice:
    total_bytes: int
    free_bytes: int
    """Once the child has opened a context."""
    is_integrated: bool
    """Its memory is the host's (``cudaDeviceProp.integrated``)."""


@contextlib.contextmanager
def torch_child(
    uuid: str,
    environment: Mapping[str, str],
    module: str = CHILD_MODULE,
    limit_seconds: float = TIME_LIMIT_SECONDS,
) -> Iterator[tuple[Child, TorchDevice]]:
    """Start a child that sees this one card, and wait until it has opened it; it ends with the context.

    Args:
        environment: What is set for the training process, over this one's environment.

    Raises:
        UnreadableGpuError: torch cannot use the card; the hint says what mends it.
        NoAnswer: it did not get so far as to tell.
    """
    child = Child(module, {**environment, "CUDA_VISIBLE_DEVICES": uuid})
    try:
        yield child, TorchDevice(**next_answer(child, limit_seconds)["device"])
    finally:
        child.kill()  # it holds nothing that needs saving
        child.stop()


def next_answer(child: Child, limit_seconds: float = TIME_LIMIT_SECONDS) -> dict[str, Any]:
    """Receive the child's next answer. Raises as :func:`torch_child`."""
    try:
        answer = child.receive(limit_seconds)
    except ChildTimeout as timeout:
        raise NoAnswer(f"no answer within {limit_seconds:.0f} s") from timeout
    except ChildDied as death:
        raise NoAnswer(f"the process ended with status {death.code}") from death
    if "unusable" in answer:
        raise from_json(answer["unusable"])
    if "error" in answer:
        raise NoAnswer(str(answer["error"]))
    return answer


# -- what torch sees beside NVIDIA's cards -----------------------------------------------------------------------------

LISTING_MODULE = "autotrain_mem.machine.torch_child"
HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
"""By which a user says which of AMD's cards a process sees, of those that ROCR_VISIBLE_DEVICES leaves. HIP reads
CUDA_VISIBLE_DEVICES too, where this is not set (``torch.cuda._parse_visible_devices``; ROCm's documentation, "GPU
isolation techniques")."""
_CHOOSE = (HIP_VISIBLE, "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Whatever changes what is seen; the last is Intel's."""
_BUILT_FOR = re.compile(r"^(hip|xpu)\b[^=\n]*= *'", re.MULTILINE)
"""In ``torch/version.py``, whose value is None in any other build: ``hip: Optional[str] = '6.4.43482'``."""
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class HipDevice:
    name: str
    gcn_arch_name: str
    """``gfx90a:sramecc+:xnack-``."""
    total_bytes: int
    free_bytes: int
    """Beside a process that opened it."""
    address: str
    """On PCI, as ``0000:c1:00.0``; empty where torch does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class XpuDevice:
    name: str
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    hip: tuple[HipDevice, ...] = ()
    mps_bytes: int | None = None
    """Of an Apple GPU, what Metal recommends to take at most of the memory that it shares with the host."""
    xpu: tuple[XpuDevice, ...] = ()

    @property
    def unplanned(self) -> str:
        """Names what is here and cannot be planned for; empty where there is nothing."""
        if self.mps_bytes is not None:
            return f"Apple's GPU (MPS), {format_bytes(self.mps_bytes)} of unified memory for it"
        return ", ".join(f"{each.name} (Intel XPU), {format_bytes(each.total_bytes)}" for each in self.xpu)


def torch_build() -> Literal["hip", "xpu", ""]:
    """Reads what the installed torch is built for beside CUDA and the CPU, without importing it."""
    spec = importlib.util.find_spec("torch")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        try:
            text = pathlib.Path(folder, "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        if match := _BUILT_FOR.search(text):
            return "hip" if match[1] == "hip" else "xpu"
    return ""


def seen(environment: Mapping[str, str] = _NOTHING) -> Seen:
    """Finds what a process started now would see, where there can be anything. Raises NoAnswer if torch does not tell.

    Args:
        environment: What is set for that process, over this one's environment.
    """
    if not torch_build() and sys.platform != "darwin":
        return Seen()
    variables = {**os.environ, **environment}
    return _asked(tuple((name, variables[name]) for name in _CHOOSE if name in variables))


def unplanned_gpus() -> str:
    """Names Apple's and Intel's GPUs; empty where there are none, or torch does not tell."""
    try:
        return seen().unplanned
    except NoAnswer:
        return ""


@functools.cache
def _asked(variables: tuple[tuple[str, str], ...]) -> Seen:
    child = Child(LISTING_MODULE, dict(variables))
    try:
        return codec.from_json(Seen, next_answer(child))
    except codec.CodecError as error:
        raise NoAnswer(str(error)) from error
    finally:
        child.kill()  # it holds nothing that needs saving
        child.stop()


# -- the process that is asked -----------------------------------------------------------------------------------------


def main() -> None:
    """Tell every device that torch can open, and end."""
    channel = Channel(ignore_interrupt=True)
    try:
        import torch

        channel.send({"hip": hip_devices(torch), "mps_bytes": mps_bytes(torch), "xpu": xpu_devices(torch)})
    except Exception as error:  # whatever stands in the way, the parent says that it does
        channel.send({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})


def hip_devices(torch: Any) -> list[dict[str, Any]]:
    """AMD's cards, in torch's order; none with a build for CUDA, whose cards NVML tells."""
    if not torch.version.hip:
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, _ = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": properties.name,
                "gcn_arch_name": properties.gcnArchName,
                "total_bytes": properties.total_memory,
                "free_bytes": free_bytes,
                "address": _address(properties),
            }
        )
    return found


def _address(properties: Any) -> str:
    """On PCI; empty where this torch does not tell it."""
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def mps_bytes(torch: Any) -> int | None:
    """Asks what Metal lets a process take of an Apple GPU (``recommendedMaxWorkingSetSize``); None without."""
    return int(torch.mps.recommended_max_memory()) if torch.backends.mps.is_available() else None


def xpu_devices(torch: Any) -> list[dict[str, Any]]:
    """Intel's GPUs."""
    if not torch.xpu.is_available():
        return []
    seen = (torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count()))
    return [{"name": each.name, "total_bytes": each.total_memory} for each in seen]


if __name__ == "__main__":
    main()
