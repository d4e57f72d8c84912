"""Makes one real run on the stand-in device: ``python -m hollow_cuda.child REQUEST.json``, in a build's environment.

The run is the same as for ``scripts/record_gpu`` (``gpu_records.child``), on another kind of card.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_records import child as gpu_child
from gpu_records.card import CudaCard
from gpu_records.cases import GpuCase
from gpu_records.record import CardFacts, Outside, write

from autotrain_mem.support import codec


def main() -> None:
    """Trains the case and writes its record."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    case, out = codec.from_json(GpuCase, request["case"]), Path(request["out"])
    card = HollowCard(recomputes_sizes=bool(case.images))
    with tempfile.TemporaryDirectory(prefix="hollow-", ignore_cleanup_errors=True) as scratch:
        record = gpu_child.record(case, card, Path(request["model"]), scratch, complete_as_rehearsed)
    write(out, record)
    sys.stdout.flush()
    os._exit(0)  # autograd's device thread cannot be stopped; a regular exit would abort the process


class HollowCard(CudaCard):
    """The stand-in device."""

    def __init__(self, *, recomputes_sizes: bool = False) -> None:
        super().__init__()
        self._recomputes_sizes = recomputes_sizes

    def open(self) -> None:
        import torch

        # The stand-in for cuDNN returns no properties by which torch could choose one of its attention kernels.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cudnn.enabled = False  # nor its convolutions; torch's own hold an image's columns meanwhile
        torch.cuda.init()
        super().open()

    @contextmanager
    def cuda_semantics(self) -> Iterator[None]:
        from hollow_cuda.values import HostValues

        values = HostValues()
        with values, values.in_recomputation() if self._recomputes_sizes else nullcontext():
            yield

    def facts(self) -> CardFacts:
        return replace(super().facts(), name="stand-ins for NVIDIA's libraries; no GPU", driver=None, is_real=False)

    def outside(self) -> Outside:
        return Outside(non_torch_bytes=None, source="no GPU: memory outside torch is unknown")


def complete_as_rehearsed(ids: Any, prompt: Any, end: Sequence[int]) -> None:
    """Ends completions as in ``gpu_records.child``: the first has its full length, the last tokens of the others end
    the sequence. The device stores no values, so the ids are registered as known instead of being written.
    """
    import torch

    from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN
    from hollow_cuda.values import know, known_value

    begun = known_value(prompt)
    if begun is None:
        return
    completions = torch.full((ids.shape[0], ids.shape[1] - begun.shape[1]), ORDINARY_TOKEN, dtype=ids.dtype)
    if end:
        completions[1:, -len(end) :] = torch.tensor(end)
    know(ids, torch.cat([begun, completions], dim=1))


if __name__ == "__main__":
    main()
