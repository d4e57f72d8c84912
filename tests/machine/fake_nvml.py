"""A fake of the pynvml module: cards, their MIG instances, and the processes on them."""

from dataclasses import dataclass, field
from operator import attrgetter
from types import SimpleNamespace

from autotrain_mem.support.units import MIB


class FakeNvmlError(Exception):
    pass


class FakeNotSupported(FakeNvmlError):
    pass


@dataclass(eq=False)
class FakeGpu:
    """One card: an RTX 3090 until a test says otherwise."""

    uuid: str
    name: str = "NVIDIA GeForce RTX 3090"
    total_mib: int = 24576
    reserved_mib: int = 452
    """The driver's part."""
    computing: dict[int, int | None] = field(default_factory=dict)
    """Bytes of each process that computes; None if unknown."""
    drawing: dict[int, int | None] | None = field(default_factory=dict)
    """Bytes of each process that draws; None without graphics."""
    unlisted_bytes: int = 0
    capability: tuple[int, int] = (8, 6)
    cores: int | None = 10496
    clock: int = 2100
    instances: "list[FakeInstance | None] | None" = None
    """None if it is not split; None inside for an empty place."""
    lost: str = ""
    """NVML's error if it cannot read the card."""
    bridged_to: tuple[str, ...] = ()
    """UUIDs of the cards that NVLink connects."""
    nvlinks: int = 0
    pcie_generation: int = 4
    pcie_lanes: int = 16
    has_peers: bool = True
    shares_memory: bool = False
    """Whether its memory is the host's, as for GB10."""


@dataclass(eq=False)
class FakeInstance(FakeGpu):
    name: str = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    reserved_mib: int = 0


@dataclass
class FakeNvml:
    gpus: list[FakeGpu] = field(default_factory=list)
    driver: str | None = "580.65.06"
    cuda: int = 13000
    """The newest CUDA that the driver supports."""
    inits: int = 0
    shutdowns: int = 0

    NVMLError = FakeNvmlError
    NVMLError_NotSupported = FakeNotSupported
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_CLOCK_SM = 1
    nvmlMemory_v2 = 2
    NVML_P2P_CAPS_INDEX_WRITE = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    nvmlDeviceGetName = attrgetter("name")
    nvmlDeviceGetUUID = attrgetter("uuid")
    nvmlDeviceGetCudaComputeCapability = attrgetter("capability")
    nvmlDeviceGetMaxPcieLinkGeneration = attrgetter("pcie_generation")
    nvmlDeviceGetMaxPcieLinkWidth = attrgetter("pcie_lanes")

    def nvmlInit(self) -> None:
        if self.driver is None:
            raise FakeNvmlError("Driver Not Loaded")
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlSystemGetDriverVersion(self) -> str | None:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if reason := self.gpus[index].lost:
            raise FakeNvmlError(reason)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid and not gpu.lost:
                return gpu
        raise FakeNvmlError("Not Found")

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu, version: int) -> SimpleNamespace:
        assert version == self.nvmlMemory_v2, "the first one counts the driver's own part"
        if handle.shares_memory:
            raise FakeNotSupported("Not Supported")
        total_bytes, reserved_bytes = handle.total_mib * MIB, handle.reserved_mib * MIB
        held = {**(handle.drawing or {}), **handle.computing}
        taken_bytes = handle.unlisted_bytes + sum(size or 0 for size in held.values())
        free_bytes = total_bytes - reserved_bytes - taken_bytes
        return SimpleNamespace(total=total_bytes, reserved=reserved_bytes, free=free_bytes)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[SimpleNamespace]:
        return self._listed(handle.computing)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeGpu) -> list[SimpleNamespace]:
        return self._listed(handle.drawing)

    def _listed(self, held: dict[int, int | None] | None) -> list[SimpleNamespace]:
        if held is None:
            raise FakeNvmlError("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held.items()]

    def nvmlDeviceGetNumGpuCores(self, handle: FakeGpu) -> int:
        if handle.cores is None:
            raise FakeNvmlError("Not Supported")
        return handle.cores

    def nvmlDeviceGetMaxClockInfo(self, handle: FakeGpu, clock: int) -> int:
        assert clock == self.NVML_CLOCK_SM
        return handle.clock

    def nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, way: int) -> int:
        if way == self.NVML_P2P_CAPS_INDEX_NVLINK:
            return int(other.uuid not in one.bridged_to)
        return int(not (one.has_peers and other.has_peers))

    def nvmlDeviceGetNvLinkState(self, handle: FakeGpu, link: int) -> int:
        if link >= handle.nvlinks:
            raise FakeNvmlError("Invalid Argument")
        return 1

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        if handle.capability < (8, 0):
            raise FakeNvmlError("Not Supported")
        return [int(handle.instances is not None), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return len(handle.instances or [])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, place: int) -> FakeInstance:
        instance = (handle.instances or [])[place]
        if instance is None:
            raise FakeNvmlError("Not Found")
        return instance
