"""DeepSpeed's sequence parallelism (Ulysses, of ALST) on CPU tensors that stand for a GPU's.

Its own code runs as it is: rows are gathered from the processes that share them and cut into as many parts, and around
each layer's attention tokens are exchanged for heads (``deepspeed/runtime/sequence_parallel/ulysses_sp.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm
from deepspeed.runtime.sequence_parallel import parallel_state_sp, ulysses_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from deepspeed.sequence import layer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autotrain_mem.rehearsal.ranks.recording import RankRecorder, wrapped


@contextmanager
def shared_sequences(recorder: RankRecorder, *, is_fake: bool) -> Iterator[None]:
    """Inside, DeepSpeed has groups of processes share rows; what it keeps in globals is gone afterwards."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(vars(parallel_state_sp)))
        stack.enter_context(patch.dict(layer._all_to_all_groups))
        # It puts its own function in the place of the attention that it goes around.
        stack.enter_context(patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping))
        stack.enter_context(wrapped(UlyssesSPDataLoaderAdapter, "refill", _refill, recorder))
        stack.enter_context(wrapped(UlyssesSPDataLoaderAdapter, "__next__", _next, recorder))
        if not is_fake:
            stack.enter_context(patch.object(ulysses_sp, "dist", _Uneven()))
        yield


class _Uneven:
    """DeepSpeed's collectives, but that rows of several lengths are gathered as NCCL does, which sends each to all
    (``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: ProcessGroupNCCL::allgather``). gloo refuses them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(comm, name)

    def all_gather(self, tensors: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        if all(tensor.shape == own.shape for tensor in tensors):
            comm.all_gather(tensors, own, group=group)
            return
        tensors[comm.get_rank(group)].copy_(own)
        for rank, tensor in enumerate(tensors):
            comm.broadcast(tensor, comm.get_global_rank(group, rank), group=group)


def _refill(refill: Callable[[Any], None], recorder: RankRecorder, loader: Any) -> None:
    """Parts of rows wait on the host, which ``refill`` copies them to: a copy that a CPU's tensors would not make."""
    refill(loader)
    with recorder.unseen():
        for batch in loader.micro_batches:
            batch.update({name: _copy(value) for name, value in batch.items()})


def _next(following: Callable[[Any], dict[str, Any]], recorder: RankRecorder, loader: Any) -> dict[str, Any]:
    """A part is counted on the device from when it is drawn: a few micro-steps before a trainer moves it there
    (``transformers/trainer.py: _prepare_inputs``), ids and labels that are nothing beside activations."""
    batch = {name: _copy(value) for name, value in following(loader).items()}
    recorder.adopt_batch(value for value in batch.values() if isinstance(value, torch.Tensor))
    return batch


def _copy(value: Any) -> Any:
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value
