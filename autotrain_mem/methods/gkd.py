"""Adapts generalized knowledge distillation with the GKDTrainer of ``trl.experimental``.

It trains on answers of the data, the student or the teacher, as in TRL's ``examples/scripts/gkd.py``.
"""

import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from functools import partial
from types import SimpleNamespace
from typing import Any

from autotrain_mem.methods import distillation
from autotrain_mem.methods.configs import REHEARSED_ACCUMULATION, Configs, arguments_of_loaded, own_tokenizer, padding
from autotrain_mem.methods.interface import Basis
from autotrain_mem.methods.row_lengths import RowLengths
from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN, EditRows, repeated, text_of
from autotrain_mem.support.errors import DatasetFormatError, UsageError
from autotrain_mem.types import Knobs

learns_tokens = True
liger_since = None


class CompletionSource(StrEnum):
    """Names the source of a micro-batch's answers (``gkd_trainer.py: training_step``)."""

    STUDENT = "student"
    TEACHER = "teacher"
    DATA = "data"
    """The answers in the rows are used, and none is generated."""


def _ways(training: Any) -> tuple[CompletionSource, ...]:
    """Returns the possible sources: the student with probability ``lmbda``, else the teacher or the data."""
    other = CompletionSource.TEACHER if training.seq_kd else CompletionSource.DATA
    chances = {other: 1 - training.lmbda, CompletionSource.STUDENT: training.lmbda}
    return tuple(source for source, chance in chances.items() if chance > 0)


def _trained_tokens(way: CompletionSource, row: int, prompt: int, training: Any) -> int:
    """Counts a row's tokens in a training step. A generated answer follows the prompt regardless of ``max_length``."""
    return row if way is CompletionSource.DATA else prompt + int(training.max_new_tokens)


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """Builds the trainer. The teacher gets the student's dtype and quantization unless ``--teacher_model_init_kwargs``
    gives others. Both models use the student's tokenizer."""
    from trl.experimental.gkd import GKDTrainer

    training = filled.training
    common, loading = arguments_of_loaded(filled, model, stub)
    training.model_init_kwargs = loading
    training.teacher_model_init_kwargs = {**loading, **(training.teacher_model_init_kwargs or {})}
    tokenizer = stub or own_tokenizer(filled, model, padding_side="left")
    return GKDTrainer(
        teacher_model=training.teacher_model_name_or_path,
        train_dataset=_with_prompt_texts(train_dataset, tokenizer),
        eval_dataset=_with_prompt_texts(eval_dataset, tokenizer),
        **common | {"processing_class": tokenizer},
    )


def _with_prompt_texts(rows: Any, tokenizer: Any) -> Any:
    """Converts conversational prompts to text, as TRL's example does, since the collator accepts only text."""
    if isinstance(rows, dict):
        return {name: _with_prompt_texts(each, tokenizer) for name, each in rows.items()}
    if rows is None or "prompt" not in (rows.column_names or ()) or isinstance(next(iter(rows))["prompt"], str):
        return rows
    text = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    return rows.map(lambda row: {"prompt": text(row["prompt"])})


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes rows of ``length`` tokens with the data's longest prompt. If it is unknown, the answer has one token."""
    prompt = max(1, min(length - 1, filled.prompt_length or length))
    mask = [0] * prompt + [1] * (length - prompt)
    text = text_of(1)  # the collator requires one, but uses the mask
    return repeated({"input_ids": [ORDINARY_TOKEN] * length, "completion_mask": mask, "prompt": text}, rows)


def rows_editor(filled: Configs) -> EditRows:
    """Returns a function that shortens the last prompt by one token, so that a batch of several rows is padded left."""

    def shorten_last_prompt(rows: list[Any]) -> list[Any]:
        *full, last = rows
        if not full or last["completion_mask"][:2] != [0, 0]:
            return rows
        return [*full, {name: value[1:] if isinstance(value, list) else value for name, value in last.items()}]

    return shorten_last_prompt


@contextmanager
def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> Iterator[None]:
    """Uses the possible sources of answers in turn, the one that trains on the most tokens last.

    That source needs the most memory, for its copies of full logits. Since it comes last, gradients and optimizer state
    are already allocated. The loss copies logits at labels, so a rehearsal's rows have as many labels as the data's
    longest answer has tokens; if that is unknown, every token but the first is a label.
    """
    from unittest.mock import patch  # slow to import, and the parent process imports this module too

    turns = itertools.count()
    step, ways = trainer.training_step, _ways(trainer.args)

    def one_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        row, prompt = inputs["input_ids"].shape[1], inputs["prompts"].shape[1]
        in_turn = sorted(ways, key=lambda way: _trained_tokens(way, row, prompt, trainer.args))
        with going(trainer, in_turn[next(turns) % len(in_turn)]):
            return step(model, inputs, *args, **kwargs)

    if "completion_mask" in trainer.train_dataset.column_names:
        trainer.data_collator = _labelled(trainer.data_collator, filled.answer_length)
    with patch.object(trainer, "training_step", one_step):
        yield


def _labelled(collate: Any, answer: int | None) -> Any:
    import torch

    def collate_with_labels(rows: list[Any]) -> Any:
        batch = collate(rows)
        with torch._C._DisableTorchDispatch():  # the collator's work is on the host and must not be recorded
            mask = batch["attention_mask"]
            learned = (mask.cumsum(dim=1) * mask) > 1  # every token but the first, which is prompt
            learned[:, : -(answer or mask.shape[1])] = False
            batch["labels"] = batch["input_ids"].masked_fill(~learned, -100)
        return batch

    return collate_with_labels


