"""Direct preference optimization with TRL's DPOTrainer; KTO's trainer also has a reference (``kto``)."""

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
    """Uses zeros in place of the reference's scores, which a trainer computes before training.

    Args:
        trainer: The name of its class.
        columns: Returns the names of a trainer's score columns.
    """
    from unittest.mock import patch  # slow to import, and the parent asks this module too

    import trl

    def with_scores(trainer: Any, dataset: Any, *_: Any) -> Any:
        for name in columns(trainer):
            dataset = dataset.add_column(name, [0.0] * len(dataset))
        return dataset

    return patch.object(getattr(trl, trainer), "_precompute_ref_logps", with_scores)


without_precomputing = partial(without_scoring, "DPOTrainer", lambda _: ("ref_chosen_logps", "ref_rejected_logps"))


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes pairs that fill ``length`` tokens with either completion: half prompt, half completion."""
    from datasets import Dataset

    prompt = length // 2
    completion = text_of(length - prompt)
    return Dataset.from_dict(
        {"prompt": [text_of(prompt)] * rows, "chosen": [completion] * rows, "rejected": [completion] * rows}
    )


def rows_editor(filled: Configs) -> EditRows:
    """Imitates the padding of a real batch of pairs, after the collator has truncated its rows."""
    return partial(shorten_last_rejected, limit=filled.training.max_length)


worst_image_rows = image_rows.pairs
image_rows_editor = partial(image_rows.shorten_last, "rejected")


@contextmanager
def strided_logps(home: str, trainer: Any, filled: Configs, knobs: Knobs) -> Iterator[None]:
    """Makes a trainer's log-probabilities a strided view of the gathered values.

    TRL's DPO (before 1.16) and KTO write into a view of them. The backward pass of such a write uses ``as_strided``,
    with zeros of the base's size; for fake tensors autograd would repeat the view instead
    (tools/autograd/gen_inplace_or_view_type.py: is_python_dispatch). ``home``: the trainer's module, such as
    ``trl.trainer.dpo_trainer``.
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
    """Tokenizes the data with TRL's class ``trainer``, without truncation or reference log-probabilities."""
    import trl

    filled.training.max_length, filled.training.precompute_ref_log_probs = None, False
    models = {"model": smallest_model(), "ref_model": smallest_model()}
    data = {"train_dataset": split, "processing_class": tokenizer}
    return getattr(trl, trainer)(args=filled.training, **models, **data).train_dataset


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts tokens as the trainer prepares them: the prompt's with the longer completion's."""
    rows = prepared_rows("DPOTrainer", filled, split, tokenizer)
    prompts, chosen, rejected = (list_lengths(rows, name) for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    return pair_lengths(list(map(add, prompts, chosen)), list(map(add, prompts, rejected)))


image_texts = image_rows.pair_texts


PAIRWISE = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero"),
    *("apo_down", "discopop", "sigmoid_norm"),
)
"""Losses that average one value per pair."""


def why_not_split(trainer: Any) -> str | None:
    """Returns why a loss cannot be split: it compares a micro-batch's pairs, or adds means over tokens and pairs."""
    kinds = list(trainer.loss_types)
    others = [kind for kind in kinds if kind not in PAIRWISE]
    if kinds == ["sft"] or not others:
        return None
    if "sft" in others:
        return "loss_type sft is a mean over tokens beside means over pairs"
    return f"loss_type {others[0]} compares each pair with the others of its micro-batch"


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """Returns pairs; the chosen completions' tokens if loss_type is sft alone."""
    return Basis.CHOSEN_TOKENS if list(trainer.loss_types) == ["sft"] else Basis.UNITS
