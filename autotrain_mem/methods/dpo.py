"""Adapts direct preference optimization with TRL's DPOTrainer. KTO (``kto``) shares some of its functions."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from autotrain_mem.methods import image_rows
from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.interface import AxolotlFacts, Basis, LlamaFactoryFacts
from autotrain_mem.methods.row_lengths import RowLengths, count_prepared, smallest_model
from autotrain_mem.methods.worst_case_text import EditRows, repeated, shorten_last_rejected, text_of
from autotrain_mem.types import Knobs

LLAMAFACTORY_PAIRS = {"ranking": True, "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}}
LLAMAFACTORY_PAIR_ROWS = "rows with prompt, chosen and rejected as text; conversations need formatting sharegpt"

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
        "datasets: rows with prompt, chosen and rejected as text need no type; conversations need one",
        "excess_length_strategy truncate: Axolotl drops a pair whose prompt alone is too long; TRL cuts the prompt",
    ),
)
"""The names are those of ``core/trainers/dpo/__init__.py: DPOStrategy`` in Axolotl."""
llamafactory = LlamaFactoryFacts(
    stage="dpo",
    entry=LLAMAFACTORY_PAIRS,
    rows=LLAMAFACTORY_PAIR_ROWS,
    renamed={"beta": "pref_beta", "label_smoothing": "dpo_label_smoothing", "ld_alpha": "ld_alpha"},
    losses=("sigmoid", "hinge", "ipo"),
    loss_key="pref_loss",
    notes=("the loss: LLaMA-Factory holds the full logits of policy and reference in float32, even if TRL does not",),
)
"""The names are those of ``train/dpo/trainer.py: CustomDPOTrainer`` in LLaMA-Factory."""


def without_scoring(trainer: str, columns: Callable[[Any], Sequence[str]]) -> AbstractContextManager[Any]:
    """Within the block, a trainer does not score the data with the reference before training: it uses zeros instead.
    ``trainer``: the name of the trainer's class. ``columns``: returns the names of the score columns of a trainer."""
    from unittest.mock import patch  # slow to import, and the parent process imports this module too

    import trl

    def with_scores(trainer: Any, dataset: Any, *_: Any) -> Any:
        for name in columns(trainer):
            dataset = dataset.add_column(name, [0.0] * len(dataset))
        return dataset

    return patch.object(getattr(trl, trainer), "_precompute_ref_logps", with_scores)


without_precomputing = partial(without_scoring, "DPOTrainer", lambda _: ("ref_chosen_logps", "ref_rejected_logps"))


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes pairs in which the prompt with either completion fills ``length`` tokens, half of them prompt."""
    prompt = length // 2
    completion = text_of(length - prompt)
    return repeated({"prompt": text_of(prompt), "chosen": completion, "rejected": completion}, rows)


def rows_editor(filled: Configs) -> EditRows:
    """Returns a function that shortens the last rejected completion, so that a batch is padded as a real one is."""
    return partial(shorten_last_rejected, limit=filled.training.max_length)


worst_image_rows = image_rows.pairs
image_rows_editor = partial(image_rows.shorten_last, "rejected")


@contextmanager
def strided_logps(home: str, trainer: Any, filled: Configs, knobs: Knobs) -> Iterator[None]:
    """Within the block, a trainer's log-probabilities are an ``as_strided`` view of the gathered values.

    TRL's DPO (before 1.16) and KTO write into a view of the log-probabilities. For real tensors, the backward of such a
    write uses ``as_strided`` with zeros of the base's size; for fake ones, autograd would replay the view instead
    (tools/autograd/gen_inplace_or_view_type.py: is_python_dispatch). ``home``: the trainer's module, such as
    ``trl.trainer.dpo_trainer``.
    """
    from unittest.mock import patch  # slow to import, and the parent process imports this module too

    from torch._subclasses.fake_tensor import FakeTensor

    module = importlib.import_module(home)
    if (log_softmax := getattr(module, "selective_log_softmax", None)) is None:
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


def unscored_lengths(trainer: str, filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts the tokens of each prompt with either completion, as TRL's trainer class of this name prepares them,
    without reference log-probabilities."""
    import trl

    filled.training.precompute_ref_log_probs = False
    return count_prepared(getattr(trl, trainer), filled, split, tokenizer, ref_model=smallest_model())


row_lengths = partial(unscored_lengths, "DPOTrainer")
image_texts = image_rows.pair_texts

PAIRWISE = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero"),
    *("apo_down", "discopop", "sigmoid_norm"),
)
"""The values of ``loss_type`` whose loss is a mean of one value per pair."""


def why_not_split(trainer: Any) -> str | None:
    """Returns why the loss cannot be split, or None: it compares a micro-batch's pairs, or has means over both tokens
    and pairs."""
    kinds = list(trainer.loss_types)
    others = [kind for kind in kinds if kind not in PAIRWISE]
    if kinds == ["sft"] or not others:
        return None
    if "sft" in others:
        return "loss_type sft is a mean over tokens, and its other losses are means over pairs"
    return f"loss_type {others[0]} compares each pair with the others of its micro-batch"


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """Returns what the loss is averaged over: pairs, or the chosen completions' tokens if ``loss_type`` is only sft."""
    return Basis.CHOSEN_TOKENS if list(trainer.loss_types) == ["sft"] else Basis.UNITS
