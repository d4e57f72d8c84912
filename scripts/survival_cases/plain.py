"""A training script as in TRL's documentation, on a simulated card. It runs as a separate process:

    python -m survival_cases.plain '{"method": "sft", "card": "60MiB", "micro_batch": 20, "accumulation": 2, ...}'

Its last line of output is a JSON object with every attempt at training, its number of steps, and the error.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, field
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


@dataclass(kw_only=True)
class Attempt:
    """One attempt at training, until it ends or memory runs out."""

    micro_batch: int
    steps: int = 0
    first_step_seconds: float | None = None
    """Seconds from the start of the command to the end of this attempt's first step."""
    peaks: list[int] = field(default_factory=list)
    """The peak of reserved bytes after each step."""


class Diary(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
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


def main() -> None:
    asked = json.loads(sys.argv[1])
    gpu = SimulatedGpu(choose(asked["card"], use_cpu=False))
    watch = Watch(gpu)
    diary = Diary(gpu, asked["started"])
    clear = accelerate.utils.memory.clear_device_cache

    def cleared(garbage_collection: bool = False) -> None:
        clear(garbage_collection=garbage_collection)
        watch.recorder.empty_cache()

    # accelerate empties the cache only if CUDA is available (accelerate/utils/memory.py: clear_device_cache).
    accelerate.utils.memory.clear_device_cache = cleared
    error = ""
    with watch.cuda_semantics():
        try:
            trainer = _trainer(asked)
            trainer.add_callback(diary)
            watch.train(trainer)
        except (torch.OutOfMemoryError, RuntimeError, ValueError, NotImplementedError) as raised:
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
    print()  # ends the trainer's last line of logs
    print(json.dumps({"attempts": [asdict(attempt) for attempt in diary.attempts], "error": error}))


def _trainer(asked: dict[str, Any]) -> Any:
    def short(completions: list[str], **kwargs: Any) -> list[float]:
        return [-float(len(completion)) for completion in completions]

    kind, config, rows = KINDS[asked["method"]]
    more = {"reward_funcs": short} if asked["method"] == "grpo" else {}
    filled = config(
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
    data = load_dataset("json", data_files=f"{rows}.jsonl", split="train")
    model = "judge" if asked["method"] == "reward" else "model"
    trainer = kind(model=model, args=filled, train_dataset=data, **more)
    create = trainer.create_optimizer

    def created(*args: Any, **kwargs: Any) -> Any:
        """Returns the inner optimizer: in a second attempt, the first one's is still wrapped by accelerate."""
        optimizer = create(*args, **kwargs)
        return getattr(optimizer, "optimizer", optimizer)

    trainer.create_optimizer = created
    return trainer


if __name__ == "__main__":
    main()
