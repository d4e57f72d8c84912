"""Holds what DPO and KTO share: a reference that may score the data, and log-probabilities that are written into."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.row_lengths import smallest_model
from autotrain_mem.types import Knobs


def without_precomputing(trainer: str, columns: Callable[[Any], Sequence[str]]) -> AbstractContextManager[Any]:
    """Give a trainer that computes the reference's scores before training zeros in their place.

    Args:
        trainer: The name of its class.
        columns: What the reference's scores are called in a trainer's data.
    """
    import trl

    def with_scores(trainer: Any, dataset: Any, *_: Any) -> Any:
        for name in columns(trainer):
            dataset = dataset.add_column(name, [0.0] * len(dataset))
        return dataset

    return patch.object(getattr(trl, trainer), "_precompute_ref_logps", with_scores)


@contextmanager
def training_patches(home: str, trainer: Any, filled: Configs, knobs: Knobs) -> Iterator[None]:
    """Let autograd see the log-probabilities that a trainer's module takes of its logits as it sees real tensors.

    TRL's DPO and KTO write into their log-probabilities, which are a view (DPO of 1.16 no longer does). Backward, such
    a write goes by ``as_strided``, with zeros of the base's size; for tensors of Python's own kind, as fake ones are,
    the view is repeated instead (tools/autograd/gen_inplace_or_view_type.py: is_python_dispatch). So they are made a
    strided view of what was gathered.

    Args:
        home: The trainer's module, such as ``trl.trainer.dpo_trainer``.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    module = importlib.import_module(home)
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


def prepared_rows(trainer: str, filled: Configs, split: Any, tokenizer: Any) -> Any:
    """Let the trainer of this name prepare the data: untruncated, and without the reference's scores."""
    import trl

    filled.training.max_length, filled.training.precompute_ref_log_probs = None, False
    models = {"model": smallest_model(), "ref_model": smallest_model()}
    data = {"train_dataset": split, "processing_class": tokenizer}
    return getattr(trl, trainer)(args=filled.training, **models, **data).train_dataset
