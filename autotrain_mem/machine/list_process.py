"""The process that is asked what torch sees beside NVIDIA's cards: ``python -m autotrain_mem.machine.list_process``."""

from __future__ import annotations

from typing import Any

from autotrain_mem.support.processes import Channel


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
