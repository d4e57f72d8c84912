"""``autofit``, whose processes are forked off one that has imported everything: see ``tests/forked.py``.

Run as a module by ``command`` where ``survival --forked`` was asked for.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotrain_mem.cli.main import main
from tests.forked import Forge

ADDRESS = "AUTOFIT_SURVIVAL_FORGE"


class Running(Forge):
    """One that somebody else has started, and will end."""

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ[ADDRESS])
        return connection


@contextmanager
def forge() -> Iterator[None]:
    """Inside, commands and workers find the process to be forked off."""
    with tempfile.TemporaryDirectory() as folder:
        running = Forge(Path(folder))
        running.connect().close()
        os.environ[ADDRESS] = str(Path(folder) / "forge")
        try:
            with running.children():
                yield
        finally:
            running.end()


if __name__ == "__main__":
    with Running(Path()).children():
        main()
