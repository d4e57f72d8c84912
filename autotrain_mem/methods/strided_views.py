"""Lets autograd see views of fake tensors as it sees those of real ones, where TRL writes into one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def strided_log_softmax(module: Any) -> Iterator[None]:
    """Make the log-probabilities that a trainer's module takes of its logits a strided view of what was gathered.

    TRL's DPO and KTO write into their log-probabilities, which are a view (DPO of 1.16 no longer does). Backward, such
    a write goes by ``as_strided``, with zeros of the base's size; for tensors of Python's own kind, as fake ones are,
    the view is repeated instead (tools/autograd/gen_inplace_or_view_type.py: is_python_dispatch).
    """
    from torch._subclasses.fake_tensor import FakeTensor

    log_softmax = getattr(module, "selective_log_softmax", None)
    if log_softmax is None:
        yield
        return

    def strided(logits: Any, index: Any) -> Any:
        if not isinstance(logits, FakeTensor):
            return log_softmax(logits, index)
        chosen = log_softmax(logits, index.unsqueeze(-1))
        return chosen.as_strided(index.shape, chosen.stride()[:-1])

    with patch.object(module, "selective_log_softmax", strided):
        yield
