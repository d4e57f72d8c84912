"""Direct preference optimization with TRL's DPOTrainer: a policy held against a reference.

KTO's trainer has one too, which may score the data, and takes log-probabilities in the same way (``kto``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import add
from typing import Any

from autotrain_mem.methods import image_rows
from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.interface import AxolotlFacts, Basis, LlamaFactoryFacts
from autotrain_mem.methods.row_lengths import RowLengths, list_lengths, pair_lengths, smallest_model
from autotrain_mem.methods.worst_case_text import EditRows, shorten_last_rejected, text_of
from autotrain_mem.types import Knobs

LLAMAFACTORY_PAIRS = {
    "ranking": True,
    "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
}
LLAMAFACTORY_PAIR_ROWS = "rows with prompt, chosen and rejected as text; conversations take formatting sharegpt"

joins_sides = True
liger_since = "1.16"
axolotl = AxolotlFacts(
    keys={"rl": "dpo"},
    renamed={
        "beta": "rl_beta",
        "label_smoothing": "dpo_label_smoothing",
        "loss_type": "dpo_loss_type",
        "loss_weights": "dpo_loss_weights",
        "use_weighting": "dpo_use_weighting",
        "padding_free": "dpo_padding_free",
        "precompute_ref_log_probs": "precompute_ref_log_probs",
        "use_liger_kernel": "dpo_use_liger_kernel",
    },
    notes=(
        "datasets: without a type for rows with prompt, chosen and rejected as text; conversations need a type",
        "excess_length_strategy truncate: a pair whose prompt alone is longer is dropped; TRL cuts it",
    ),
)
"""Names after ``core/trainers/dpo/__init__.py: DPOStrategy``."""
llamafactory = LlamaFactoryFacts(
    stage="dpo",
    entry=LLAMAFACTORY_PAIRS,
    rows=LLAMAFACTORY_PAIR_ROWS,
    renamed={"beta": "pref_beta", "label_smoothing": "dpo_label_smoothing", "ld_alpha": "ld_alpha"},
    losses=("sigmoid", "hinge", "ipo"),
    loss_key="pref_loss",
    notes=("the loss: logits of policy and reference are whole in float32, whatever TRL's does",),
)
"""Names after ``train/dpo/trainer.py: CustomDPOTrainer``."""


def without_scoring(trainer: str, columns: Callable[[Any], Sequence[str]]) -> AbstractContextManager[Any]:
    """Gives zeros to a trainer that computes the reference's scores before training.

    Args:
        trainer: The name of its class.
        columns: What the reference's scores are called in a trainer's data.
    """
    from unittest.mock import patch  # slow to import, and the parent asks this module too

    import trl

    def with_scores(trainer: Any, dataset: Any, *_: Any) -> Any:
        for name in columns(trainer):
            dataset = dataset.add_column(name, [0.0] * len(dataset))
        return dataset

    return patch.object(getattr(trl, trainer), "_precompute_ref_logps", with_scores)


without_precomputing = partial(
    without_scoring, "DPOTrainer", lambda trainer: ("ref_chosen_logps", "ref_rejected_logps")
)


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes pairs whose prompt and either completion fill ``length`` tokens: half prompt, half completion."""
    from datasets import Dataset

    prompt = length // 2
    completion = text_of(length - prompt)
    return Dataset.from_dict(
        {"prompt": [text_of(prompt)] * rows, "chosen": [completion] * rows, "rejected": [completion] * rows}
    )


def rows_editor(filled: Configs) -> EditRows:
    """Imitates the padding that nearly every real batch of pairs has, after the collator has cut its rows."""
    return partial(shorten_last_rejected, limit=filled.training.max_length)


worst_image_rows = image_rows.pairs


def image_rows_editor(filled: Configs) -> EditRows:
    """Imitates padding."""
    return image_rows.shorten_last_rejected


@contextmanager
def strided_logps(home: str, trainer: Any, filled: Configs, knobs: Knobs) -> Iterator[None]:
    """Makes autograd see the log-probabilities that a trainer's module takes of its logits as it sees real tensors.

    TRL's DPO and KTO write into their log-probabilities, which are a view (DPO of 1.16 no longer does). Backward, such
    a write goes by ``as_strided``, with zeros of the base's size; for tensors of Python's own kind, as fake ones are,
    the view is repeated instead (tools/autograd/gen_inplace_or_view_type.py: is_python_dispatch). So they are made a
    strided view of what was gathered.

    Args:
        home: The trainer's module, such as ``trl.trainer.dpo_trainer``.
    """
    from unittest.mock import patch  # slow to import, and the parent asks this module too

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


training_patches = partial(strided_logps, "trl.trainer.dpo_trainer")


def prepared_rows(trainer: str, filled: Configs, split: Any, tokenizer: Any) -> Any:
    """Prepares the data with the trainer of this name: untruncated, and without the reference's scores."""
    import trl

    filled.training.max_length, filled.training.precompute_ref_log_probs = None, False
    models = {"model": smallest_model(), "ref_model": smallest_model()}
    data = {"train_dataset": split, "processing_class": tokenizer}
    return getattr(trl, trainer)(args=filled.training, **models, **data).train_dataset


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts tokens as the trainer prepares them; a pair is as long as its prompt with its longer completion."""
    rows = prepared_rows("DPOTrainer", filled, split, tokenizer)
    prompts, chosen, rejected = (list_lengths(rows, name) for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    return pair_lengths(list(map(add, prompts, chosen)), list(map(add, prompts, rejected)))


image_texts = image_rows.pair_texts


PAIRWISE = frozenset(
    {
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero"),
        *("apo_down", "discopop", "sigmoid_norm"),
    }
)
"""Losses that are one number per pair, of which the mean is taken."""


def why_not_split(trainer: Any) -> str | None:
    """Names a loss that compares the pairs of a micro-batch, or a mean over tokens beside means over pairs."""
    kinds = list(trainer.loss_types)
    others = [kind for kind in kinds if kind not in PAIRWISE]
    if kinds == ["sft"] or not others:
        return None
    if "sft" in others:
        return "loss_type sft is a mean over tokens beside means over pairs"
    return f"loss_type {others[0]} compares each pair with the others of its micro-batch"


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """Returns pairs; with loss_type sft alone, the chosen tokens."""
    return Basis.CHOSEN_TOKENS if list(trainer.loss_types) == ["sft"] else Basis.UNITS
