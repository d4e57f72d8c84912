"""Makes rows that processes share (DeepSpeed's sequence parallelism) follow each epoch's order, also after a resume.

DeepSpeed's dataloader adapter takes no epoch and cannot start in the middle of one. It also lacks attributes that are
needed to skip batches (``accelerate/data_loader.py: skip_first_batches``).
"""

from collections.abc import Callable
from typing import Any, Self

import accelerate
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from transformers import trainer as transformers_trainer


class SharedRows(UlyssesSPDataLoaderAdapter):  # type: ignore[misc]  # DeepSpeed is untyped
    """Changes DeepSpeed's adapter so that it can start at any micro-batch. A batch has one micro-batch per process."""

    def __init__(self, adapter: UlyssesSPDataLoaderAdapter, loader: Any = None, left_out: int = 0) -> None:
        super().__init__(
            adapter.dl if loader is None else loader,
            adapter.sp_rank,
            adapter.sp_group,
            adapter.sp_world_size,
            adapter.device,
        )
        self._left_out = left_out

    def __iter__(self) -> Self:
        """Begins an epoch with a new iterator. DeepSpeed's adapter would keep an exhausted one and end the epoch at
        once: a trainer never draws beyond an epoch's last batch (``transformers/trainer.py: get_batch_samples``)."""
        self.iter = iter(self.dl)
        self.micro_batches.clear()
        return self

    def __next__(self) -> Any:
        while self._left_out:  # not in __iter__: set_epoch is called after it
            self._left_out -= 1
            super().__next__()
        return super().__next__()

    def set_epoch(self, epoch: int) -> None:
        self.dl.set_epoch(epoch)

    def without_first(self, micro_batches: int) -> Self:
        """Returns an adapter for the same rows that starts this many micro-batches later."""
        batches, left_out = divmod(micro_batches, self.sp_world_size)
        return SharedRows(self, accelerate.skip_first_batches(self.dl, batches), left_out)


def share_rows(trainer: Any) -> None:
    """Makes a trainer use :class:`SharedRows` in place of DeepSpeed's adapter."""
    accelerator = trainer.accelerator
    adapt: Callable[..., Any] = accelerator.deepspeed_ulysses_dl_adapter
    accelerator.deepspeed_ulysses_dl_adapter = lambda *args: SharedRows(adapt(*args))
    transformers_trainer.skip_first_batches = _skip_first_batches


def _skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    if isinstance(loader, SharedRows):
        return loader.without_first(num_batches)
    return accelerate.skip_first_batches(loader, num_batches)