@contextmanager
def going(trainer: Any, way: CompletionSource) -> Iterator[None]:
    """Within the block, training steps use this source of answers, and generated answers have their full length."""
    from unittest.mock import patch  # slow to import, and the parent process imports this module too

    from trl.experimental.gkd import gkd_trainer

    drawn = SimpleNamespace(random=lambda: 0.0 if way is CompletionSource.STUDENT else 1.0)
    answers = trainer.generation_config
    with (
        patch.object(gkd_trainer, "random", drawn),
        patch.object(answers, "min_new_tokens", int(answers.max_new_tokens)),
    ):
        yield


def ways_of_step(trainer: Any) -> Iterable[AbstractContextManager[None]]:
    """Returns a context manager for each possible source of answers, which forces it."""
    return [going(trainer, way) for way in _ways(trainer.args)]


def micro_steps_per_generation(filled: Configs, knobs: Knobs) -> int:
    """Returns how many micro-steps a run takes, on average, to generate as often as one rehearsed optimizer step does;
    0 if no micro-step generates."""
    training, ways = filled.training, _ways(filled.training)
    chances = {CompletionSource.STUDENT: training.lmbda, CompletionSource.TEACHER: 1 - training.lmbda}
    chance = sum(chances.get(way, 0.0) for way in ways)
    rehearsed = min(REHEARSED_ACCUMULATION, knobs.gradient_accumulation_steps)
    rehearsed_answers = rehearsed * sum(way in chances for way in ways) / len(ways)
    return max(1, round(rehearsed_answers / chance)) if chance else 0


def unprepared_lengths(trainer: Any, rows: list[Any]) -> list[int]:
    """Counts the most tokens that each row can train on: the row's own, or its prompt's plus a generated answer's."""
    lengths = []
    for row in rows:
        batch = trainer.data_collator([row])
        row_tokens, prompt = batch["input_ids"].shape[1], batch["prompts"].shape[1]
        ways = _ways(trainer.args)
        lengths.append(max(_trained_tokens(way, row_tokens, prompt, trainer.args) for way in ways))
    return lengths


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts the tokens of each row and of its prompt as TRL's collator makes them, without truncation. Raises
    DatasetFormatError if a conversation has fewer than two messages, or if the data have a column of text prompts."""
    from trl.experimental.utils import DataCollatorForChatML

    if without := sum(len(messages) < 2 for messages in split["messages"]):
        raise DatasetFormatError(
            f"{without:,} of {len(split):,} conversations have a single message: GKD trains on the last message, and "
            "those before it are its prompt.",
            hint="Drop these rows; every conversation needs a question and an answer.",
        )
    if "prompt" in split.column_names and isinstance(split[0]["prompt"], str):
        raise DatasetFormatError(
            "The data have a column prompt with texts beside their messages, and TRL would take these texts for the "
            "rendered beginning of the conversations.",
            hint="Drop the column prompt: all messages but the last are then the prompt.",
        )
    if filled.training.chat_template_path is not None:
        with open(filled.training.chat_template_path, encoding="utf-8") as template:
            tokenizer.chat_template = template.read()
    collate = DataCollatorForChatML(padding(tokenizer), max_length=sys.maxsize)

    def count(row: dict[str, Any]) -> dict[str, int]:
        batch = collate([row])
        return {"tokens": batch["input_ids"].shape[1], "prompt": batch["prompts"].shape[1]}

    shown = {"desc": "Tokenizing conversations", "num_proc": filled.training.dataset_num_proc}
    rows = _with_prompt_texts(split, tokenizer)
    counted = rows.map(count, remove_columns=rows.column_names, keep_in_memory=True, **shown)
    return RowLengths(longer=list(counted["tokens"]), prompts=list(counted["prompt"]))


def check(filled: Configs) -> None:
    """Raises UsageError for arguments that the trainer would reject later or misinterpret."""
    training = filled.training
    distillation.check(filled)
    if training.max_length is None:
        raise UsageError(
            "TRL's trainer would take --max_length none as a limit of 1,024 tokens.",
            hint="Give a number, or --max_length auto for the length of the longest row.",
        )
    for name in ("packing", "eval_packing", "padding_free", "assistant_only_loss"):
        if getattr(training, name):
            raise UsageError(
                f"--{name} is not for GKD: TRL's trainer pads conversations and trains on the last answer.",
                hint=f"Remove --{name}.",
            )
    if training.chat_template_path is not None and not os.path.isfile(training.chat_template_path):
        raise UsageError(
            f"--chat_template_path {training.chat_template_path} is not a file: another model's template may "
            "add tokens that the teacher does not know.",
            hint="Give a file with a template, or a model that has one.",
        )


def why_not_split(trainer: Any) -> str | None:
    """Returns why a step cannot be split: its source of answers is random. None if it only uses the data's answers."""
    if _ways(trainer.args) == (CompletionSource.DATA,):
        return None
    return "the source of answers is drawn for each micro-batch, and each of its parts would draw another"


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """Returns what the loss is averaged over: the tokens of all micro-batches if transformers counted them, else those
    of one micro-batch (``gkd_trainer.py: generalized_jsd_loss``)."""
    return Basis.WHOLE if is_counted else Basis.TOKENS
