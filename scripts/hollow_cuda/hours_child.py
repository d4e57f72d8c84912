"""Trains one case on the stand-in device: ``python -m hollow_cuda.hours_child REQUEST.json``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu_records.child import real_trainer_spec, sampled

from autotrain_mem.support import codec
from hollow_cuda.child import complete_as_rehearsed
from hollow_cuda.hours import HoursCase


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    case = codec.from_json(HoursCase, request["case"])
    with tempfile.TemporaryDirectory(prefix="hours-", ignore_cleanup_errors=True) as scratch:
        rows = train(case, Path(request["model"]), scratch)
    Path(request["out"]).write_text(json.dumps(rows), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # autograd's thread of the device cannot be ended: the process would be aborted


def train(case: HoursCase, model: Path, scratch: str) -> list[Mapping[str, int]]:
    """Returns what the allocator held after each step."""
    import torch
    from transformers import TrainerCallback

    from autotrain_mem.training.process.longest_batch import LongestBatch, attach_longest_batch
    from hollow_cuda.values import HostValues

    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda.init()
    reserved: list[int] = []

    class Reserved(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            reserved.append(torch.cuda.max_memory_reserved())

    drawn: list[int] = []
    torch.manual_seed(0)
    with HostValues(), sampled(complete_as_rehearsed), _rows_of(case):
        steps = {"max_steps": case.steps, "logging_steps": case.steps}
        spec = real_trainer_spec(case.run, model, scratch, on_host=False, **steps)
        trainer = spec.build()
        collate = trainer.data_collator

        def collated(batch: list[Any]) -> Any:
            drawn.append(max(_tokens(row) for row in batch))
            return collate(batch)

        def forget(longest: LongestBatch) -> None:
            if not longest.why_not:
                drawn.pop()

        trainer.data_collator = collated
        trainer.add_callback(Reserved())
        with spec.patches(trainer):
            if case.longest_first:
                attach_longest_batch(trainer, forget)
            trainer.train()
    pairs = zip(reserved, drawn, strict=False)  # one batch is drawn ahead
    return [{"reserved": size, "tokens": tokens} for size, tokens in pairs]


def _tokens(row: Mapping[str, Any]) -> int:
    """Counts the tokens of a row; of a pair, its longer sequence's; of an online method's, the prompt's."""
    lengths = {
        name: len(value.split() if isinstance(value, str) else value)
        for name, value in row.items()
        if hasattr(value, "__len__")
    }
    prompt = lengths.pop("prompt_ids", lengths.pop("prompt", 0))
    return prompt + max(lengths.values(), default=0)


@contextmanager
def _rows_of(case: HoursCase) -> Iterator[None]:
    """Inside, a trainer gets the case's rows in the place of a rehearsal's."""
    from datasets import concatenate_datasets

    from autotrain_mem.methods.interface import method_of

    method = method_of(case.run.method)
    worst = method.worst_rows

    def rows(filled: Any, length: int, count: int) -> Any:
        made = {tokens: worst(filled, tokens, 1) for tokens in {*case.lengths}}
        return concatenate_datasets([made[tokens] for tokens in case.lengths])

    with patch.object(method, "worst_rows", rows):
        yield


if __name__ == "__main__":
    main()
