"""``autofit``, whose processes are forked off one that has imported everything: see ``tests/forked.py``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from survival_cases import command
from tests.forked import Forge


@contextmanager
def forge() -> Iterator[None]:
    """Inside, commands and workers are forked."""
    with tempfile.TemporaryDirectory() as folder:
        running = Forge(Path(folder))
        running.connect().close()  # before several threads want it
        try:
            with running.commands(command):
                yield
        finally:
            running.end()
