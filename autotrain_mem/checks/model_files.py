"""Reads and checks a model's config, and reads the size of its weights."""

import hashlib
import json
import pathlib
from dataclasses import dataclass
from typing import Any

from autotrain_mem.methods.configs import is_in_mxfp4
from autotrain_mem.methods.parameter_count import parameters
from autotrain_mem.support.errors import ModelConfigError, UnsupportedModelError, UsageError
from autotrain_mem.support.sources import check_model_folder, check_sizes, saved_model
from autotrain_mem.trainers.pretrained import load_config
from autotrain_mem.trainers.script_call import model_of
from autotrain_mem.types import Capability, Download, Job, methods_table


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOnCard:
    """Holds a job, its model's config, and the card's compute capability."""

    job: Job
    config: Any
    compute_capability: Capability


def read_config(job: Job) -> Any:
    """Returns the config of a model that the job's method can train.

    Raises:
        ModelNotFoundError: there is no config.json, or the hub cannot be reached.
        ModelConfigError: config.json is not JSON, or transformers refuses it.
        UnsupportedModelError: the installed transformers has no causal language model of this architecture.
    """
    if (model := model_of(job)) is not None:
        return model.config
    revision = job.arguments.get("model_revision")
    config = _load(job, job.model, "--model", **({"revision": revision} if revision else {}))
    _check_architecture(job.model, job.method_facts, config)
    return config


def reward_model(subject: ModelOnCard) -> None:
    """Refuses a reward model whose architecture has no sequence classifier in the installed transformers."""
    job = subject.job
    for name in methods_table.REWARD_MODEL_ARGUMENTS:
        if (model := job.arguments.get(name)) is not None:
            _check_classifier(model, _load(job, model, f"--{name}"))


def teacher_model(subject: ModelOnCard) -> None:
    """Refuses a teacher with another vocabulary (``trl/trainer/distillation_trainer.py: __init__``)."""
    job = subject.job
    for name in methods_table.TEACHER_ARGUMENTS:
        if (model := job.arguments.get(name)) is None:
            continue
        config = _load(job, model, f"--{name}")
        _check_architecture(model, job.method_facts, config)
        sizes = [each.get_text_config().vocab_size for each in (subject.config, config)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                f"{job.model} and the teacher {model} have different vocabularies: {sizes[0]:,} and {sizes[1]:,} "
                "tokens.",
                hint=f"Give --{name} a model of the same family, with the same vocab_size.",
            )


def config_digest(job: Job, config: Any) -> str:
    """Returns a digest of the configs of the job's models, which is the same for equal models."""
    trust = bool(job.arguments.get("trust_remote_code", False))
    others = [job.arguments[name] for name in methods_table.OTHER_MODEL_ARGUMENTS if job.arguments.get(name)]
    configs = [config, *(load_config(other, trust_remote_code=trust) for other in others)]
    digest = hashlib.blake2b(digest_size=16)
    for each in configs:
        content = json.loads(each.to_json_string(use_diff=False))
        for name in ("_name_or_path", "transformers_version"):  # describe the file, not the model
            content.pop(name, None)
        digest.update(json.dumps(content, sort_keys=True).encode())
    return digest.hexdigest()


def _load(job: Job, model: str, flag: str, **options: Any) -> Any:
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    written = check_model_folder(model, flag)
    if written and written["model_type"] not in transformers.CONFIG_MAPPING and "auto_map" not in written:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} has no model_type {written['model_type']!r} "
            f"({pathlib.Path(model)}).",
            hint="Update transformers, or use another model.",
        )
    try:
        trust = bool(job.arguments.get("trust_remote_code"))
        config = load_config(model, trust_remote_code=trust, **options)
    except StrictDataclassError as error:
        reasons = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = f"transformers refuses {model}/config.json: {' '.join(reasons)}"
        raise ModelConfigError(message, hint=saved_model(flag)) from error
    check_sizes(config.to_dict(), f"The config of {model}")
    return config


