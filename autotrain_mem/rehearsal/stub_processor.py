"""The processor of a model that reads images, for a rehearsal: its own code, around a tokenizer of a few words."""

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
"""A template that adds no token to a text, so that a row has as many as it is given."""

PROCESSED_KEPT = 8
"""Batches of blank images that are kept as they were processed; a rehearsal has two: of training and of evaluation."""


def rehearsed_processor(
    model: str, config: Any, padding_side: str = "right", *, max_pixels: int | None = None, **options: Any
) -> Any:
    """Makes the model's own processor, with :func:`stub_tokenizer` in the place of its tokenizer.

    It takes images by their sizes, ``"1024x768"`` (width x height): such an image is blank, and is processed once.
    ``options`` are those of ``from_pretrained``. Raises UnsupportedModelError for a model whose images are not
    rehearsed.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"Rows with images are not rehearsed for {config.model_type} models.",
            hint=f"They are for {', '.join(FAMILIES)}.",
        )
    tokens = FAMILIES[config.model_type]
    free = iter(range(8, 8 + len(tokens)))  # numbers that nothing else has, for tokens that the model has none for
    numbered = {
        name: (token.text, getattr(config, token.config_field) if token.config_field else next(free))
        for name, token in tokens.items()
    }
    images = _BlankImages(image_processor(model, max_pixels, **options))
    processor = assembled_processor(model, config, images, stub_tokenizer(padding_side, numbered))
    processor.chat_template = CHAT_TEMPLATE.replace("MARK", mark_of(processor))
    return processor


class _BlankImages:
    """Replaces an image processor: it takes sizes, and caches what became of blank images of these."""

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
        key = repr((_sizes(images), args, options))
        if key not in self._processed:
            while len(self._processed) >= PROCESSED_KEPT:
                del self._processed[next(iter(self._processed))]
            with real_tensors():
                self._processed[key] = self._processor(images, *args, return_tensors="np", **options)
        # Tensors are made anew each time: those that were kept would be taken for blocks that never die.
        return BatchFeature(data=dict(self._processed[key]), tensor_type=kind)


def _sizes(images: Any) -> Any:
    return [_sizes(each) for each in images] if isinstance(images, (list, tuple)) else images.size
