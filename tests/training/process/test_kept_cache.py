"""On a simulated card, what the longest rows left in the cache outlasts the run, unless its user says else."""

from pathlib import Path
from typing import Any

import torch
from tiny_trainers import rows, trainer
from transformers import TrainerCallback

from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.rehearsal.fake_run import Watch
from autotrain_mem.trainers.finish import keep_cache_in_evaluation
from autotrain_mem.training.process.longest_batch import attach_longest_batch

EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}


class Reserved(TrainerCallback):
    """Notes what is reserved once each optimizer step is done, and once its evaluation and its saving are."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self.stepped: list[int] = []
        self.later: list[int] = []

    def _bytes(self) -> int:
        return self._gpu.memory_stats()["reserved_bytes.all.current"]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.stepped.append(self._bytes())

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.later.append(self._bytes())

    on_save = on_evaluate


def reserved(method: str, model: Path, folder: Path, *, keeps: bool = True, **changes: Any) -> Reserved:
    gpu = SimulatedGpu(named("4GiB"))
    watch, seen = Watch(gpu), Reserved(gpu)
    with watch.cuda_semantics():
        made = trainer(method, model, folder, eval_dataset=rows(method).select(range(4)), **EACH_STEP | changes)
        if keeps:
            keep_cache_in_evaluation(made)
        attach_longest_batch(made, lambda batch: None)
        made.add_callback(seen)
        watch.train(made)
    return seen


def test_evaluation_gives_nothing_back_but_what_its_users_code_does(gpt2: Path, tmp_path: Path) -> None:
    """Nor does ``torch_empty_cache_steps`` change."""
    seen = reserved("grpo", gpt2, tmp_path, eval_accumulation_steps=1)
    assert len(seen.later) == 2
    assert min(seen.later) >= seen.stepped[0], "generation gives nothing back either"
    plain = {"compute_metrics": lambda answers, compute_result: {}}
    empties = {"compute_metrics": lambda answers, compute_result: torch.cuda.empty_cache() or {}}
    kept = reserved("sft", gpt2, tmp_path, batch_eval_metrics=True, build=plain)
    assert min(kept.later) >= kept.stepped[0]
    others = (
        reserved("sft", gpt2, tmp_path, keeps=False, eval_accumulation_steps=1),
        reserved("sft", gpt2, tmp_path, batch_eval_metrics=True, build=empties),
    )
    for each in others:
        assert min(each.later) < each.stepped[0] == kept.stepped[0]
    assert reserved("sft", gpt2, tmp_path, torch_empty_cache_steps=1).stepped[0] < kept.stepped[0]
