"""Records one case in a separate process: ``python -m gpu_records.child REQUEST.json``, then a line on its stdin.

It imports everything and then waits for that line, so the next case is imported while the current one trains.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from autotrain_mem.support import codec
from gpu_records.cases import SEED, GpuCase
from gpu_records.record import Record, versions, write

if TYPE_CHECKING:
    from gpu_records.card import CudaCard, DryCard  # which need torch

SETTING = "PYTORCH_ALLOC_CONF"


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    case = codec.from_json(GpuCase, request["case"])
    import_all(case)
    if not sys.stdin.readline():
        return  # the parent has exited
    from gpu_records.card import CudaCard, DryCard

    card = DryCard(case.allocator) if request["device"] == "cpu" else CudaCard()
    with tempfile.TemporaryDirectory(prefix="record-", ignore_cleanup_errors=True) as scratch:
        write(Path(request["out"]), record(case, card, Path(request["model"]), scratch))
    sys.stdout.flush()
    os._exit(0)  # a regular exit would take a second


def import_all(case: GpuCase) -> None:
    """Imports the modules that the run needs."""
    import torch  # noqa: F401

    from autotrain_mem.methods.interface import method_of
    from autotrain_mem.rehearsal import rehearse  # noqa: F401

    method_of(case.method).configs({"output_dir": tempfile.gettempdir(), "use_cpu": True, "report_to": "none"})
    if case.knobs.load_in_4bit or case.knobs.load_in_8bit:
        import bitsandbytes  # noqa: F401


Complete = Callable[[Any, Any, Sequence[int]], None]
"""Replaces sampled completions by those of a rehearsal: ``complete(ids, prompt, end)`` gets all ids, the ids of the
prompts, and the tokens that end a sequence."""


def complete_as_rehearsed(ids: Any, prompt: Any, end: Sequence[int]) -> None:
    """Fills completions with an ordinary token and ends them as a rehearsal does.

    The first completion of a batch has its full length; the last tokens of the others end the sequence
    (``rehearsal/generation.py``). The ids are written in place, without an allocation.
    """
    import torch

    from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN

    with torch._C._DisableTorchDispatch():
        ids[:, prompt.shape[1] :].fill_(ORDINARY_TOKEN)
        for place, token in enumerate(reversed(end), start=1):
            ids[1:, -place].fill_(token)


def record(
    case: GpuCase, card: CudaCard | DryCard, model: Path, scratch: str, complete: Complete = complete_as_rehearsed
) -> Record:
    """Builds the trainer as a rehearsal does, but with real weights, and trains two steps on the same worst batch."""
    import torch

    from gpu_records.models import config_files

    torch.manual_seed(SEED)
    started = time.perf_counter()
    card.open()
    spec = real_trainer_spec(case, model, scratch, on_host=card.on_host)
    with card.cuda_semantics(), sampled(complete):
        trainer = spec.build()
        loaded, built = card.levels(), time.perf_counter()
        with spec.patches(trainer):
            card.train(trainer, spec.edit_rows)
        trained, ended = card.levels(), time.perf_counter()
    return Record(
        case=case,
        model_files=config_files(model),
        card=card.facts(),
        versions=versions(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seed=SEED,
        allocator=os.environ.get(SETTING, ""),
        loaded=loaded,
        trained=trained,
        outside=card.outside(),
        memory_stats=card.memory_stats(),
        seconds={"load": round(built - started, 2), "train": round(ended - built, 2)},
        history=card.history(),
    )


def real_trainer_spec(case: GpuCase, model: Path, scratch: str, *, on_host: bool, **others: Any) -> Any:
    """Returns the trainer spec of a rehearsal, with the same configs and worst batch, that may use the card.

    ``trainer_spec`` keeps a rehearsal on the CPU with the argument ``use_cpu``, which is reset here. ``others``:
    override the trainer's arguments.
    """
    from autotrain_mem.rehearsal import rehearse
    from autotrain_mem.rehearsal.rehearse import rehearsal_arguments

    def on_card(*args: Any) -> dict[str, Any]:
        arguments = rehearsal_arguments(*args)
        return {**arguments, **({} if on_host else {"use_cpu": False}), **others}

    with patch.object(rehearse, "rehearsal_arguments", on_card):
        return rehearse.trainer_spec(case.job(model), case.knobs, case.length, scratch)


@contextlib.contextmanager
def sampled(complete: Complete) -> Iterator[None]:
    """Inside, sampled completions are passed to ``complete``, and are not shuffled: batches are a rehearsal's."""
    from transformers import GenerationMixin
    from trl.trainer import grpo_trainer, rloo_trainer

    from autotrain_mem.rehearsal.generation import end_of_sequence

    sample = GenerationMixin._sample

    def sample_and_complete(model: Any, prompt: Any, *args: Any, generation_config: Any, **options: Any) -> Any:
        import torch

        result = sample(model, prompt, *args, generation_config=generation_config, **options)
        ids = result if isinstance(result, torch.Tensor) else result.sequences
        complete(ids, prompt, end_of_sequence(generation_config))
        return result

    with (
        patch.object(GenerationMixin, "_sample", sample_and_complete),
        patch.object(grpo_trainer, "shuffle_sequence_dict", dict),
        patch.object(rloo_trainer, "shuffle_sequence_dict", dict),
    ):
        yield


if __name__ == "__main__":
    main()
