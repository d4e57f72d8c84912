"""Adapts reward modelling with TRL's RewardTrainer: a model with a score head of one output is trained on pairs."""

from collections.abc import Iterator
from typing import Any

from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.dpo import LLAMAFACTORY_PAIR_ROWS, LLAMAFACTORY_PAIRS
from autotrain_mem.methods.interface import AxolotlFacts, LlamaFactoryFacts
from autotrain_mem.methods.row_lengths import RowLengths, count_prepared, smallest_model
from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN, EditRows, repeated, shorten_last_rejected
from autotrain_mem.types.findings import Finding

adapter_rate = (3e-4, "tinker-cookbook's reward model; TRL's examples range from 1e-4 to 1e-3")
"""``recipes/preference/rlhf/rlhf_pipeline.py: rm_learning_rate``; ``examples/scripts/reward_modeling.py`` has 1e-4,
``docs/source/reward_trainer.md`` 1e-3."""
joins_sides = True
axolotl = AxolotlFacts(
    keys={"reward_model": True, "model_type": "AutoModelForSequenceClassification", "num_labels": 1},
    renamed={"center_rewards_coefficient": "center_rewards_coefficient"},
    row_type="bradley_terry.chat_template",
    notes=("type: this one reads rows with input, chosen and rejected; TRL's rows have other columns",),
)
"""The keys are those of ``validation.py: set_reward_model_defaults`` in Axolotl."""
llamafactory = LlamaFactoryFacts(
    stage="rm",
    entry=LLAMAFACTORY_PAIRS,
    rows=LLAMAFACTORY_PAIR_ROWS,
    length_notes=("cutoff_len: LLaMA-Factory cuts both sides of a longer pair; TRL drops the pair",),
    notes=("the model: LLaMA-Factory trains a causal model with a value head; TRL a classifier with one score",),
)


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes pairs in which both sequences fill ``length`` tokens."""
    full = [ORDINARY_TOKEN] * length
    return repeated({"chosen_ids": full, "rejected_ids": full}, rows)


def rows_editor(filled: Configs) -> EditRows:
    """Returns a function that shortens the last rejected sequence, so that a batch is padded as a real one is."""
    return shorten_last_rejected


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts the tokens of pairs as the trainer prepares them, before it drops long pairs."""
    from trl import RewardTrainer

    return count_prepared(RewardTrainer, filled, split, tokenizer, model=smallest_model(classifier=True))


def tokenizer_findings(filled: Configs, tokenizer: Any) -> Iterator[Finding]:
    """Warns if the padding token is the end token. TRL ends every sequence with the end token, but the model reads the
    score at the last token that is not padding (``transformers/modeling_layers.py:
    GenericForSequenceClassification.forward``)."""
    padding = filled.training.pad_token or tokenizer.pad_token or tokenizer.eos_token
    end = filled.training.eos_token or tokenizer.eos_token
    if padding is not None and padding == end:
        yield Finding(
            kind="warning",
            message=f"The padding token is the end token ({end!r}): a reward model reads its score at the last token "
            "that is not padding, so it never reads the end of a response.",
            cure="Give --pad_token TOKEN: a token of the vocabulary that no text uses.",
        )
