"""Writes what the commands train on: a model of 3 million weights, a reward model, and rows.

About half of the rows are truncated to LENGTH tokens, so many batches of a short run have the maximum length.
``scripts/cuda_parity --hours`` measures how batches of many lengths fragment the allocator's memory.
"""

from pathlib import Path
from random import Random
from typing import Any

from survival_cases import material

from autotrain_mem.cli import tiny_model, word_problems

ROWS, TEST_ROWS = 96, 16
LENGTH = 320
WORDS = range(LENGTH // 2, 3 * LENGTH // 2)
PROMPT_WORDS = range(24, 49)
CONTEXT_LENGTH = 1024
DROP_IN = '''"""A user's own script, with a trainer of autotrain_mem, or TRL's with MemoryWatch."""

import sys

from datasets import load_dataset
from trl import SFTConfig

args = SFTConfig(
    output_dir=sys.argv[2], max_steps=6, max_length=320, per_device_train_batch_size=8, logging_steps=1,
    save_strategy="no", report_to="none", model_init_kwargs={"dtype": "float32"},
)
rows = load_dataset("json", data_files="text_rows/train.jsonl", split="train")
if sys.argv[1] == "drop-in":
    from autotrain_mem import SFTTrainer

    trainer = SFTTrainer(model="model", args=args, train_dataset=rows)
else:
    from trl import SFTTrainer

    from autotrain_mem import MemoryWatch

    trainer = SFTTrainer(model="model", args=args, train_dataset=rows, callbacks=[MemoryWatch()])
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {trainer.state.global_step} steps")
'''


def write(folder: Path) -> None:
    """Writes ``model``, ``judge``, ``judging.py``, ``drop_in.py``, and ``KIND_rows`` with two splits for each kind."""
    tokenizer = tiny_model.train_tokenizer(row["text"] for row in rows("text", ROWS, seed=1))
    tiny_model.write_model(folder / "model", config(), tokenizer)
    material.write_judge(folder / "judge", tokenizer, config())
    (folder / "judging.py").write_text(material.REWARD, encoding="utf-8")
    (folder / "drop_in.py").write_text(DROP_IN, encoding="utf-8")
    for kind in material.KINDS:
        word_problems.write_rows(folder / f"{kind}_rows" / "train.jsonl", rows(kind, ROWS, seed=2))
        word_problems.write_rows(folder / f"{kind}_rows" / "test.jsonl", rows(kind, TEST_ROWS, seed=3))


def rows(kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns random rows of one of the kinds in ``survival_cases.material``."""
    random = Random(seed)
    words = PROMPT_WORDS if kind == "prompts" else WORDS
    return [material.row_of(random, kind, random.choice(words)) for _ in range(count)]


def config() -> Any:
    """Returns a model config whose activations exceed 1 MiB, the largest block of the allocator's small pool."""
    return material.tiny_config(width=256, layers=4, heads=8, context=CONTEXT_LENGTH)
