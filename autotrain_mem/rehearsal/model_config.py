"""The model's config, and everything about it that would end a training run later, said before one is planned."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from autotrain_mem.errors import ModelConfigError, ModelNotFoundError, UnsupportedModelError
from autotrain_mem.rehearsal.materialize import load_config
from autotrain_mem.rehearsal.methods.method import method_of
from autotrain_mem.spec import Job

_SAVED = "Give --model a folder made by save_pretrained, or a hub id such as Qwen/Qwen2.5-0.5B."


def read_config(job: Job, **options: Any) -> Any:
    """The config of a model that the job's method can train.

    Args:
        options: For transformers: ``trust_remote_code``, ``revision``.

    Raises:
        ModelNotFoundError: no config.json there, or a hub id that cannot be reached.
        ModelConfigError: a config.json that is not JSON, or that transformers refuses.
        UnsupportedModelError: no causal language model of this architecture in the installed transformers.
    """
    from huggingface_hub.errors import StrictDataclassError

    model = job.model
    _check_folder(pathlib.Path(model))
    try:
        config = load_config(model, **options)
    except StrictDataclassError as error:
        reasons = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelConfigError(f"transformers refuses {model}/config.json: {' '.join(reasons)}", hint=_SAVED) from error
    _check_architecture(job, config)
    return config


def _check_folder(path: pathlib.Path) -> None:
    if path.is_file():
        raise ModelNotFoundError(f"{path} is a file.", hint=f"Give the folder that holds it: --model {path.parent}")
    if not path.is_dir():
        return  # a hub id, as far as one can tell from here
    file = path / "config.json"
    if not file.is_file():
        raise ModelNotFoundError(f"{path} holds no config.json.", hint=_SAVED)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelConfigError(
            f"{file} is not JSON: line {error.lineno}, column {error.colno} ({error.msg}).",
            hint="Download or save the model again: the file is probably cut short.",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{file} cannot be read: {error}.", hint="Download or save the model again.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelConfigError(f"{file} names no model_type, so it is not a model's config.", hint=_SAVED)
    _check_type(path, config)


def _check_type(path: pathlib.Path, config: dict[str, Any]) -> None:
    import transformers
    from transformers import CONFIG_MAPPING

    if config["model_type"] not in CONFIG_MAPPING and "auto_map" not in config:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} knows no model_type {config['model_type']!r} ({path}).",
            hint="Update transformers, or take a model that the installed one knows.",
        )


def _check_architecture(job: Job, config: Any) -> None:
    """Refuse what TRL's ``create_model_from_path`` would fail on, or would build as another kind of model."""
    import transformers

    model, names = job.model, config.architectures or []
    if not names:
        raise UnsupportedModelError(
            f"The config of {model} names no architecture, and TRL builds the model by it.",
            hint='Add it to config.json, for example "architectures": ["Qwen2ForCausalLM"].',
        )
    if getattr(config, "auto_map", None):
        return  # the model brings its own code
    version = transformers.__version__
    if not hasattr(transformers, names[0]):
        raise UnsupportedModelError(
            f"transformers {version} knows no architecture {names[0]}, which the config of {model} names.",
            hint="Update transformers, or correct the architectures in config.json.",
        )
    method = method_of(job.method)
    if names[0] not in _trained_by(method.MODEL_KINDS):
        raise UnsupportedModelError(
            f"{names[0]} ({model}) is not a causal language model.",
            hint=f"{method.NAME} trains models that predict the next token, such as Qwen2ForCausalLM or "
            "LlamaForCausalLM.",
        )
    if "classifier" in method.MODEL_KINDS:
        _check_classifier(model, config)


def _trained_by(kinds: tuple[str, ...]) -> set[str]:
    """Names of architectures. TRL trains vision-language models too."""
    from transformers.models.auto import modeling_auto

    causal = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
        *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values(),
    }
    classifiers = {*modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()}
    return causal | (classifiers if "classifier" in kinds else set())


def _check_classifier(model: str, config: Any) -> None:
    """A reward model is a causal model with another head, which transformers has for most architectures, not all."""
    from transformers.models.auto import modeling_auto

    if config.model_type not in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise UnsupportedModelError(
            f"transformers has no sequence classifier of type {config.model_type!r} ({model}): a reward model is one.",
            hint="Take a model of another architecture, such as Qwen2, Llama or Gemma 3.",
        )
