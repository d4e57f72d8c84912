"""Loads a model's config and processor by its name, and explains why they cannot be loaded."""

import functools
import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

from autotrain_mem.support.errors import ModelNotFoundError, UnsupportedModelError, UsageError, described
from autotrain_mem.support.sources import OFFLINE_HINT, no_id, no_model, unreachable
from autotrain_mem.types import Job

_NO_VIDEOS = SimpleNamespace(num_frames=1, fps=1)
"""A stub with the fields that SmolVLM's processor reads even without videos (``processing_smolvlm.py:
apply_chat_template``)."""


class SpecialToken(NamedTuple):
    """Holds the text of an image token, and the field of the model's config that holds its id."""

    text: str
    config_field: str | None = None


_QWEN = {
    "image_token": SpecialToken("<|image_pad|>", "image_token_id"),
    "video_token": SpecialToken("<|video_pad|>", "video_token_id"),
    "vision_start_token": SpecialToken("<|vision_start|>", "vision_start_token_id"),
    "vision_end_token": SpecialToken("<|vision_end|>", "vision_end_token_id"),
}
_IDEFICS = {
    "image_token": SpecialToken("<image>", "image_token_id"),
    "fake_image_token": SpecialToken("<fake_token_around_image>"),
    "global_image_token": SpecialToken("<global-img>"),
    "end_of_utterance_token": SpecialToken("<end_of_utterance>"),
}
_LLAVA = {"image_token": SpecialToken("<image>", "image_token_id")}
FAMILIES: dict[str, dict[str, SpecialToken]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _QWEN),
    **dict.fromkeys(("smolvlm", "idefics3"), _IDEFICS),
    **dict.fromkeys(("llava", "llava_next", "llava_onevision"), _LLAVA),
    "gemma3": {
        "image_token": SpecialToken("<image_soft_token>", "image_token_id"),
        "boi_token": SpecialToken("<start_of_image>", "boi_token_id"),
        "eoi_token": SpecialToken("<end_of_image>", "eoi_token_id"),
    },
}
"""``model_type`` -> the image tokens that its processor reads (``processing_*.py``)."""


def load_processor(model: str, max_pixels: int | None = None, **options: Any) -> Any:
    """Loads a model's processor with its tokenizer, or for a text model the tokenizer alone.

    Without torchvision, which a video processor needs (``transformers/processing_utils.py: ProcessorMixin.__init__``),
    the processor is assembled from its image and text parts. ``max_pixels``: the limit for the size of images (see
    :func:`image_processor`). ``options``: arguments of ``from_pretrained``, such as ``trust_remote_code`` and
    ``revision``. If there is no processor, transformers raises OSError, ValueError, TypeError or ImportError."""
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer
    from transformers.utils import is_torchvision_available

    config = None
    with suppress(OSError, ValueError):  # a folder with only a tokenizer
        config = AutoConfig.from_pretrained(model, **options)
    reads_images = getattr(config, "model_type", None) in FAMILIES
    if is_torchvision_available() or not reads_images:
        processor = AutoProcessor.from_pretrained(model, **options)
        if reads_images and max_pixels is not None:
            processor.image_processor = image_processor(model, max_pixels, **options)
        return processor
    tokenizer = AutoTokenizer.from_pretrained(model, **options)
    processor = assembled_processor(model, config, image_processor(model, max_pixels, **options), tokenizer)
    processor.chat_template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    return processor


