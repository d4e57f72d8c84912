"""Makes rows with images for a rehearsal, and formats the user's rows with images as TRL does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.worst_case_text import EditRows, repeated, text_of
from autotrain_mem.support.errors import UsageError


def mark_of(processor: Any) -> str:
    """Returns an image's placeholder and a word: without a word between them, two images would count as one."""
    return f"{processor.image_token} {text_of(1)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowImages:
    """Holds the images of every rehearsed row and their processor (``rehearsal.stub_processor``)."""

    processor: Any
    sizes: tuple[str, ...]
    """The size of each image, as ``"1024x768"`` (width x height)."""

    @property
    def tokens(self) -> int:
        """Counts the tokens that the images take without further text."""
        row = self.processor(text=[self.marks], images=[[*self.sizes]])
        return len(row["input_ids"][0])

    @property
    def marks(self) -> str:
        """Returns the images' placeholders as text."""
        return mark_of(self.processor) * len(self.sizes)

    def text(self, length: int) -> str:
        """Returns text that fills ``length`` tokens together with the images. Raises UsageError if they do not fit."""
        if length <= self.tokens:
            raise UsageError(
                f"A row's images alone take {self.tokens} tokens ({', '.join(self.sizes)}), but rows have at most "
                f"{length}.",
                hint=f"Give --max_length {self.tokens + 1} or more (auto: as long as the longest row), or "
                "--max_pixels.",
            )
        return text_of(length - self.tokens)


def conversations(filled: Configs, length: int, rows: int, images: RowImages) -> Any:
    """Makes conversations with images, as SFT reads them."""
    return repeated({"messages": _said(images.text(length)), "images": [*images.sizes]}, rows)


def pairs(filled: Configs, length: int, rows: int, images: RowImages) -> Any:
    """Makes pairs with the images in the prompt, which fills half of a row, or more if the images need it."""
    prompt = max(length // 2, images.tokens + 1)
    images.text(length - 1)  # raises unless a token is left for the completion
    completion = text_of(length - prompt)
    row = {"prompt": images.marks + images.text(prompt), "chosen": completion, "rejected": completion}
    return repeated({**row, "images": [*images.sizes]}, rows)


def labelled(filled: Configs, length: int, rows: int, images: RowImages) -> Any:
    """Makes desirable completions to the shortest prompt that holds the images. TRL adds no end token to such rows."""
    prompt = images.tokens + 1
    images.text(length - 1)  # raises unless a token is left for the completion
    row = {"prompt": images.marks + images.text(prompt), "completion": text_of(length - prompt), "label": True}
    return repeated({**row, "images": [*images.sizes]}, rows)


def prompts(filled: Configs, length: int, rows: int, images: RowImages) -> Any:
    """Makes prompts with images, as GRPO and RLOO read them."""
    return repeated({"prompt": _said(images.text(length)), "images": [*images.sizes]}, rows)


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def shorten_last(column: str, filled: Configs) -> EditRows:
    """Returns a function that removes a word from this column of the last row, so that the batch is padded."""

    def shorten(rows: list[Any]) -> list[Any]:
        *full, last = rows
        return [*full, {**last, column: without_a_word(last[column])}]

    return shorten


def without_a_word(value: Any) -> Any:
    """Removes one word from a text, or from a conversation of one message, but keeps at least one word."""
    if isinstance(value, str):
        return text_of(max(1, len(value.split()) - 1))
    return _said(without_a_word(value[0]["content"]))


Texts = tuple[tuple[str, ...], ...]
"""The sequences of a row. Each consists of the texts that TRL tokenizes separately, with a placeholder per image."""


def conversation_texts(filled: Configs, row: Mapping[str, Any], images: int, processor: Any) -> Texts:
    """Formats a conversation, plain text, or a prompt with its completion, as ``trl/trainer/sft_trainer.py:
    DataCollatorForVisionLanguageModeling`` does. ``images``: the number of the row's images."""
    if "messages" in row:
        return ((_rendered(row["messages"], images, processor),),)
    if (text_field := filled.training.dataset_text_field) in row:
        return ((row[text_field],),)
    formatted = _formatted(row, ("prompt", "completion"), images, processor)
    return ((formatted["prompt"], formatted["completion"]),)


def pair_texts(filled: Configs, row: Mapping[str, Any], images: int, processor: Any) -> Texts:
    """Formats a row as ``trl/trainer/dpo_trainer.py: DataCollatorForVisionPreference`` does."""
    formatted = _formatted(row, ("prompt", "chosen", "rejected"), images, processor)
    return tuple((formatted["prompt"], formatted[side]) for side in ("chosen", "rejected"))


def completion_texts(filled: Configs, row: Mapping[str, Any], images: int, processor: Any) -> Texts:
    """Formats a row as ``trl/trainer/kto_trainer.py: DataCollatorForVisionUnpairedPreference`` does."""
    formatted = _formatted(row, ("prompt", "completion"), images, processor)
    return ((formatted["prompt"], formatted["completion"]),)


def prompt_texts(filled: Configs, row: Mapping[str, Any], images: int, processor: Any) -> Texts:
    """Formats a prompt as ``trl/trainer/grpo_trainer.py: _tokenize_prompts`` does."""
    if isinstance(row["prompt"], str):
        return ((row["prompt"],),)
    options = getattr(filled.training, "chat_template_kwargs", None) or {}
    return ((_rendered(row["prompt"], images, processor, add_generation_prompt=True, **options),),)


def _rendered(messages: Any, images: int, processor: Any, **options: Any) -> str:
    from trl.data_utils import prepare_multimodal_messages

    prepared = prepare_multimodal_messages(messages, images=[_SOME_IMAGE] * images)
    return str(processor.apply_chat_template(prepared, tokenize=False, **options))


_SOME_IMAGE = "image"
"""Stands for any image, since a chat template writes a placeholder for each image without reading it."""


def _formatted(row: Mapping[str, Any], columns: tuple[str, ...], images: int, processor: Any) -> Mapping[str, str]:
    from trl.data_utils import apply_chat_template, is_conversational, prepare_multimodal_messages

    named = {name: row[name] for name in columns}
    if not is_conversational(named):
        return named
    given = {"prompt": [_SOME_IMAGE] * images}
    prepared = {name: prepare_multimodal_messages(value, images=given.get(name)) for name, value in named.items()}
    formatted: Mapping[str, str] = apply_chat_template(prepared, processor)
    return formatted
