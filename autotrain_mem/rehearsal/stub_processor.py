"""Builds the real image processor of a model around a stub tokenizer."""

from typing import Any

from autotrain_mem.methods.image_rows import mark_of
from autotrain_mem.methods.worst_case_text import stub_tokenizer
from autotrain_mem.rehearsal.known_values import real_tensors
from autotrain_mem.support.errors import UnsupportedModelError
from autotrain_mem.trainers.pretrained import FAMILIES, assembled_processor, blank, image_processor

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == "image" -%}MARK{% else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}"""
"""A chat template that adds no tokens to a text."""

PROCESSED_KEPT = 8
"""The most batches of processed blank images in the cache; a rehearsal needs two, for training and evaluation."""


def rehearsed_processor(
    model: str, config: Any, padding_side: str = "right", *, max_pixels: int | None = None, **options: Any
) -> Any:
    """Makes the model's own processor, with :func:`stub_tokenizer` as its tokenizer.

    Images are given as sizes, ``"1024x768"`` (width x height), and are blank. ``options`` are passed to
    ``from_pretrained``. Raises UnsupportedModelError for an unsupported model family.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"Rows with images cannot be rehearsed for {config.model_type} models.",
            hint=f"Models of these types can be rehearsed with images: {', '.join(FAMILIES)}.",
        )
    tokens = FAMILIES[config.model_type]
    free = iter(range(8, 8 + len(tokens)))  # unused ids, for tokens without one in the config
    numbered = {
        name: (token.text, getattr(config, token.config_field) if token.config_field else next(free))
        for name, token in tokens.items()
    }
    images = _BlankImages(image_processor(model, max_pixels, **options))
    processor = assembled_processor(model, config, images, stub_tokenizer(padding_side, numbered))
    processor.chat_template = CHAT_TEMPLATE.replace("MARK", mark_of(processor))
    return processor


class _BlankImages:
    """Replaces an image processor: takes sizes, and caches the processed blank images."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._processed: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_processor"], name)

    def fetch_images(self, images: Any) -> Any:
        if isinstance(images, (list, tuple)):
            return [self.fetch_images(each) for each in images]
        return blank(images) if isinstance(images, str) else images

    def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
        from transformers.feature_extraction_utils import BatchFeature

        kind = options.pop("return_tensors", None)
        if (key := repr((_sizes(images), args, options))) not in self._processed:
            while len(self._processed) >= PROCESSED_KEPT:
                del self._processed[next(iter(self._processed))]
            with real_tensors():
                self._processed[key] = self._processor(images, *args, return_tensors="np", **options)
        # The cache holds numpy arrays: tensors in it would be recorded as blocks that are never freed.
        return BatchFeature(data=dict(self._processed[key]), tensor_type=kind)


def _sizes(images: Any) -> Any:
    return [_sizes(each) for each in images] if isinstance(images, (list, tuple)) else images.size
