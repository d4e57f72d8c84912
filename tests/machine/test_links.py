"""Tests the links between GPUs and machines: named, usual for a card, and detected by NVML."""

import sys

import pytest
from fake_nvml import FakeGpu, FakeNvml

from autotrain_mem.machine.catalog import catalog, named
from autotrain_mem.machine.links import detected_link, links, topology, usual_link
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import MIB

GB = 10**9


USUAL = {
    "h100-80gb": ("nvlink4", 350 * GB),
    "a100-80gb-pcie": ("pcie4", 20 * GB),
    "rtx3090": ("pcie4-host", 14 * GB),
    "rtx4060": ("pcie4-host", 7 * GB),
}


def test_every_card_of_the_catalog_has_a_usual_link_of_the_catalog() -> None:
    assert {name: usual_link(named(name)) for name in USUAL} == USUAL
    assert {usual_link(card)[0] for card in catalog()} <= links().keys()
    assert all(link.source for link in links().values())


def test_a_named_link_wins_and_the_rest_is_usual() -> None:
    card = named("h100-80gb")
    alone = topology(card, devices=1)
    assert (alone.link, alone.network, alone.links, alone.processes) == ("", "", None, 1)
    two = topology(card, devices=8, nodes=2)
    assert (two.processes, two.links) == (16, "nvlink4,ndr")
    slow = topology(card, devices=8, nodes=2, asked="ethernet100, pcie5")
    assert (slow.link, slow.link_bytes_per_second) == ("pcie5", 40 * GB)
    assert slow.network_bytes_per_second == 10 * GB // 8, "the GPUs of a machine share it"
    assert topology(named("rtx3090"), devices=2, nodes=2).network_bytes_per_second is None, "nothing is usual there"
    assert topology(named("24GiB"), devices=2).link_bytes_per_second is None
    assert topology(named("24GiB"), devices=2, asked="NVLink4").link_bytes_per_second == 350 * GB
    with pytest.raises(UsageError, match="two links between devices"):
        topology(card, devices=2, asked="nvlink4,pcie4")


def pair(**facts: object) -> list[FakeGpu]:
    return [FakeGpu("A", **facts), FakeGpu("B", **facts)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "link", "gb_per_second"),
    [
        (pair(capability=(9, 0), bridged_to=("A", "B"), nvlinks=18), "nvlink4", 350),
        (pair(capability=(9, 0), bridged_to=("A", "B"), nvlinks=12), "nvlink4", 350 * 12 / 18),
        (pair(capability=(8, 0), bridged_to=("A", "B"), nvlinks=12), "nvlink3", 230),
        (pair(bridged_to=("A", "B"), nvlinks=4), "nvlink-bridge", 43),
        (pair(has_peers=False), "pcie4-host", 14),
        (pair(pcie=(5, 16)), "pcie5", 40),
        ([FakeGpu("A"), FakeGpu("B", pcie=(4, 8))], "pcie4", 10),
        ([*pair(bridged_to=("A", "B"), nvlinks=4), FakeGpu("C")], "pcie4", 20),
    ],
)
def test_the_slowest_detected_link_counts_and_without_nvml_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, gpus: list[FakeGpu], link: str, gb_per_second: float
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))
    uuids = [gpu.uuid for gpu in gpus]
    found = topology(named("h100-80gb"), devices=len(gpus), uuids=uuids)
    assert (found.link, found.link_bytes_per_second) == (link, pytest.approx(gb_per_second * GB, abs=MIB))
    assert topology(named("h100-80gb"), devices=len(gpus), uuids=uuids, asked="pcie3").link == "pcie3"
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([]))
    assert detected_link(uuids) is None
    assert topology(named("a100-80gb"), devices=2, uuids=uuids).link == "nvlink3"
