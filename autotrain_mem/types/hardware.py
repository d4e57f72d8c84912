"""Defines the hardware for which a plan is made, and its rental price."""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from autotrain_mem.support.units import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Describes the devices of a run, on one machine or on several equal machines, with one process per device.

    >>> from autotrain_mem import Topology
    >>> Topology(nodes=2, devices=8).processes
    16
    """

    nodes: int = 1
    devices: int = 1
    """The number of devices in each node."""
    link: str = ""
    """The name of the link between the devices of a node (``machine.links``); empty for one device."""
    link_bytes_per_second: int | None = None
    """The bytes per second that each device sends in a collective within a node, while it receives as many (the bus
    bandwidth of nccl-tests); None if unknown."""
    network: str = ""
    """The name of the link between nodes; empty for a single node."""
    network_bytes_per_second: int | None = None
    """The bytes per second that each device sends in a collective between nodes; None if unknown."""
    uuids: tuple[str, ...] = ()
    """The UUIDs (``Hardware.uuid``) of the devices found on this node, by local rank."""

    @property
    def processes(self) -> int:
        return self.nodes * self.devices

    @property
    def links(self) -> str | None:
        """Returns link and network in the form that ``--link`` takes; None if neither is known."""
        return ",".join(filter(None, (self.link, self.network))) or None


HEADROOM_FRACTION = 0.04
MINIMUM_HEADROOM_BYTES = 400 * MIB
"""The default headroom is 4 % of the card, at least 400 MiB on a real card."""
Capability = tuple[int, int]
"""NVIDIA's compute capability as (major, minor), which determines the kernels that run."""
TURING, AMPERE = (7, 5), (8, 0)
"""Two compute capabilities. From Ampere on, tensor cores support bfloat16 and TF32 (CUDA C++ Programming Guide,
"Compute Capabilities", table "Tensor Core Input Data Types")."""


def lacks_bf16(compute_capability: Capability) -> bool:
    """Returns whether bfloat16 is emulated, as on a T4: ``lacks_bf16((7, 5)) is True``."""
    return compute_capability < AMPERE


ASSUMED_CAPABILITY = (8, 0)
"""The compute capability that is assumed for a card given only by its size: Ampere's."""
_SAME_KERNELS: dict[Capability, Capability] = {(7, 5): (7, 0), (8, 6): (8, 9), (9, 0): (10, 0)}
"""Compute capability -> the one rehearsed in its place. In what a rehearsal imitates (``rehearsal.cuda``), both use the
same kernels and buffers: attention and its workspaces, cuBLAS's workspace. Only sums over rows differ: the larger card
uses more thread blocks, which take more memory, so it stands for both. Measured on Qwen2.5-0.5B, Qwen2.5-7B and
Llama-3.1-8B (full and LoRA, 2 rows of 1024 tokens): no peak differs by a byte within a class."""


def kernel_class(compute_capability: Capability) -> Capability:
    """Returns the compute capability to rehearse in place of a card's own: 8.9 for 8.6, but 8.0 for 8.0."""
    return _SAME_KERNELS.get(compute_capability, compute_capability)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Describes one device for the planner. All sizes are in bytes, all speeds per second.

    >>> from autotrain_mem import gpus
    >>> (card,) = (each for each in gpus() if each.name == "rtx3060")
    >>> card.total_bytes // 2**20, card.compute_capability
    (11910, (8, 6))
    >>> card.budget_bytes() == card.total_bytes - card.default_headroom_bytes()
    True
    """

    name: str
    """The key in the catalog (``rtx3060``), NVML's name, ``cpu``, or the size of an imagined card (``300MiB``)."""
    origin: Literal["detected", "named", "imagined", "cpu"]
    """How it was chosen: found on this machine, named in the catalog, imagined by a size, or the host itself."""
    total_bytes: int
    """The device's total memory, as torch reports it."""
    free_bytes: int
    """The bytes that are free before our process opens a CUDA context; ``total_bytes`` for a card that is not here."""
    non_torch_bytes: int
    """The bytes that our process will hold on the device outside torch's allocator: the CUDA context and modules."""
    communicator_bytes: int = 0
    """The bytes that NCCL holds for each communicator, also outside torch's allocator. 0 on the host, for a simulated
    card smaller than any real one, and if ``non_torch_bytes`` was measured with them."""
    compute_capability: tuple[int, int] | None = None
    """NVIDIA's compute capability as (major, minor); None if only the size is known."""
    bandwidth_bytes_per_second: int | None = None
    """The bandwidth of the device memory; None if unknown."""
    bf16_flops_per_second: int | None = None
    """The bfloat16 speed of the tensor cores, without sparsity; None if they do not support it, or if unknown."""
    fp16_flops_per_second: int | None = None
    """The float16 speed of the tensor cores, without sparsity; None if unknown."""
    fp32_flops_per_second: int | None = None
    """The float32 speed of the ordinary cores, without TF32; None if unknown."""
    host_link_bytes_per_second: int | None = None
    """The bandwidth between the card and the host in one direction; None if unknown."""
    index: int | None = None
    """The NVML index of a detected card."""
    uuid: str | None = None
    """The NVML UUID of a detected card or MIG instance. CUDA_VISIBLE_DEVICES takes it to bind a process to the card."""
    source: str = ""
    """The source of the figures, for the user."""
    topology: Topology = field(default_factory=Topology)
    """The number of such devices in a run, and their links. If devices differ, the figures above are the lowest."""

    @property
    def capability(self) -> Capability:
        """Returns the compute capability, or Ampere's if only the size is known."""
        return self.compute_capability or ASSUMED_CAPABILITY

    def with_communicators(self, count: int) -> Self:
        """Returns a copy whose ``non_torch_bytes`` include this many NCCL communicators."""
        held_bytes = self.non_torch_bytes + count * self.communicator_bytes
        return replace(self, non_torch_bytes=held_bytes, communicator_bytes=0)

    def default_headroom_bytes(self) -> int:
        """Returns 4 % of the card's memory; at least 400 MiB unless the card is imagined."""
        share = int(self.total_bytes * HEADROOM_FRACTION)
        return share if self.origin == "imagined" else max(share, MINIMUM_HEADROOM_BYTES)

    def budget_bytes(self, headroom_bytes: int | None = None) -> int:
        """Computes the bytes that a run may take, in torch's allocator and outside: free bytes minus headroom."""
        headroom = self.default_headroom_bytes() if headroom_bytes is None else headroom_bytes
        return max(0, self.free_bytes - headroom)


SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Holds the rental price of one card per hour.

    >>> from autotrain_mem import Price
    >>> Price(gpu="rtx4090", per_hour=0.34, provider="RunPod Community", seen="2026-03-10").cost(7200, cards=2)
    1.36
    """

    gpu: str
    """The card's key in the catalog, such as ``rtx4090``."""
    per_hour: float
    """The price of one card per hour, in ``currency``."""
    currency: str = "USD"
    provider: str = ""
    seen: str = ""
    """The day on which the price was listed, as ``2026-03-10``; empty if unknown."""
    source: str = ""
    """The place where the price is listed, such as a URL."""

    def cost(self, seconds: float, *, cards: int = 1) -> float:
        """Computes the cost of this many cards for this many seconds, in ``currency``."""
        return self.per_hour * cards * seconds / SECONDS_PER_HOUR
