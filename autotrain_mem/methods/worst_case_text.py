"""Makes the text of rehearsals: a tokenizer of eight words, and texts with a known number of tokens."""

from collections.abc import Callable, Mapping
from typing import Any

EditRows = Callable[[list[Any]], list[Any]]
"""A function that turns the rows that the sampler drew into the worst micro-batch."""
ORDINARY_TOKEN = 5
"""A token id that is neither padding nor an end token, and that every vocabulary has."""
PADDING_TOKEN = 2


def stub_tokenizer(padding_side: str = "right", marks: Mapping[str, tuple[str, int]] | None = None) -> Any:
    """Returns a tokenizer of eight words that splits at spaces. ``marks``: maps the names of further attributes of the
    tokenizer to special tokens, each with its text and id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = marks or {}
    vocabulary = {f"t{index}": index for index in range(8)} | dict(marks.values())
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="t1",
        pad_token=f"t{PADDING_TOKEN}",
        unk_token="t0",
        padding_side=padding_side,
        extra_special_tokens={name: text for name, (text, _) in marks.items()},
    )


def text_of(tokens: int) -> str:
    """Returns a text of this many tokens for :func:`stub_tokenizer`. It ends in a space, so that two can be joined."""
    return f"t{ORDINARY_TOKEN} " * tokens


def repeated(row: Mapping[str, Any], rows: int) -> Any:
    """Makes a dataset of this many equal rows."""
    from datasets import Dataset

    return Dataset.from_dict({name: [value] * rows for name, value in row.items()})


def shorten_last_row(rows: list[Any]) -> list[Any]:
    """Removes the last token of the last of several rows, so that the batch is padded and has a real attention mask."""
    if len(rows) < 2:
        return rows
    *full, last = rows
    return [*full, {name: value[:-1] if isinstance(value, list) else value for name, value in last.items()}]


def shorten_last_rejected(rows: list[Any], limit: int | None = None) -> list[Any]:
    """Removes the last token of the last rejected completion, so that even a batch of one pair is padded. ``limit``:
    the length to which the collator cuts prompt and completion together."""
    *full, last = rows
    rejected = last["rejected_ids"]
    if limit is not None:
        rejected = rejected[: max(0, limit - len(last["prompt_ids"]))]
    return [*full, {**last, "rejected_ids": rejected[:-1]}]
