"""Two machines of a network of their own: network namespaces of this host, joined by a pair of virtual interfaces.

Each has its own loopback and its own address, as two machines do, and a machine without power is one whose link goes
down: nobody is told that its connections are gone (ip-netns(8), veth(4)). That takes root; elsewhere both are this
host, at 127.0.0.1.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NUMBERS = itertools.count()
"""Of the pairs of this process: several run at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Two machines."""

    names: tuple[str, ...] = ()
    """Of their namespaces; empty where both are this host."""
    address: str = "127.0.0.1"
    """Of the first, as both reach it."""

    def on(self, machine: int) -> list[str]:
        """Returns what a command on this machine begins with."""
        return ["ip", "netns", "exec", self.names[machine]] if self.names else []

    def unplug(self, machine: int) -> None:
        """Take a machine off the network: it falls silent."""
        if self.names:
            _ip("-n", self.names[machine], "link", "set", "wire", "down")

    def plug(self, machine: int) -> None:
        """Bring it back."""
        if self.names:
            _ip("-n", self.names[machine], "link", "set", "wire", "up")


def can_be_made() -> bool:
    """Tells whether this user may make such machines here."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"autofit-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return tried.returncode == 0


@contextmanager
def two_hosts(*, apart: bool) -> Iterator[Hosts]:
    """Inside, two machines are there.

    Args:
        apart: Else both are this host.
    """
    if not apart:
        yield Hosts()
        return
    number = next(_NUMBERS)
    names = tuple(f"autofit-{os.getpid()}-{number}-{machine}" for machine in range(2))
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for machine, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.77.0.{machine + 1}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
        yield Hosts(names=names, address="10.77.0.1")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
