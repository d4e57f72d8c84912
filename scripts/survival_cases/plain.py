"""A training script as TRL's documentation has it, on a simulated card; run as a process of its own.

    python -m survival_cases.plain '{"method": "sft", "card": "60MiB", "micro_batch": 20, "accumulation": 2, ...}'

Its last line is one object: every attempt at training, with the steps that it got to.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import accelerate.utils.memory
import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from autotrain_mem.machine.choose import choose
from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.rehearsal.fake_run import Watch

KINDS = {
    "sft": (SFTTrainer, SFTConfig, "text"),
    "reward": (RewardTrainer, RewardConfig, "pairs"),
    "dpo": (DPOTrainer, DPOConfig, "pairs"),
    "grpo": (GRPOTrainer, GRPOConfig, "prompts"),
}


@dataclass(kw_only=True, slots=True)
class Attempt:
    """Training from its beginning, until it ends or the card is full."""

    micro_batch: int
    steps: int = 0
    first_step_seconds: float | None = None
    """Since the command was given."""
    losses: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Reserved at most, after each step."""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class Diary(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Writes down each attempt."""

    def __init__(self, gpu: SimulatedGpu, started: float) -> None:
        self.attempts: list[Attempt] = []
        self._started = started
        self._gpu = gpu

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attempts.append(Attempt(micro_batch=state.train_batch_size))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        attempt = self.attempts[-1]
        attempt.steps = state.global_step
        attempt.peaks.append(self._gpu.reading().peak_reserved_bytes)
        if attempt.first_step_seconds is None:
            attempt.first_step_seconds = time.time() - self._started

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.attempts[-1].losses.append(logs["loss"])


def main() -> None:
    asked = json.loads(sys.argv[1])
    card = choose(asked["card"], use_cpu=False)
    gpu = SimulatedGpu(card)
    watch = Watch(gpu)
    _empty_cache_as_with_cuda(watch)
    diary = Diary(gpu, asked["started"])
    error = ""
    with watch.cuda_semantics():
        try:
            trainer = _trainer(asked)
            _watchable_again(trainer)
            trainer.add_callback(diary)
            watch.train(trainer)
        except (torch.OutOfMemoryError, RuntimeError, ValueError, NotImplementedError) as raised:
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
    print()  # the trainer prints its logs there
    print(json.dumps({"attempts": [attempt.to_json() for attempt in diary.attempts], "error": error}))


def _trainer(asked: dict[str, Any]) -> Any:
    trainer, config, kind = KINDS[asked["method"]]
    more = {"reward_funcs": _short} if asked["method"] == "grpo" else {}
    config = config(
        output_dir=asked["output_dir"],
        use_cpu=True,
        num_train_epochs=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=asked["micro_batch"],
        gradient_accumulation_steps=asked["accumulation"],
        auto_find_batch_size=asked["auto_find_batch_size"],
    )
    rows = load_dataset("json", data_files=f"{kind}.jsonl", split="train")
    return trainer(model="judge" if asked["method"] == "reward" else "model", args=config, train_dataset=rows, **more)


def _short(completions: list[str], **kwargs: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def _watchable_again(trainer: Any) -> None:
    """A second attempt finds the first one's optimizer, wrapped by accelerate; what watches it wants the inner one."""
    create = trainer.create_optimizer

    def created(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        return getattr(optimizer, "optimizer", optimizer)

    trainer.create_optimizer = created


def _empty_cache_as_with_cuda(watch: Watch) -> None:
    """accelerate asks first whether CUDA is there (``accelerate/utils/memory.py: clear_device_cache``)."""
    clear = accelerate.utils.memory.clear_device_cache

    def cleared(garbage_collection: bool = False) -> None:
        clear(garbage_collection=garbage_collection)
        watch.recorder.empty_cache()

    accelerate.utils.memory.clear_device_cache = cleared


if __name__ == "__main__":
    main()
