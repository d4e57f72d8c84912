"""The stage on which a trainer rehearses: fake tensors below, the recorder above, CUDA's habits in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations import moe
from transformers.utils import import_utils

from autotrain_mem.rehearsal.lens.cuda import NOT_IMITATED, cuda_lens
from autotrain_mem.rehearsal.materialize import conversion_by_assignment
from autotrain_mem.rehearsal.phases import follow
from autotrain_mem.rehearsal.recorder import Device, Recorder
from autotrain_mem.rehearsal.values import KnownValues
from autotrain_mem.spec import Phase, Trace

Collate = Callable[[list[Any]], dict[str, Any]]


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Everything made inside has shape, dtype and device, and no bytes.

    transformers takes a fake tensor for a sign of tracing and then never looks at a mask's values
    (``transformers/utils/import_utils.py: is_tracing``). A rehearsal knows them, so it is told that none is fake.
    Experts of other dtypes than bfloat16 take the path without grouped_mm, which has no fake kernel for them.
    """

    def takes_bfloat16(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
        return weight.dtype is torch.bfloat16

    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        conversion_by_assignment(),
        patch.object(import_utils, "is_fake_tensor", lambda value: False),
        patch.object(moe, "_can_use_grouped_mm", takes_bfloat16),
    ):
        yield mode


def rehearse(
    build_trainer: Callable[[], Any], edit_rows: Callable[[list[Any]], list[Any]], not_counted: tuple[str, ...] = ()
) -> Trace:
    """Build a trainer and run its own ``train()`` on fake tensors; returns what it allocated.

    Args:
        build_trainer: Makes the trainer, with a fake model; called under fake mode.
        edit_rows: Makes the worst micro-batch of the rows that the sampler drew.
        not_counted: What this rehearsal leaves out, beside what no rehearsal imitates.
    """
    with fake_tensors() as mode, cuda_lens():
        values = KnownValues(mode)
        trainer = build_trainer()
        recorder = Recorder(values.run)
        trainer.data_collator = _host_collator(trainer.data_collator, edit_rows, values.arrive, recorder)
        _train(trainer, recorder)
    return recorder.trace((*not_counted, *NOT_IMITATED))


class Watch:
    """Runs a trainer's own ``train()`` on real CPU tensors, seen as a GPU would see it.

    Args:
        device: A simulated GPU; its out-of-memory error ends the training like a real one's.
        edit_rows: Changes the rows of each micro-batch; for tests that compare with a rehearsal.
    """

    def __init__(self, device: Device | None = None, edit_rows: Callable[[list[Any]], list[Any]] = list) -> None:
        self.recorder = Recorder(device=device)
        self._edit_rows = edit_rows

    @property
    def phase(self) -> Phase:
        """Where the run is, or where it ended."""
        return self.recorder.phase

    def train(self, trainer: Any, **options: Any) -> None:
        """``trainer.train(**options)``, watched."""
        trainer.data_collator = _host_collator(trainer.data_collator, self._edit_rows, dict, self.recorder)
        with cuda_lens():
            _train(trainer, self.recorder, **options)


def _train(trainer: Any, recorder: Recorder, **train: Any) -> None:
    follow(trainer, recorder)
    with recorder.recording():
        trainer.train(**train)


def _host_collator(
    collate: Collate,
    edit_rows: Callable[[list[Any]], list[Any]],
    arrive: Callable[[dict[str, Any]], dict[str, Any]],
    recorder: Recorder,
) -> Collate:
    """Collation happens on the host, with real values and unseen; the batch is born on the device as it arrives."""

    def collate_on_host(rows: list[Any]) -> dict[str, Any]:
        with torch._C._DisableTorchDispatch():
            collated = collate(edit_rows(rows))
            # A copy to a device takes what a view shows, not the storage behind it.
            batch = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in collated.items()
            }
        batch = arrive(batch)
        recorder.adopt_batch(value for value in batch.values() if isinstance(value, torch.Tensor))
        return batch

    return collate_on_host
