"""Rows that processes share in DeepSpeed's way are drawn in each epoch's order, and from where a run goes on."""

from typing import Any

import pytest
from torch.utils.data import DataLoader

pytest.importorskip("deepspeed")

from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

from autotrain_mem.trainers import shared_rows
from autotrain_mem.trainers.shared_rows import SharedRows

BATCHES, SHARED_BY = 3, 2


class Order:
    """Draws rows in an order that follows from the epoch, as a seeded sampler does."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Any:
        return iter([10 * self.epoch + row for row in range(BATCHES)])

    def __len__(self) -> int:
        return BATCHES


class Loader(DataLoader[Any]):
    def set_epoch(self, epoch: int) -> None:
        self.sampler.epoch = epoch  # type: ignore[attr-defined]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> SharedRows:
    def refill(adapter: Any) -> None:
        """Instead of rows of other processes: the same ones, told apart."""
        try:
            (row,) = next(adapter.iter).tolist()
        except StopIteration:
            adapter.iter = iter(adapter.dl)
            raise
        adapter.micro_batches.extend({"row": f"{row} of {rank}"} for rank in range(SHARED_BY))

    monkeypatch.setattr(UlyssesSPDataLoaderAdapter, "refill", refill)
    loader = Loader(range(100), sampler=Order(), batch_size=1)  # type: ignore[arg-type]
    return SharedRows(UlyssesSPDataLoaderAdapter(loader, 0, None, SHARED_BY, "cpu"))


def drawn(rows: SharedRows, epoch: int) -> list[str]:
    """What a trainer draws in one epoch: as many as there are, and no more."""
    rows.set_epoch(epoch)
    drawing = iter(rows)
    return [next(drawing)["row"] for _ in range(len(rows))]


@pytest.mark.parametrize("done", [1, 2, 3, 4])
def test_every_epoch_has_all_rows_in_its_own_order_and_a_run_goes_on_with_the_rest(rows: SharedRows, done: int) -> None:
    for epoch in (0, 1, 2, 5, 4):
        whole = drawn(rows, epoch)
        assert whole == [f"{10 * epoch + row} of {rank}" for row in range(3) for rank in range(2)]
    rest = shared_rows._skip_first_batches(rows, done)
    assert isinstance(rest, SharedRows)
    left = iter(rest)
    # accelerate's loaders pass on the epoch; one that skips has its sampler
    assert [next(left)["row"] for _ in range(len(whole) - done)] == whole[done:]
    assert drawn(rows, 5)[0] == "50 of 0"
