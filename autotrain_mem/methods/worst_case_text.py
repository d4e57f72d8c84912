"""Makes tokens for a rehearsal: a tokenizer of eight words, and texts of a known number of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

EditRows = Callable[[list[Any]], list[Any]]
"""Makes the worst micro-batch of the rows that the sampler drew."""

ORDINARY_TOKEN = 5
"""An id that is neither padding nor an end; every model's vocabulary holds it."""

PADDING_TOKEN = 2


def stub_tokenizer(padding_side: str = "right", marks: Mapping[str, tuple[str, int]] | None = None) -> Any:
    """Makes a tokenizer that splits at blanks; the trainer asks it for special tokens and, in some methods, for ids.

    Args:
        marks: Special tokens beside its own, by the names of its attributes: as they are written, and their ids.
    """
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
    """Writes a text that :func:`stub_tokenizer` turns into ``tokens`` ids; it ends in a blank, so two can be joined."""
    return f"t{ORDINARY_TOKEN} " * tokens


def shorten_last_row(rows: list[Any]) -> list[Any]:
    """Cuts one token off the last row: a batch of several rows is padded, and so carries a real attention mask.

    Its shape stays that of the worst batch. A batch of one row has no padding.
    """
    if len(rows) < 2:
        return rows
    *full, last = rows
    return [*full, {name: value[:-1] if isinstance(value, list) else value for name, value in last.items()}]


def shorten_last_rejected(rows: list[Any], limit: int | None = None) -> list[Any]:
    """Shortens the last rejected completion: the two sequences of a pair are in one batch, so that even a single pair
    is padded.

    Args:
        limit: Where the collator cuts prompt and completion to; one token less is left, so that the cut does not
            make the row as long as the others again.
    """
    *full, last = rows
    rejected = last["rejected_ids"]
    if limit is not None:
        rejected = rejected[: max(0, limit - len(last["prompt_ids"]))]
    return [*full, {**last, "rejected_ids": rejected[:-1]}]
