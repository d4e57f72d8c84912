"""What joins GPUs and machines: by name, as usual for a card, and as NVML finds it."""

import sys

import pytest
from fake_nvml import FakeGpu, FakeNvml

from autotrain_mem.machine.catalog import catalog, named
from autotrain_mem.machine.links import detected_link, links, named_links, topology, usual_link
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import MIB

GB = 10**9


def test_every_card_of_the_catalog_is_joined_by_a_link_of_the_catalog_as_far_as_it_is_known() -> None:
    unknown = [card.name for card in catalog() if usual_link(card)[1] is None]
    assert unknown == []
    assert {usual_link(card)[0] for card in catalog()} - {""} <= links().keys()
    assert all(link.source for link in links().values())


@pytest.mark.parametrize(
    ("name", "link", "gb_per_second"),
    [
        ("h100-80gb", "nvlink4", 350),
        ("a100-80gb-pcie", "pcie4", 20),
        ("rtx3090", "pcie4-host", 14),
        ("rtx4060", "pcie4-host", 7),
    ],
)
def test_a_named_card_has_the_link_that_is_usual_for_it(name: str, link: str, gb_per_second: int) -> None:
    assert usual_link(named(name)) == (link, gb_per_second * GB)


def test_what_is_asked_for_wins_and_the_rest_is_usual() -> None:
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


def test_two_links_of_one_kind_are_refused() -> None:
    with pytest.raises(UsageError, match="two of them join the GPUs"):
        named_links("nvlink4,pcie4")


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
def test_the_slowest_way_between_two_cards_that_are_here_counts(
    monkeypatch: pytest.MonkeyPatch, gpus: list[FakeGpu], link: str, gb_per_second: float
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))
    uuids = [gpu.uuid for gpu in gpus]
    name, bytes_per_second = detected_link(uuids) or ("", None)
    assert name == link
    assert bytes_per_second == pytest.approx(gb_per_second * GB, abs=MIB)
    assert topology(named("h100-80gb"), devices=len(gpus), uuids=uuids).link == link
    assert topology(named("h100-80gb"), devices=len(gpus), uuids=uuids, asked="pcie3").link == "pcie3"


def test_where_nvml_does_not_tell_what_is_usual_for_the_card_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([]))
    assert detected_link(["A", "B"]) is None
    assert topology(named("a100-80gb"), devices=2, uuids=["A", "B"]).link == "nvlink3"
