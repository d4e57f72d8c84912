"""Finds the longest rows where these stay conversations until they are collated, and the ways that a step may go."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from autotrain_mem.methods.interface import method_of_trainer
from autotrain_mem.methods.row_lengths import prepared_lengths
from autotrain_mem.training.longest_batch.rows import CANDIDATES, characters, longest_rows


def are_conversations(trainer: Any, dataset: Any) -> bool:
    """Tell whether the rows are conversations of which this trainer's collator makes tokens."""
    method = method_of_trainer(trainer)
    is_collated = method is not None and method.unprepared_lengths(trainer, []) is not None
    return is_collated and "messages" in dataset.column_names and prepared_lengths(dataset) is None


def longest_conversations(trainer: Any, dataset: Any, count: int) -> tuple[list[int], int]:
    """Numbers of the rows of which a step makes most tokens, and how many these are of the first.

    Of those with most characters; where an answer is sampled behind a prompt, those with most characters before the
    last message are looked at too.
    """
    method = method_of_trainer(trainer)
    assert method is not None, "asked before"
    whole, before = [], []
    for rows in dataset.select_columns(["messages"]).iter(batch_size=10_000):
        whole += [characters(messages) for messages in rows["messages"]]
        before += [characters(messages[:-1]) for messages in rows["messages"]]
    looked_at = max(count, CANDIDATES)
    candidates = list(dict.fromkeys([*longest_rows(whole, looked_at), *longest_rows(before, looked_at)]))
    tokens = method.unprepared_lengths(trainer, [dataset[number] for number in candidates])
    assert tokens is not None, "asked before"
    longest = longest_rows(tokens, count, padded=True)
    return [candidates[each] for each in longest], tokens[longest[0]]


def ways_of_step(trainer: Any) -> Iterable[AbstractContextManager[None]]:
    """List the ways that chance may choose for a step of this trainer; one for most."""
    method = method_of_trainer(trainer)
    return (nullcontext(),) if method is None else method.ways_of_step(trainer)
