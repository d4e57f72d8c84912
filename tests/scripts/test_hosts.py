"""Machines of a network of their own reach each other, and not while one is off it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from survival_cases import hosts
from survival_cases.hosts import Hosts, two_hosts

ANSWERS = """
import socket
server = socket.create_server(("10.77.0.1", 5000))
print("up", flush=True)
while True:
    server.accept()
"""
ASKS = "import socket; socket.create_connection(('10.77.0.1', 5000), timeout=1)"


@pytest.fixture
def two() -> Iterator[Hosts]:
    if not hosts.can_be_made():
        pytest.skip("network namespaces take root, and ip")
    with two_hosts(apart=True) as machines:
        yield machines


def test_a_machine_that_is_unplugged_is_not_reached(two: Hosts) -> None:
    def asks() -> bool:
        return subprocess.run([*two.on(1), sys.executable, "-c", ASKS], capture_output=True).returncode == 0

    with subprocess.Popen([*two.on(0), sys.executable, "-c", ANSWERS], stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == b"up\n"
            assert asks()
            two.unplug(0)
            assert not asks()
            two.plug(0)
            assert any(asks() for _ in range(10))  # a link takes a moment to come up
        finally:
            first.kill()


def test_nothing_is_left_of_them() -> None:
    if not hosts.can_be_made():
        pytest.skip("network namespaces take root, and ip")
    with two_hosts(apart=True) as machines:
        names = machines.names
    there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not [name for name in names if name in there]
