"""Makes the runs' tiny model, reward model and rows; one row in a thousand is eight times as long as the median.

Everything is generated from fixed seeds. Each word is a token: a row of 20 words has 20 tokens and an end token.
"""

import pathlib
from collections.abc import Iterator
from random import Random
from typing import Any

from autotrain_mem.cli import tiny_model, word_problems

ROWS = 1000
SHORT_ROWS, TEST_ROWS = 96, 8
"""The rows of short runs, such as those with faults; one row of each is long."""
SHORT_WORDS = range(16, 25)
"""Words of an ordinary row, drawn uniformly, so the median is 20."""
LONG_WORDS = 8 * 20
VOCABULARY = 512
"""Rows of the embedding; bytes, words and special tokens need fewer."""
WORDS = tuple(first + second for first in "bdfgklmnprst" for second in ("an", "el", "in", "or", "us"))
KINDS = ("text", "pairs", "prompts")
REWARD = '''"""A reward without a model: short completions are good."""


def short(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]
'''


def write(folder: pathlib.Path) -> None:
    """Writes ``model``, ``judge`` (a classifier), ``judging.py`` (a reward function), and rows of each kind."""
    tokenizer = tiny_model.train_tokenizer(row["text"] for row in rows("text", seed=1))
    tiny_model.write_model(folder / "model", tiny_config(), tokenizer)
    write_judge(folder / "judge", tokenizer)
    (folder / "judging.py").write_text(REWARD, encoding="utf-8")
    for kind in KINDS:
        word_problems.write_rows(folder / f"{kind}.jsonl", rows(kind, seed=0))
        word_problems.write_rows(folder / f"short_{kind}" / "train.jsonl", rows(kind, seed=2, count=SHORT_ROWS))
        word_problems.write_rows(folder / f"short_{kind}" / "test.jsonl", rows(kind, seed=3, count=TEST_ROWS))


def rows(kind: str, seed: int, count: int = ROWS) -> Iterator[dict[str, Any]]:
    """Yields rows of one kind; one random row in every 1,000, or in fewer at the end, is long."""
    random = Random(seed)
    long_row = 0
    for row in range(count):
        if row % ROWS == 0:
            long_row = row + random.randrange(min(ROWS, count - row))
        words = LONG_WORDS if row == long_row else random.choice(SHORT_WORDS)
        yield row_of(random, kind, words)


def row_of(random: Random, kind: str, words: int) -> dict[str, Any]:
    """Returns a random row of one of ``KINDS`` with this number of words."""
    text = random.choices(WORDS, k=words)
    if kind == "text":
        return {"text": " ".join(text)}
    if kind == "prompts":
        return {"prompt": " ".join(text)}
    half = words // 2
    rejected = random.choices(WORDS, k=words - half)
    return {
        "prompt": " ".join(text[:half]),
        "chosen": " " + " ".join(text[half:]),
        "rejected": " " + " ".join(rejected),
    }


def tiny_config(width: int = 64, layers: int = 2, heads: int = 4, context: int = tiny_model.CONTEXT_LENGTH) -> Any:
    """Returns a Qwen2 config with half as many heads for keys and values as for queries."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=context,
        initializer_range=tiny_model.INITIALIZER_RANGE,
        tie_word_embeddings=True,
        **tiny_model.special_token_ids(),
    )


def write_judge(folder: pathlib.Path, tokenizer: Any, config: Any = None) -> None:
    """Writes a reward model: a classifier with one class and fixed random weights."""
    import torch
    from transformers import AutoModelForSequenceClassification

    config = config or tiny_config()
    config.num_labels = 1
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