def image_processor(model: str, max_pixels: int | None = None, **options: Any) -> Any:
    """Loads the model's image processor, based on torchvision if that is installed, else on Pillow. ``max_pixels``: the
    area in pixels to which larger images are reduced. Qwen-VL's processor limits the area itself
    (``image_processing_qwen2_vl.py: smart_resize``). SmolVLM's cuts images into square tiles, and limits their longest
    side: the limit becomes the side of the largest square of whole tiles within this area
    (``image_processing_smolvlm.py: resize, split_images``). Raises UsageError if the processor resizes all images to
    one size."""
    from transformers import AutoImageProcessor

    made = AutoImageProcessor.from_pretrained(model, **options)
    if max_pixels is None:
        return made
    if bounds := _bounds(made):
        most = min(bounds[1], max_pixels)
        least = min(bounds[0], most)
        # Older configs have two other fields, which override ``size`` (``image_processing_qwen2_vl.py: __init__``).
        size = {"shortest_edge": least, "longest_edge": most}
        options |= {"min_pixels": least, "max_pixels": most}
    elif tile := _tile(made):
        size = {"longest_edge": min(made.size["longest_edge"], max(tile, math.isqrt(max_pixels) // tile * tile))}
    else:
        raise UsageError(
            f"--max_pixels changes nothing for {model}: its processor resizes all images to one size.",
            hint="Remove --max_pixels.",
        )
    return AutoImageProcessor.from_pretrained(model, size=size, **options)


def pixel_steps(job: Job) -> tuple[tuple[int, ...], bool]:
    """Returns the values of ``max_pixels`` to try, largest first, and whether the processor enlarges small images.

    For Qwen-VL the values are halvings of the processor's maximum down to its minimum; for SmolVLM they are squares of
    whole tiles. There are none if all images get the same size, or if no processor can be loaded.
    """
    from transformers import AutoImageProcessor

    try:
        made = AutoImageProcessor.from_pretrained(job.model, **revision_of(job))
    except (OSError, ValueError, ImportError):
        return (), False
    if bounds := _bounds(made):
        halvings = int(math.log2(max(1, bounds[1] // max(1, bounds[0]))))
        return tuple(bounds[1] >> halving for halving in range(1, halvings + 1)), False
    if tile := _tile(made):
        return tuple((tile * tiles) ** 2 for tiles in range(made.size["longest_edge"] // tile - 1, 0, -1)), True
    return (), False


def _bounds(made: Any) -> tuple[int, int] | None:
    """Returns the minimum and maximum area in pixels if the processor keeps an image's aspect ratio; else None."""
    size = dict(made.size)
    return (size["shortest_edge"], size["longest_edge"]) if {*size} >= {"shortest_edge", "longest_edge"} else None


def _tile(made: Any) -> int | None:
    """Returns the side, in pixels, of the tiles into which the processor cuts images; None if it cuts none."""
    if not dict(made.size).get("longest_edge") or not getattr(made, "max_image_size", None):
        return None
    return int(made.max_image_size["longest_edge"])


def assembled_processor(model: str, config: Any, images: Any, tokenizer: Any) -> Any:
    """Assembles a model's processor from its image processor and tokenizer. Further arguments are from the processor's
    own file, or else from the model's config."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kind = _without_videos(getattr(transformers, PROCESSOR_MAPPING_NAMES[config.model_type]))
    given: dict[str, Any] = {}
    with suppress(OSError):
        given |= kind.get_processor_dict(model)[0]
    vision: Any = getattr(config, "vision_config", None)
    known: dict[str, Callable[[], Any]] = {
        # pixel_shuffle merges scale_factor^2 of the (image_size / patch_size)^2 patches into one
        # (processing_smolvlm.py: SmolVLMProcessor.__init__)
        "image_seq_len": lambda: (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2,
        "image_seq_length": lambda: config.mm_tokens_per_image,
        "patch_size": lambda: vision.patch_size,
        "vision_feature_select_strategy": lambda: config.vision_feature_select_strategy,
        "num_additional_image_tokens": lambda: int(vision.model_type == "clip_vision_model"),  # CLIP has a class token
    }
    names = [name for name in inspect.signature(kind.__bases__[0].__init__).parameters if name in known]
    more = {name: given[name] if given.get(name) is not None else known[name]() for name in names}
    return kind(images, tokenizer, **more)


def _without_videos(kind: Any) -> Any:
    """Returns a subclass of a processor class without the video processor, which needs torchvision."""

    class ImagesOnly(kind):  # type: ignore[misc]  # a class of transformers
        video_processor = _NO_VIDEOS

        def __init__(self, image_processor: Any, tokenizer: Any, **more: Any) -> None:
            takes_videos = "video_processor" in inspect.signature(kind.__init__).parameters
            videos = {"video_processor": _NO_VIDEOS} if takes_videos else {}
            super().__init__(image_processor=image_processor, tokenizer=tokenizer, **videos, **more)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in kind.get_attributes() if name != "video_processor"]

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return type(argument)

    ImagesOnly.__name__ = kind.__name__
    return ImagesOnly


@functools.lru_cache(maxsize=16)
def blank(size: str) -> Any:
    """Returns a blank image of a size such as ``"1024x768"`` (width x height)."""
    from PIL import Image

    width, height = map(int, size.split("x"))
    return Image.new("RGB", (width, height))


_LOG_IN = "hf auth login"


def not_loaded(model: str, error: OSError) -> ModelNotFoundError:
    """Returns the error to raise after ``from_pretrained`` failed, by its cause (``transformers/utils/hub.py:
    cached_files``)."""
    from huggingface_hub import errors

    if isinstance(cause := error.__cause__, errors.GatedRepoError):
        hint = f"Ask for access at https://huggingface.co/{model}, then: {_LOG_IN}"
        return ModelNotFoundError(f"{model} is gated: the hub denies you access.", hint=hint)
    if isinstance(cause, errors.RevisionNotFoundError):
        hint = f"See https://huggingface.co/{model}/commits/main"
        return ModelNotFoundError(f"The hub's {model} has no such --model_revision.", hint=hint)
    if isinstance(cause, errors.RepositoryNotFoundError):
        hint = f"Check the spelling; if it is private: {_LOG_IN}"
        return no_model(model, "the hub has no such model", hint)
    if isinstance(cause, errors.HFValidationError):
        return no_id(model)
    if why := why_unreachable(error):
        return no_model(model, why, OFFLINE_HINT)
    reason = next(iter(str(error).strip().splitlines()), described(error)).rstrip(".")
    return ModelNotFoundError(f"The model {model!r} cannot be loaded: {reason}.", hint=OFFLINE_HINT)


def why_unreachable(error: Exception) -> str:
    """Explains why the hub could not be reached; empty if the error has another cause."""
    from huggingface_hub import errors

    return unreachable() if isinstance(error.__cause__, errors.LocalEntryNotFoundError) else ""


def load_config(model: str, **options: Any) -> Any:
    """Loads the model's transformers config. Raises ModelNotFoundError if there is no config, or the hub does not
    provide it, and UnsupportedModelError if the installed transformers does not support the architecture."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, **options)
    except OSError as error:
        raise not_loaded(model, error) from error
    except (ValueError, KeyError) as error:
        import transformers

        raise UnsupportedModelError(
            f"transformers {transformers.__version__} cannot read the config of {model}: {error}",
            hint="Update transformers, or pass --trust_remote_code true for a model that brings its own code.",
        ) from error


def revision_of(job: Job) -> dict[str, Any]:
    """Returns the job's ``model_revision`` and ``trust_remote_code``, as arguments of ``from_pretrained``."""
    given = {
        "revision": job.arguments.get("model_revision"),
        "trust_remote_code": job.arguments.get("trust_remote_code"),
    }
    return {name: value for name, value in given.items() if value}
