"""A stand-in for the amdsmi module: AMD's cards and the processes on them."""

from dataclasses import dataclass, field
from typing import Any


class FakeAmdSmiError(Exception):
    """What amdsmi raises for whatever it does not do."""


@dataclass(eq=False)
class FakeAmdGpu:
    """One card, or one die of it."""

    address: str
    used_mib: int = 0
    processes: list[Any] | None = field(default_factory=list)
    """As amdsmi lists them; None where it does not."""


@dataclass
class FakeAmdSmi:
    """The part of amdsmi that is used."""

    gpus: list[FakeAmdGpu] = field(default_factory=list)
    starts: bool = True
    started: int = 0

    AmdSmiException = FakeAmdSmiError

    def amdsmi_init(self) -> None:
        if not self.starts:
            raise FakeAmdSmiError("the driver is not loaded")
        self.started += 1

    def amdsmi_shut_down(self) -> None:
        self.started -= 1

    def amdsmi_get_processor_handles(self) -> list[FakeAmdGpu]:
        return self.gpus

    def amdsmi_get_gpu_device_bdf(self, handle: FakeAmdGpu) -> str:
        return handle.address.upper()

    def amdsmi_get_gpu_vram_usage(self, handle: FakeAmdGpu) -> dict[str, Any]:
        return {"vram_total": 0, "vram_used": handle.used_mib}

    def amdsmi_get_gpu_process_list(self, handle: FakeAmdGpu) -> list[Any]:
        if handle.processes is None:
            raise FakeAmdSmiError("not supported")
        return handle.processes
