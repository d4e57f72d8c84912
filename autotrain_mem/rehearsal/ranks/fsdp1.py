"""FSDP's first version on CPU tensors that stand for a GPU's: its streams, and which of its flat tensors are whose.

A unit's parameters are joined into one flat tensor, of which each process keeps a shard; the whole one is a storage
that is resized as it is gathered and freed (``torch/distributed/fsdp/_flat_param.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle
from torch.distributed.fsdp._flat_param import FlatParamHandle

from autotrain_mem.rehearsal.ranks.recording import RankRecorder
from autotrain_mem.rehearsal.ranks.streams import Streams
from autotrain_mem.types import Owner


class _Device(Streams):
    """``torch.cuda`` as FSDP1 uses it, which names the device where FSDP2 asks for its number."""

    def current_device(self) -> Any:
        return torch.device("cpu")


@contextmanager
def fsdp1_rules(recorder: RankRecorder) -> Iterator[None]:
    """Inside, FSDP1 shards models as on GPUs."""
    device, prepare = _Device(recorder), Accelerator.prepare_model
    allocate = FlatParamHandle._alloc_padded_unsharded_flat_param

    def prepare_model(accelerator: Accelerator, model: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in model.parameters():
            recorder.work.know_weight(parameter)
        prepared = prepare(accelerator, model, *args, **kwargs)
        if isinstance(prepared, FullyShardedDataParallel):
            for unit in FullyShardedDataParallel.fsdp_modules(prepared):
                if unit._has_params:
                    recorder.mark(unit._flat_param, Owner.WEIGHTS, "flat_param")
            for name, buffer in prepared.named_buffers():
                recorder.mark(buffer, Owner.WEIGHTS, name)
        return prepared

    def allocated(handle: Any) -> Any:
        unsharded = allocate(handle)
        recorder.mark(unsharded, Owner.GATHERED_WEIGHTS, "flat_param")
        return unsharded

    with (
        patch.object(_FSDPDeviceHandle, "from_device", lambda *_: device),
        patch.object(Accelerator, "prepare_model", prepare_model),
        patch.object(FlatParamHandle, "_alloc_padded_unsharded_flat_param", allocated),
    ):
        yield
