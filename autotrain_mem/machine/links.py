"""Determines the links between GPUs and between machines: named by the user, usual for a card, or detected by NVML.

``links.csv`` has the bus bandwidth of nccl-tests (``doc/PERFORMANCE.md``) for messages of many MiB, in 10**9 bytes per
second for each device and direction. A ``derived`` row is not measured. ``-host`` is PCI Express without peer access,
as with GeForce drivers: each transfer goes through host memory. All GPUs of a machine share a ``shared_by_node``
network.
"""

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
"""Maps a link between GPUs to the usual network of such machines, with one port per card (data sheets of DGX A100, H100
and B200)."""

FULL_LANES = 16

_NVLINK = {7: ("nvlink2", 6), 8: ("nvlink3", 12), 9: ("nvlink4", 18), 10: ("nvlink5", 18)}
"""Maps a major compute capability to a row and a card's number of links (data sheets of V100, A100, H100 and B200)."""
_BRIDGE = ("nvlink-bridge", 4)
"""The row and number of links of GA102 cards, whose links have half of A100's rate (NVIDIA's whitepaper on GA102)."""
_LINKS_AT_MOST = 18
"""NVML's ``NVML_NVLINK_MAX_LINKS`` up to Blackwell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interconnect:
    """Describes one link, a row of ``links.csv``."""

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
    """Returns the topology of several devices of one kind. Raises UsageError if a link is unknown, or two links join
    devices, or two join nodes. ``asked``: the value of ``--link``; other links are detected by NVML, or assumed from
    the card. ``uuids``: the devices' UUIDs if they are on this machine."""
    names = named_links(asked)
    joined = Topology(nodes=nodes, devices=devices, uuids=tuple(uuids))
    if devices > 1:
        chosen = names.get("devices")
        named = None if chosen is None else (chosen.name, chosen.bytes_per_second)
        link, rate = named or (detected_link(uuids) if uuids else None) or usual_link(card)
        joined = replace(joined, link=link, link_bytes_per_second=rate)
    if nodes > 1 and (network := names.get("nodes") or links().get(NETWORKS.get(usual_link(card)[0], ""))):
        rate = network.bytes_per_second // (devices if network.shared_by_node else 1)
        joined = replace(joined, network=network.name, network_bytes_per_second=rate)
    return joined


def named_links(asked: str | None) -> dict[str, Interconnect]:
    """Parses ``nvlink4``, ``ndr`` or ``nvlink4,ndr``: ``devices`` or ``nodes`` -> their link. Raises UsageError."""
    chosen: dict[str, Interconnect] = {}
    for name in filter(None, (each.strip().lower() for each in (asked or "").split(","))):
        if name not in links():
            near = difflib.get_close_matches(name, links(), n=2)
            meant = f"Did you mean {' or '.join(near)}? " if near else ""
            known = {kind: [row.name for row in links().values() if row.joins == kind] for kind in ("devices", "nodes")}
            raise UsageError(
                f"No link is called {name!r}.",
                hint=f"{meant}GPUs: {', '.join(known['devices'])}; machines: {', '.join(known['nodes'])}.",
            )
        link = links()[name]
        if link.joins in chosen:
            message = f"--link {asked} names two links between {link.joins}."
            raise UsageError(message, hint="Give at most one between GPUs and one between machines.")
        chosen[link.joins] = link
    return chosen


def usual_link(card: Hardware) -> tuple[str, int | None]:
    """Returns the usual link between cards of this kind, and its rate; an empty name and None for an unknown card."""
    if (known := link_of(card)) is None:
        return "", None
    name, lanes = known
    return name, _of_lanes(links()[name].bytes_per_second, name, lanes)


def _of_lanes(bytes_per_second: int, name: str, lanes: int) -> int:
    return bytes_per_second * min(lanes, FULL_LANES) // FULL_LANES if name.startswith("pcie") else bytes_per_second


def detected_link(uuids: Sequence[str]) -> tuple[str, int | None] | None:
    """Returns the slowest link that a collective between these cards uses, and its rate; None if NVML reports none.

    NVLink counts if every pair is connected by it, directly or through a switch.
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
