"""Counts the tokens of prepared datasets in as many processes as suit them, and reports progress."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import add
from types import SimpleNamespace
from typing import Any

from autotrain_mem.methods.configs import Configs
from autotrain_mem.support.host import cores
from autotrain_mem.types.data import Counting

OnProgress = Callable[[Counting], None]

ROWS_PER_PROCESS = 2000
"""The number of rows per process. A process pool adds 0.5 s to a pass over the data, and formatting and
tokenizing a row of gsm8k takes 0.45 ms, so two processes are faster from about 2,300 rows on (measured with 2 cores,
datasets 5.2, trl 1.12)."""
MOST_PROCESSES = 16
"""The largest number of processes. Each is a fork of the worker with a copy of the tokenizer."""
REPORT_EVERY_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLengths:
    """Holds the numbers of tokens of all rows, in the data's order."""

    longer: Sequence[int]
    """The tokens of each row's sequence, or of the longer sequence of a pair."""
    shorter: Sequence[int] = ()
    """The tokens of the shorter sequence of each pair; empty if a row is one sequence."""
    prompts: Sequence[int] = ()
    """The tokens of each row's prompt if training generates answers although the rows have answers; else empty."""


def processes(rows: int, given: int | None) -> int | None:
    """Returns the user's number of processes, or else one that suits the rows; None: this process counts alone.
    Without fork it is None unless the user gives a number: others would first import torch and transformers."""
    import multiprocessing

    if given is not None or multiprocessing.get_all_start_methods()[0] != "fork":
        return given
    return wanted if (wanted := min(cores(), MOST_PROCESSES, rows // ROWS_PER_PROCESS)) > 1 else None


@contextmanager
def counting_maps(on_progress: OnProgress) -> Iterator[None]:
    """Within the block, ``datasets/arrow_dataset.py: Dataset.map`` reports its progress in place of its bars, passes a
    function of one row the rows of a batch, which are read at once in a third less time, and skips the pass that makes
    labels (``trl/trainer/sft_trainer.py: _prepare_dataset``), which takes a quarter of the time. A tokenizer returns
    only the ids of a text, which is all that ``trl/data_utils.py: _tokenize`` uses, in half the time."""
    from unittest.mock import patch  # slow to import, and the parent process imports this module too

    from datasets import Dataset, arrow_dataset
    from transformers import PreTrainedTokenizerFast

    mapped, tokenized, encoded = Dataset.map, PreTrainedTokenizerFast.__call__, PreTrainedTokenizerFast._encode_plus

    def tokenize_quickly(tokenizer: Any, *args: Any, **options: Any) -> Any:
        text, backend = options.get("text"), tokenizer._tokenizer
        is_whole = backend.truncation is None and backend.encode_special_tokens == tokenizer.split_special_tokens
        if args or len(options) > 1 or not isinstance(text, str) or not is_whole or backend.padding is not None:
            return tokenized(tokenizer, *args, **options)
        if type(tokenizer)._encode_plus is not encoded or hasattr(type(tokenizer), "_switch_to_input_mode"):
            return tokenized(tokenizer, text)  # the model's own tokenizer adds something
        return {"input_ids": backend.encode_batch_fast([text])[0].ids}  # without the places of tokens in the text

    def map_quickly(rows: Any, function: Any = None, *args: Any, **options: Any) -> Any:
        if getattr(function, "__name__", "") == "build_labels":
            return rows
        decodes = any(hasattr(each, "decode_example") for each in rows.features.values())  # such as images
        if args or decodes or not options.keys() <= {"desc", "fn_kwargs", "num_proc", "remove_columns"}:
            return mapped(rows, function, *args, **options)
        more = options.pop("fn_kwargs", None) or {}

        def of_batch(batch: Any) -> dict[str, list[Any]]:
            columns = dict(batch)
            done = [
                function(dict(zip(columns, row, strict=True)), **more) for row in zip(*columns.values(), strict=True)
            ]
            made = {name: [row[name] for row in done] for name in done[0]}
            return {name: values for name, values in made.items() if values != columns.get(name)}

        return mapped(rows, of_batch, batched=True, **options)

    @contextmanager
    def bar(*, total: int, desc: str | None = None, initial: int = 0, **options: Any) -> Iterator[SimpleNamespace]:
        """Replaces tqdm's bar. ``Dataset.map`` calls only its ``update``."""
        done, reported_at, doing = initial, 0.0, (desc or "Reading").partition(" (num_proc")[0]

        def update(rows: int) -> None:
            nonlocal done, reported_at
            done, now = done + rows, time.monotonic()
            if now - reported_at >= REPORT_EVERY_SECONDS or done >= total:
                reported_at = now
                on_progress(Counting(done=done, rows=total, doing=doing))

        update(0)
        yield SimpleNamespace(update=update)

    with (
        patch.object(arrow_dataset, "hf_tqdm", bar),
        patch.object(Dataset, "map", map_quickly),
        patch.object(PreTrainedTokenizerFast, "__call__", tokenize_quickly),
    ):
        yield


def smallest_model(*, classifier: bool = False) -> Any:
    """Returns a model with a few hundred parameters, for a trainer that only prepares data."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    config = Qwen2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_labels=1,
    )
    return Qwen2ForSequenceClassification(config) if classifier else Qwen2ForCausalLM(config)


def list_lengths(rows: Any, column: str) -> list[int]:
    """Returns the lengths of the lists in a column of a dataset. It takes 40 ms for 200,000 rows of 220 tokens."""
    found: list[int] = []
    for batch in rows.select_columns([column]).with_format("arrow").iter(batch_size=10_000):
        for chunk in batch.column(column).chunks:
            found += chunk.value_lengths().to_pylist()
    return found


_SIDES = (
    ("completion_ids", "KL_completion_ids"),
    ("chosen_ids", "rejected_ids"),
    ("chosen_input_ids", "rejected_input_ids"),
    ("input_ids",),
)
"""Columns of tokens in TRL's prepared data; the second one may be missing. A column ``prompt_ids`` precedes both."""


def prepared_lengths(rows: Any) -> RowLengths | None:
    """Returns the tokens of every row of prepared data; None if the columns are unknown.

    In KTO a prompt counts with the longer of two completions: its own and the previous row's, with which TRL estimates
    the KL divergence. For the first row of a micro-batch the previous one is the last row.
    """
    columns = rows.column_names
    if (names := next((each for each in _SIDES if each[0] in columns), None)) is None:
        return None
    sides = [list_lengths(rows, name) for name in names if name in columns]
    if "prompt_ids" in columns:
        prompts = list_lengths(rows, "prompt_ids")
        sides = [list(map(add, prompts, side)) for side in sides]
    pairs = list(zip(*sides, strict=True))
    are_pairs = len(sides) == 2 and names != _SIDES[0]
    return RowLengths(longer=list(map(max, pairs)), shorter=list(map(min, pairs)) if are_pairs else ())


def count_prepared(
    trainer: Any, filled: Configs, split: Any, tokenizer: Any, *, limit: int | None = None, **more: Any
) -> RowLengths:
    """Counts the tokens of rows as a TRL trainer of this class prepares them. ``limit``: the ``max_length``; None for
    no truncation. ``more``: further arguments of the constructor."""
    args = copy.copy(filled.training)
    args.max_length = limit
    data = {"train_dataset": split, "processing_class": tokenizer}
    lengths = prepared_lengths(trainer(**{"model": smallest_model(), "args": args, **data, **more}).train_dataset)
    assert lengths is not None, "TRL's columns have unknown names"
    return lengths
