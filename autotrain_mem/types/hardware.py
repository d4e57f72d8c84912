"""Defines the hardware that a plan is made for, and its rental price."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from autotrain_mem.support.units import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Describes the devices of a run, on one machine or several equal ones, with one process on each device.

    >>> from autotrain_mem import Topology
    >>> Topology(nodes=2, devices=8).processes
    16
    """

    nodes: int = 1
    devices: int = 1
    """Devices of each node."""
    link: str = ""
    """Name of the link within a node, from the catalog (``machine.links``); empty for one device."""
    link_bytes_per_second: int | None = None
    """Bytes that each device sends, and receives, per second in a collective within a node (nccl-tests); or None."""
    network: str = ""
    """Name of the link between nodes; empty for a single node."""
    network_bytes_per_second: int | None = None
    """The same between nodes, for each device."""
    uuids: tuple[str, ...] = ()
    """UUIDs (``Hardware.uuid``) of the devices found on this node, by local rank."""

    @property
    def processes(self) -> int:
        return self.nodes * self.devices

    @property
    def links(self) -> str | None:
        """Returns link and network as ``--link`` takes them; None if neither is known."""
        return ",".join(filter(None, (self.link, self.network))) or None


HEADROOM_FRACTION = 0.04
MINIMUM_HEADROOM_BYTES = 400 * MIB
"""The default headroom is 4 % of the card, at least 400 MiB on a real card."""

Capability = tuple[int, int]
"""NVIDIA's compute capability, which determines the kernels."""
TURING, AMPERE = (7, 5), (8, 0)
"""Compute capabilities. Tensor cores support bfloat16 and TF32 from Ampere on: CUDA C++ Programming Guide, "Compute
Capabilities", table "Tensor Core Input Data Types"."""


def lacks_bf16(compute_capability: Capability) -> bool:
    """Returns whether bfloat16 is emulated, as on a T4: ``lacks_bf16((7, 5)) is True``."""
    return compute_capability < AMPERE


ASSUMED_CAPABILITY = (8, 0)
"""Compute capability that is assumed for a card given by size alone: Ampere's."""

_SAME_KERNELS: dict[Capability, Capability] = {(7, 5): (7, 0), (8, 6): (8, 9), (9, 0): (10, 0)}
"""Capabilities whose cards use the same kernels with the same buffers, in what a rehearsal imitates
(``rehearsal.cuda``): the choice and workspaces of attention, the workspace of cuBLAS. They differ in how many blocks
share a sum over rows; the larger card stands for both, as more blocks take more memory. Measured on Qwen2.5-0.5B,
Qwen2.5-7B and Llama-3.1-8B (full and LoRA, 2 rows of 1024 tokens): no peak differs by a byte within a class."""


def kernel_class(compute_capability: Capability) -> Capability:
    """Returns the capability to rehearse for, one for each class: 8.6 counts as 8.9, and 8.0 is alone."""
    return _SAME_KERNELS.get(compute_capability, compute_capability)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Describes one device for the planner. All sizes are bytes, speeds are per second.

    >>> from autotrain_mem import gpus
    >>> (card,) = (each for each in gpus() if each.name == "rtx3060")
    >>> card.total_bytes // 2**20, card.compute_capability
    (11910, (8, 6))
    >>> card.budget_bytes() == card.total_bytes - card.default_headroom_bytes()
    True
    """

    name: str
    """The catalog's key (``rtx3060``), NVML's name, ``cpu``, or an imagined card's size (``300MiB``)."""
    origin: Literal["detected", "named", "imagined", "cpu"]
    """Where it comes from: found on this machine, named from the catalog, imagined by size, or the host itself."""
    total_bytes: int
    """The device's total memory, as torch reports it."""
    free_bytes: int
    """Bytes that are free before our process opens a CUDA context; ``total_bytes`` for a card that is not here."""
    non_torch_bytes: int
    """Bytes that our process will hold on the device outside torch's allocator: the CUDA context and its modules."""
    communicator_bytes: int = 0
    """Bytes that NCCL holds for each communicator, also outside torch's allocator. 0 on the host, for a card given by
    size alone, and if the measured ``non_torch_bytes`` includes them."""
    compute_capability: tuple[int, int] | None = None
    """None if only the size is known."""
    bandwidth_bytes_per_second: int | None = None
    bf16_flops_per_second: int | None = None
    """Dense, without sparsity; None if the card has no bf16 tensor cores."""
    fp16_flops_per_second: int | None = None
    """Dense, tensor cores."""
    fp32_flops_per_second: int | None = None
    """Ordinary cores, without TF32."""
    host_link_bytes_per_second: int | None = None
    """One way, between the card and the host."""
    index: int | None = None
    """NVML index of a detected card."""
    uuid: str | None = None
    """NVML's UUID of a detected card or MIG instance, which binds a process to it (CUDA_VISIBLE_DEVICES)."""
    source: str = ""
    """Where the figures come from."""
    topology: Topology = field(default_factory=Topology)
    """Number of such devices in a run; all figures above are for one device, the smallest if they differ."""

    @property
    def capability(self) -> Capability:
        """Returns the compute capability that determines its kernels; Ampere's if only the size is known."""
        return self.compute_capability or ASSUMED_CAPABILITY

    def with_communicators(self, count: int) -> Hardware:
        """Returns the card with ``non_torch_bytes`` that include this many communicators."""
        held_bytes = self.non_torch_bytes + count * self.communicator_bytes
        return replace(self, non_torch_bytes=held_bytes, communicator_bytes=0)

    def default_headroom_bytes(self) -> int:
        """Returns 4 % of the card: at least 400 MiB on a real one, without a minimum on an imagined one."""
        share = int(self.total_bytes * HEADROOM_FRACTION)
        return share if self.origin == "imagined" else max(share, MINIMUM_HEADROOM_BYTES)

    def budget_bytes(self, headroom_bytes: int | None = None) -> int:
        """Computes the reserved plus non-torch bytes that a run may take: the free bytes minus the headroom."""
        headroom = self.default_headroom_bytes() if headroom_bytes is None else headroom_bytes
        return max(0, self.free_bytes - headroom)


SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Holds the rental price of one card for an hour.

    >>> from autotrain_mem import Price
    >>> Price(gpu="rtx4090", per_hour=0.34, provider="RunPod Community", seen="2026-03-10").cost(7200, cards=2)
    1.36
    """

    gpu: str
    """The catalog's key."""
    per_hour: float
    """The price of one card, in ``currency``."""
    currency: str = "USD"
    provider: str = ""
    seen: str = ""
    """The day on which it was listed, as ``2026-03-10``; empty if unknown."""
    source: str = ""
    """Where the price is listed."""

    def cost(self, seconds: float, *, cards: int = 1) -> float:
        """Computes the cost of this many cards for this long, in ``currency``."""
        return self.per_hour * cards * seconds / SECONDS_PER_HOUR
