"""One worker for many commands and calls: to start one takes longer than all else in most tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autotrain_mem import api
from tests.forked import Forge


class SharedWorkers(api.Workers):
    """Outlive the ``with`` block of a command."""

    def __exit__(self, *_: object) -> None:
        pass

    def end(self) -> None:
        super().__exit__()


@contextmanager
def started_in(place: Path, forge: Forge) -> Iterator[SharedWorkers]:
    """Where relative paths lead, as for a user who is there; one, since the suite runs in two processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        with forge.children():
            shared = SharedWorkers(1)
    yield shared
    shared.end()
