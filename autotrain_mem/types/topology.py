"""A topology says how many devices a run has, and how fast they talk to each other."""

from __future__ import annotations

from dataclasses import dataclass


def opened_by(uuid: str) -> str:
    """Returns what a variable such as CUDA_VISIBLE_DEVICES calls a device: the UUID, or what HIP calls an AMD card.

    >>> opened_by("1@0000:c1:00.0")
    '1'
    """
    return uuid.partition("@")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Describes the devices of a run: on one machine or on several alike, one process on each.

    >>> from autotrain_mem import Topology
    >>> Topology(nodes=2, devices=8).processes
    16
    """

    nodes: int = 1
    devices: int = 1
    """On each node."""
    link: str = ""
    """Name of what joins the devices of a node, in the catalog of links (``machine.links``); empty for one device."""
    link_bytes_per_second: int | None = None
    """What a collective within a node moves per device and second, in and out each (the bus bandwidth of nccl-tests);
    None where it is not known."""
    network: str = ""
    """Name of what joins the nodes; empty for a single one."""
    network_bytes_per_second: int | None = None
    """The same between nodes, for each device."""
    uuids: tuple[str, ...] = ()
    """Names (``Hardware.uuid``) of the devices that were found on this node, in the order of their processes' local
    ranks."""

    @property
    def processes(self) -> int:
        return self.nodes * self.devices

    @property
    def links(self) -> str | None:
        """Names link and network as ``--link`` takes them; None where neither is known."""
        return ",".join(filter(None, (self.link, self.network))) or None
