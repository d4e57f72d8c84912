"""Adapts supervised fine-tuning with TRL's SFTTrainer."""

from collections.abc import Callable
from typing import Any

from autotrain_mem.methods import image_rows
from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.interface import AxolotlFacts, Basis, LlamaFactoryFacts
from autotrain_mem.methods.row_lengths import RowLengths, count_prepared
from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN, EditRows, shorten_last_row

takes_transformers_arguments = True  # trl/trainer/sft_trainer.py: __init__
learns_tokens = True
axolotl = AxolotlFacts(
    renamed={"padding_free": "batch_flattening"},
    row_type="chat_template",
    notes=(
        "type: this one reads rows with a messages column; text rows need type completion with field text, prompts "
        "with completions a user-defined type",
    ),
)
llamafactory = LlamaFactoryFacts(
    stage="sft",
    entry={
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    rows="rows with a messages column; name other columns in the entry",
    losses=(None, "nll"),  # TRL's nll computes full logits
)


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes rows that fill ``length`` tokens. With packing, a block has two documents, so that it needs a mask."""
    from datasets import Dataset

    half = length // 2
    lengths = [length] * rows if not filled.training.packing or half == 0 else [length - half, half] * rows
    return Dataset.from_dict({"input_ids": [[ORDINARY_TOKEN] * tokens for tokens in lengths]})


def rows_editor(filled: Configs) -> EditRows:
    """Returns a function that shortens the last row, so that the batch is padded. Rows without padding stay whole."""
    return list if filled.training.packing or filled.training.padding_free else shorten_last_row


worst_image_rows = image_rows.conversations


def image_rows_editor(filled: Configs) -> EditRows:
    """Returns a function that shortens the last of several rows. Rows with images are always padded, never packed
    (``trl/trainer/sft_trainer.py: __init__``)."""
    shorten = image_rows.shorten_last("messages", filled)
    return lambda rows: shorten(rows) if len(rows) > 1 else rows


def row_lengths(
    filled: Configs, split: Any, tokenizer: Any, formatting: Callable[[Any], str] | None = None
) -> RowLengths:
    """Counts the tokens of rows as the trainer prepares them, without truncation."""
    from trl import SFTTrainer

    filled.training.packing, filled.training.padding_free = False, False
    return count_prepared(SFTTrainer, filled, split, tokenizer, formatting_func=formatting)


image_texts = image_rows.conversation_texts


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """Returns what the loss is averaged over: tokens of all micro-batches if transformers counted them, else of one."""
    return Basis.WHOLE if is_counted else Basis.TOKENS


def is_models_loss(trainer: Any) -> bool:
    """Returns whether the model's forward computes the loss: not for TRL's chunked loss, which replaces the forward
    (``trl/trainer/sft_trainer.py: _patch_chunked_ce_lm_head``), nor for label smoothing and ``dft``, which divide by
    transformers' count."""
    others = (trainer.compute_loss_func, trainer.label_smoother)
    return others == (None, None) and trainer.args.loss_type != "chunked_nll"
