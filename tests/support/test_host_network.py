"""The interface over which a machine reaches another is found without sending anything."""

import os

import psutil
import pytest

from autotrain_mem.support import host
from autotrain_mem.training.process import world


def test_an_address_is_reached_over_the_interface_that_holds_ours() -> None:
    assert host.interface_to("127.0.0.1") == world.LOOPBACK
    for name, held in psutil.net_if_addrs().items():
        own = [each.address for each in held if each.family.name == "AF_INET"]
        assert [host.interface_to(address) for address in own] in ([name] * len(own), [world.LOOPBACK] * len(own))


def test_no_interface_reaches_what_has_no_address() -> None:
    assert host.interface_to("no-such-host.invalid") is None


def test_gloo_talks_where_the_first_machine_is_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is taken back, whatever is set meanwhile
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    for found in (None, world.LOOPBACK):
        monkeypatch.setattr(world, "interface_to", lambda address, found=found: found)
        world.find_other_machines()
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setattr(world, "interface_to", lambda address: "ib0" if address == "10.0.0.1" else None)
    world.find_other_machines()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    world.find_other_machines()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