def _check_architecture(model: str, method: methods_table.MethodFacts, config: Any) -> None:
    """Refuses a model that TRL's ``create_model_from_path`` cannot build, or builds as another kind of model."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = config.architectures or []
    if not names:
        raise UnsupportedModelError(
            f"The config of {model} names no architecture, which TRL needs to build the model.",
            hint='Add it to config.json, for example "architectures": ["Qwen2ForCausalLM"].',
        )
    if getattr(config, "auto_map", None):
        return  # the model brings its own code
    if not hasattr(transformers, names[0]):
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} has no architecture {names[0]}, which the config of {model} "
            "names.",
            hint="Update transformers, or correct the architectures in config.json.",
        )
    causal = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),  # TRL trains vision-language models too
        *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values(),
    }
    classifiers = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    if names[0] not in causal | ({*classifiers} if method.has_score_head else set()):
        raise UnsupportedModelError(
            f"{names[0]} ({model}) is not a causal language model.",
            hint=f"{method.title} trains models that predict the next token, such as Qwen2ForCausalLM or "
            "LlamaForCausalLM.",
        )
    if method.has_score_head:
        _check_classifier(model, config)


def _check_classifier(model: str, config: Any) -> None:
    from transformers.models.auto import modeling_auto

    if config.model_type not in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise UnsupportedModelError(
            f"A reward model is a sequence classifier, and transformers has none of type {config.model_type!r} "
            f"({model}).",
            hint="Use a model of another architecture, such as Qwen2, Llama or Gemma 3.",
        )


def model_without_weights(job: Job) -> Any:
    """Builds the model as TRL does: the class that the config names, or a classifier with one score."""
    from transformers import AutoModelForSequenceClassification, Mxfp4Config
    from trl.trainer.utils import create_model_from_path

    from autotrain_mem.trainers.weightless import without_weights

    trust = bool(job.arguments.get("trust_remote_code"))
    options: dict[str, Any] = {"trust_remote_code": trust}
    if job.method_facts.has_score_head:
        options |= {"architecture": AutoModelForSequenceClassification, "num_labels": 1}
    if is_in_mxfp4(load_config(job.model, trust_remote_code=trust)):
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    with without_weights():
        return create_model_from_path(job.model, **options)


WEIGHTS = "model.safetensors"
FORMATS = (".safetensors", ".bin")
"""Suffixes of weight files; transformers downloads the second only if there are none of the first
(``transformers/modeling_utils.py: _get_resolved_checkpoint_files``)."""
HUB_SECONDS = 3.0
"""Seconds to wait for the hub: a missing size is better than a late plan."""


def parameters_on_disk(model: str, config: Any, revision: str | None = None) -> int | None:
    """Counts a model's parameters from the size of its weight files and the config's dtype; None if unknown."""
    if getattr(config, "quantization_config", None) is not None:
        return None
    files = pathlib.Path(model).glob("*.safetensors") if pathlib.Path(model).is_dir() else None
    size_bytes = _cached_bytes(model, revision) if files is None else sum(file.stat().st_size for file in files)
    return size_bytes // item_bytes(config) if size_bytes else None


def item_bytes(config: Any) -> int:
    """Returns the bytes per saved weight, from the config's dtype."""
    return int(getattr(getattr(config, "dtype", None), "itemsize", 4))


def download(model: str, config: Any, revision: str | None = None) -> Download | None:
    """Returns the weights that training downloads from the hub, and their folder; None if they are on disk.

    If the hub does not answer in time, the size follows from the config, for the types that ``parameters`` knows.
    """
    from huggingface_hub import constants

    if pathlib.Path(model).is_dir() or _cached_bytes(model, revision):
        return None
    size_bytes = _bytes_on_hub(model, revision) or (parameters(config.to_dict()) or 0) * item_bytes(config)
    return Download(size_bytes=size_bytes, folder=constants.HF_HUB_CACHE) if size_bytes else None


def _cached_bytes(model: str, revision: str | None) -> int:
    """Returns the bytes of a hub model's cached weights; 0 if they are incomplete, or the name is not a hub id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        index = try_to_load_from_cache(model, "model.safetensors.index.json", revision=revision)
        weights = try_to_load_from_cache(model, WEIGHTS, revision=revision)
    except HFValidationError:
        return 0
    if isinstance(index, str):
        written = json.loads(pathlib.Path(index).read_text(encoding="utf-8"))
        shards = {*written.get("weight_map", {}).values()}
        has_all = all(isinstance(try_to_load_from_cache(model, shard, revision=revision), str) for shard in shards)
        return int(written.get("metadata", {}).get("total_size", 0)) if has_all else 0
    return pathlib.Path(weights).stat().st_size if isinstance(weights, str) else 0


def _bytes_on_hub(model: str, revision: str | None) -> int | None:
    """Returns the bytes of the weight files; None if the hub does not answer, or has none."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        files = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=HUB_SECONDS).siblings or []
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, TimeoutError):
        return None
    for suffix in FORMATS:
        # Subfolders hold other formats of the same weights, such as the publisher's own.
        sizes = [file.size or 0 for file in files if file.rfilename.endswith(suffix) and "/" not in file.rfilename]
        if sizes:
            return sum(sizes)
    return None
