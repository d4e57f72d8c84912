"""Adapts Kahneman-Tversky optimization with TRL's KTOTrainer: completions are labelled desirable or undesirable."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from autotrain_mem.methods import dpo, image_rows
from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.worst_case_text import EditRows, repeated, shorten_last_row, text_of

adapter_rate = (5e-6, "the highest rate at which TRL's documentation finds KTO stable")
"""``docs/source/kto_trainer.md``; LLaMA-Factory has it too (``examples/train_lora/qwen3_lora_kto.yaml``)."""
liger_since = None


def least_rows(arguments: Mapping[str, Any]) -> int:
    """Returns 2, since the KL divergence pairs each prompt with another row's completion
    (``trl/trainer/kto_trainer.py: __init__``); 1 for the loss without a KL divergence."""
    return 1 if arguments.get("loss_type") == "apo_zero_unpaired" else 2


without_precomputing = partial(
    dpo.without_scoring,
    "KTOTrainer",
    lambda trainer: ("ref_logps", "ref_KL_logps") if trainer.calculate_KL else ("ref_logps",),
)


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes desirable rows that fill ``length`` tokens, nearly all of them in the completion.

    For its metrics the trainer copies the logits of all desirable rows, then the logits of their completions' tokens
    (``trl/trainer/kto_trainer.py: _compute_loss``).
    """
    completion = text_of(max(1, length - 2))  # TRL adds an end token
    return repeated({"prompt": text_of(1), "completion": completion, "label": True}, rows)


def rows_editor(filled: Configs) -> EditRows:
    """Returns a function that shortens the last of several rows, so that the batch is padded."""
    return shorten_last_row


worst_image_rows = image_rows.labelled
image_rows_editor = partial(image_rows.shorten_last, "completion")
training_patches = partial(dpo.strided_logps, "trl.trainer.kto_trainer")

row_lengths = partial(dpo.unscored_lengths, "KTOTrainer")
image_texts = image_rows.completion_texts


def why_not_split(trainer: Any) -> str | None:
    """Returns why a micro-batch cannot be split: the KL divergence compares its rows; without it, the metrics do."""
    if trainer.calculate_KL:
        return "its KL divergence is estimated over the rows of a micro-batch"
    return "its metrics compare the desirable rows of a micro-batch with the undesirable ones"
