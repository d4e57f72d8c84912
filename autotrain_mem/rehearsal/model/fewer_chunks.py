"""A loss with fewer chunks than it has, for rehearsals that are expanded to all of them (``estimator/expansion``).

TRL's SFT loss goes over the tokens in chunks of 256, forward and backward, each with 70 operators
(``trl/trainer/sft_trainer.py: _chunked_cross_entropy_loss``): with 8 rows of 4096 tokens that is 128 chunks, and more
operators than 20 layers have. All but the last have the same tokens and do the same.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

SHORT, LONG = 3, 5
"""Chunks to rehearse in the place of all: a first one, a last one, and one or three of those between."""
FEWEST = 12
"""A loss with fewer chunks is left alone: two rehearsals would take longer than one."""


@contextmanager
def with_chunks(chunks: int | None) -> Iterator[list[int]]:
    """Inside, a loss of many chunks has so many of them, the last among them; None: all.

    Yields:
        How many every such loss would have had, in the order in which they came; empty where none was cut.
    """
    cut: list[int] = []
    if chunks is None:
        yield cut
        return
    from trl.trainer import sft_trainer

    def fewer(*bounds: Any) -> Sequence[int]:
        every = builtins.range(*bounds)
        # Of all loops in that module this one alone ends where a tensor says: the number of tokens with a label.
        if not any(hasattr(bound, "dtype") for bound in bounds) or len(every) < FEWEST:
            return every
        cut.append(len(every))
        return [*every[: chunks - 1], every[-1]]

    with patch.object(sft_trainer, "range", fewer, create=True):
        yield cut
