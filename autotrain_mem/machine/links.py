"""The links between GPUs and between machines: named, usual for a card, or detected by NVML.

The rows are in ``links.csv``: bytes that a collective moves for each device and second, in and out each, in GB of 10**9
(the bus bandwidth of nccl-tests, ``doc/PERFORMANCE.md``, for messages of many MiB). A ``derived`` row was not found
measured. ``-host`` is PCI Express without peer access, as GeForce drivers leave it: each transfer goes through host
memory. A network that a machine has once is shared by its GPUs.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autotrain_mem.machine.catalog import link_of
from autotrain_mem.machine.nvml import NvmlError, ask, nvml_session
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types.hardware import Hardware, Topology

_ROWS = Path(__file__).with_name("links.csv")

NETWORKS = {"nvlink3": "hdr", "nvlink4": "ndr", "nvlink5": "ndr"}
"""The network of a machine with such cards, one port for each (data sheets of DGX A100, H100 and B200)."""

FULL_LANES = 16

_NVLINK = {7: ("nvlink2", 6), 8: ("nvlink3", 12), 9: ("nvlink4", 18), 10: ("nvlink5", 18)}
"""Maps a major compute capability to the row and its number of links (data sheets of V100, A100, H100 and B200)."""
_BRIDGE = ("nvlink-bridge", 4)
"""GA102's, whose links have half of A100's rate (NVIDIA's whitepaper on GA102)."""
_LINKS_AT_MOST = 18
"""NVML's ``NVML_NVLINK_MAX_LINKS`` up to Blackwell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interconnect:
    """A row of the catalog."""

    name: str
    joins: Literal["devices", "nodes"]
    bytes_per_second: int
    shared_by_node: bool
    source: str


@functools.cache
def links() -> Mapping[str, Interconnect]:
    """Returns every link, by name."""
    with open(_ROWS, encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file, strict=True))
    return {
        row["key"]: Interconnect(
            name=row["key"],
            joins=row["joins"],
            bytes_per_second=round(float(row["gb_per_second"]) * 10**9),
            shared_by_node=row["shared_by_node"] == "yes",
            source=row["source"],
        )
        for row in rows
    }


def topology(
    card: Hardware, *, devices: int, nodes: int = 1, asked: str | None = None, uuids: Sequence[str] = ()
) -> Topology:
    """Returns the topology of several devices of one kind.

    Args:
        asked: Names of links, as ``--link`` has them; what it leaves open is detected by NVML, or usual for the card.
        uuids: Of the devices, where they are here.

    Raises:
        UsageError: no such link, or two that join the same.
    """
    names = named_links(asked)
    link, bytes_per_second = "", None
    if (chosen := names.get("devices")) and devices > 1:
        link, bytes_per_second = chosen.name, chosen.bytes_per_second
    elif devices > 1:
        link, bytes_per_second = (detected_link(uuids) if uuids else None) or usual_link(card)
    network = names.get("nodes") or links().get(NETWORKS.get(usual_link(card)[0], "")) if nodes > 1 else None
    joined = Topology(
        nodes=nodes, devices=devices, link=link, link_bytes_per_second=bytes_per_second, uuids=tuple(uuids)
    )
    if network is None:
        return joined
    rate = network.bytes_per_second // (devices if network.shared_by_node else 1)
    return replace(joined, network=network.name, network_bytes_per_second=rate)


def named_links(asked: str | None) -> dict[str, Interconnect]:
    """Parses ``nvlink4``, ``ndr`` or ``nvlink4,ndr`` into links by what they join. Raises UsageError."""
    chosen: dict[str, Interconnect] = {}
    for name in filter(None, (each.strip().lower() for each in (asked or "").split(","))):
        if name not in links():
            near = difflib.get_close_matches(name, links(), n=2)
            meant = f"Did you mean {' or '.join(near)}? " if near else ""
            known = {kind: [row.name for row in links().values() if row.joins == kind] for kind in ("devices", "nodes")}
            raise UsageError(
                f"No link called {name!r} is known.",
                hint=f"{meant}GPUs: {', '.join(known['devices'])}; machines: {', '.join(known['nodes'])}.",
            )
        link = links()[name]
        if link.joins in chosen:
            what = "GPUs of a machine" if link.joins == "devices" else "machines"
            raise UsageError(f"--link {asked}: two of them join the {what}.", hint="Give one for each.")
        chosen[link.joins] = link
    return chosen


def usual_link(card: Hardware) -> tuple[str, int | None]:
    """Returns the usual link between several of a card and its rate; empty for an unknown card."""
    known = link_of(card)
    if known is None:
        return "", None
    name, lanes = known
    return name, _of_lanes(links()[name].bytes_per_second, name, lanes)


def _of_lanes(bytes_per_second: int, name: str, lanes: int) -> int:
    return bytes_per_second * min(lanes, FULL_LANES) // FULL_LANES if name.startswith("pcie") else bytes_per_second


# -- what joins the cards of this machine ----------------------------------------------------------------------------


def detected_link(uuids: Sequence[str]) -> tuple[str, int | None] | None:
    """Detects the slowest link that a collective between these cards of this machine uses, and its rate.

    NVLink counts if every pair is connected by it, directly or through a switch. None if NVML does not report it.
    """
    with contextlib.suppress(NvmlError, KeyError), nvml_session() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        has_nvlink = _all_reach(nvml, handles, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        # NVML may report reading without writing; NCCL writes to its peer (``src/transport/p2p.cc``).
        has_peers = _all_reach(nvml, handles, nvml.NVML_P2P_CAPS_INDEX_WRITE)
        detected = []
        for handle in handles:
            if has_nvlink:  # at the rate of the links that are up: an H100 PCIe with bridges has 12 of 18
                capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
                name, all_links = _BRIDGE if capability == (8, 6) else _NVLINK[capability[0]]
                states = (ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(_LINKS_AT_MOST))
                rate = links()[name].bytes_per_second * min(sum(map(bool, states)) or all_links, all_links) // all_links
            else:  # the maximum of card and board: an idle card lowers its link's rate
                generation = min(5, max(3, nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)))
                name = f"pcie{generation}{'' if has_peers else '-host'}"
                rate = _of_lanes(links()[name].bytes_per_second, name, nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
            detected.append((name, rate))
        return min(detected, key=lambda each: each[1])
    return None


def _all_reach(nvml: Any, handles: Sequence[Any], way: int) -> bool:
    pairs = ((one, other) for index, one in enumerate(handles) for other in handles[index + 1 :])
    return all(nvml.nvmlDeviceGetP2PStatus(one, other, way) == nvml.NVML_P2P_STATUS_OK for one, other in pairs)
