"""Rejects missing models and data, and an unreachable hub, within seconds; the hub's clients take half a minute."""

import math
import os
import re
import socket
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autotrain_mem.support import errors
from autotrain_mem.support.data_files import DATA_KINDS, suffix_of
from autotrain_mem.support.files import is_ordinary, read_object

WHAT_IS_READ = (
    "Give --dataset a .json, .jsonl, .parquet or .csv file (also .gz, .bz2 or .xz), a folder, or a hub id that can be "
    "reached from here."
)
ONE_ROW = "Give --dataset a file with at least one row."
_PATHS = ("/", "./", "../", "~")
"""Prefixes of names that are not hub ids."""
_MOST_SLASHES = 1
"""A hub id is NAME or OWNER/NAME (huggingface_hub/utils/_validators.py: validate_repo_id)."""
_MORE_TEMPLATES = "additional_chat_templates/*"
"""Files that a tokenizer also reads (``transformers/utils/hub.py: list_repo_templates``)."""
_CHECK_PATH = "Check the path that --dataset gives."
_SIZES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), (1, 10**7)),
    **{"num_hidden_layers": (1, 1_000), "vocab_size": (1, 10**8)},
}
"""Size in a model's config -> its minimum, and its maximum: several times the largest of any published model."""


def saved_model(flag: str) -> str:
    """Returns the hint for a flag that names a model."""
    return f"Give {flag} a folder made by save_pretrained, or a hub id such as Qwen/Qwen2.5-0.5B."


def check_model_folder(name: str, flag: str) -> dict[str, Any] | None:
    """Reads ``config.json`` of a model's folder; None for a name that may be a hub id. Raises ModelNotFoundError if the
    path is a file, or a folder without a model, and ModelConfigError if config.json is not a model's config, or the
    folder holds a pipe or a device."""
    path = Path(name)
    if path.is_file():
        raise errors.ModelNotFoundError(
            f"{path} is a file.", hint=f"Give the folder that holds it: {flag} {path.parent}"
        )
    if is_path(name) and not path.exists():
        raise errors.ModelNotFoundError(f"No folder {name}.", hint=f"Check the path that {flag} gives.")
    if not path.is_dir():
        return None
    file = path / "config.json"
    if not file.is_file() and (path / "adapter_config.json").is_file():
        raise errors.ModelNotFoundError(
            f"{path} holds a LoRA adapter without its base model.",
            hint=f"Merge it into its base, then give {flag} the result: peft's AutoPeftModelForCausalLM (for a reward "
            "model: AutoPeftModelForSequenceClassification) has from_pretrained, merge_and_unload and save_pretrained.",
        )
    if not file.is_file():
        raise errors.ModelNotFoundError(f"{path} holds no config.json.", hint=saved_model(flag))
    check_regular(name, flag)
    try:
        config = read_object(file)
    except (OSError, ValueError) as error:  # for truncated JSON with line and column
        raise errors.ModelConfigError(
            f"{file} cannot be read: {error}.", hint="Download or save the model again."
        ) from error
    if "model_type" not in config:
        raise errors.ModelConfigError(
            f"{file} names no model_type, so it is not a model's config.", hint=saved_model(flag)
        )
    check_sizes(config, str(file))
    return config


def check_regular(name: str, flag: str) -> None:
    """Raises ModelConfigError if a file, or one in a model's folder, is a pipe or a device, which may be endless."""
    path = Path(name)
    if odd := [each for each in (path, *path.glob("*"), *path.glob(_MORE_TEMPLATES)) if not is_ordinary(each)]:
        raise errors.ModelConfigError(
            f"{odd[0]} is not a regular file.", hint=f"Download or save it again, or change {flag}."
        )


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raises ModelConfigError for a size that no model has, in a model's config or the configs that it holds."""
    for name, value in config.items():
        least, most = (0, 1) if str(name).endswith("norm_eps") else _SIZES.get(name, (-math.inf, math.inf))
        if isinstance(value, dict):
            check_sizes(value, where)
        elif isinstance(value, int | float) and not least <= value <= most:
            raise errors.ModelConfigError(
                f"{where} sets {name} to {value}: no model has that.", hint="Download or save the model again."
            )


_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "processor_config.json"),
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tekken.json")
"""Files that hold a chat template, or stand for a tokenizer with one of its own (``tokenization_utils_base.py:
PreTrainedTokenizerBase.from_pretrained``, ``processing_utils.py: ProcessorMixin.get_processor_dict``)."""


def lacks_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has no tokenizer: transformers 5 would make one with an empty vocabulary."""
    return folder.is_dir() and not any(path.name in _TOKENIZER_FILES for path in folder.iterdir())


def no_tokenizer(model: str, why: str = "") -> errors.ModelNotFoundError:
    """Returns the error for a model without a tokenizer; ``why``: why it cannot be loaded, if known."""
    return errors.ModelNotFoundError(
        f"{model} has no tokenizer that can be loaded{f': {why}' if why else ''}.",
        hint="Give a model folder with its tokenizer files, or --max_length N (for prompts: --prompt_length N) to plan "
        "for N tokens.",
    )


def lacks_template(model: str, revision: str | None) -> bool:
    """Returns whether the tokenizer in a folder, or of a cached hub id, has no chat template. False if that is unknown:
    a cached file does not mean that transformers also looked for a template on the hub, which leaves a mark."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache  # takes 0.2 s

        names = ("tokenizer_config.json", _TEMPLATES[0])
        config, template = (try_to_load_from_cache(model, name, revision=revision) for name in names)
        folder = Path(config).parent if isinstance(config, str) and template is not None else folder
    configs = [file for name in ("tokenizer", "processor") if (file := folder / f"{name}_config.json").is_file()]
    templates = [*(name for name in _TEMPLATES if (folder / name).exists()), *folder.glob(_MORE_TEMPLATES)]
    return bool(configs) and not templates and not any(b'"chat_template"' in file.read_bytes() for file in configs)


def no_template(model: str, *, takes_path: bool) -> errors.DatasetFormatError:
    """Returns the error for conversations without a chat template; ``takes_path``: whether the method has the flag."""
    flag = "--chat_template_path FILE (a .jinja file, or a model with a template), "
    return errors.DatasetFormatError(
        f"The data are conversations, and the tokenizer of {model} has no chat template.",
        hint=f"Give {flag if takes_path else ''}a chat model, or plain text.",
    )


_OF_ALL_IMAGES = {"PIL": "Pillow"}
_OF_A_FAMILY = {"smolvlm": {"num2words": "num2words"}}
"""``model_type`` -> the packages that only its processor imports, by module name
(``transformers/models/smolvlm/processing_smolvlm.py: __init__``). Without torchvision, Pillow processes images."""
VISION_EXTRA = 'Run: pip install "autotrain_mem[vision]"'


def check_image_packages(model: str, model_type: str) -> None:
    """Raises MissingExtraError if the model's processor (with its tokenizer) needs a package that is missing."""
    needed = _OF_ALL_IMAGES | _OF_A_FAMILY.get(model_type, {})
    if missing := [package for name, package in needed.items() if find_spec(name) is None]:
        raise errors.MissingExtraError(f"{model} reads images, which needs {' and '.join(missing)}.", hint=VISION_EXTRA)


def is_path(name: str) -> bool:
    """Returns whether a name cannot be a hub id."""
    return name.startswith(_PATHS) or name.count("/") > _MOST_SLASHES


def check_data_path(name: str) -> None:
    """Raises DatasetNotFoundError, EmptyDatasetError, or MalformedDatasetError for a path that cannot be data."""
    path = Path(name)
    if suffix_of(path) in DATA_KINDS and not path.is_dir():
        if not path.is_file():
            raise errors.DatasetNotFoundError(f"No file {path}.", hint=_CHECK_PATH)
        if path.stat().st_size == 0:
            raise errors.EmptyDatasetError(f"{path} is empty.", hint=ONE_ROW)
    elif odd := [each for each in path.rglob("*") if not is_ordinary(each)]:
        raise errors.MalformedDatasetError(f"{odd[0]} is not a regular file.", hint="Remove it from the folder.")
    elif path.is_file() or not is_ordinary(path):
        raise errors.MalformedDatasetError(f"The file type of {name} is not supported.", hint=WHAT_IS_READ)
    elif is_path(name) and not path.exists():
        raise errors.DatasetNotFoundError(f"No file or folder {name}.", hint=_CHECK_PATH)


_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
"""Split -> the words in files' paths that select it (``datasets/data_files.py: SPLIT_KEYWORDS``)."""


def splits_of(name: str) -> tuple[str, ...]:
    """Returns the splits that the datasets library can find in a file or a folder; () if only it can tell."""
    path = Path(name)
    if path.is_file() or (path / "state.json").is_file():
        return ("train",)
    if (path / "dataset_dict.json").is_file():
        return tuple(read_object(path / "dataset_dict.json").get("splits", ()))
    if not path.is_dir() or (path / "README.md").exists():  # it may define any splits
        return ()
    words = {word for file in path.rglob("*") for word in re.split("[-._ 0-9/]", str(file.relative_to(path)))}
    return tuple(split for split, selected in _SPLITS.items() if words & selected) or ("train",)


def no_split(name: str, use: str, split: str, splits: Iterable[str]) -> errors.DatasetFormatError:
    """Returns the error for a split that the data lack. ``use``: train or test, as in the name of its flag."""
    has, off = ", ".join(splits), ", or --eval_strategy no" if use == "test" else ""
    hint = f"Give --dataset_{use}_split one of them{off}."
    return errors.DatasetFormatError(f"{name} has no split {split!r}; it has {has}.", hint=hint)


OFFLINE_HINT = (
    "Check the spelling and the connection. Offline, give a folder with config.json (only training needs weights)."
)
_PORTS = {"http": 80, "https": 443}
_SECONDS = 2.0
"""Seconds that a trial connection to the hub may take; if it takes longer, the hub's own clients try."""


def unreachable() -> str:
    """Explains why the hub does not answer, as the end of a sentence."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids access to the hub"
    return f"the hub ({constants.ENDPOINT}) cannot be reached"


def why_not_asked() -> str:
    """Returns why the hub cannot answer; empty if it may answer."""
    from urllib.request import getproxies  # takes 16 ms

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return unreachable()
    if getproxies():  # only the proxy can reach the hub
        return ""
    parts = urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or _PORTS[parts.scheme]), _SECONDS):
            return ""
    except (TimeoutError, KeyError):
        return ""
    except OSError:  # no such host, no network, nobody listens
        return unreachable()


def no_model(model: str, why: str, hint: str) -> errors.ModelNotFoundError:
    """Returns the error for a name without a folder; ``why`` says why the hub does not provide it either."""
    return errors.ModelNotFoundError(f"No model {model!r}: there is no such folder, and {why}.", hint=hint)


def no_id(model: str) -> errors.ModelNotFoundError:
    """Returns the error for a name that is not a valid hub id."""
    return no_model(model, "it is not a hub id", "Give a folder, or a hub id such as Qwen/Qwen2.5-0.5B.")


def check_cached(model: str, revision: str | None) -> None:
    """Raises ModelNotFoundError for an invalid hub id, or an uncached one if the hub cannot be reached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_kept = try_to_load_from_cache(model, "config.json", revision=revision) is not None
    except HFValidationError as error:
        raise no_id(model) from error
    if not is_kept and (why := why_not_asked()):
        raise no_model(model, why, OFFLINE_HINT)


def check_kept_rows(name: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raises DatasetNotFoundError for an uncached dataset of the hub, if the hub cannot be reached.

    The cache's folder is ``OWNER___NAME`` (``datasets/load.py: CachedDatasetModuleFactory``); the comparison ignores
    case and underscores.
    """
    if is_path(name) or Path(name).exists():
        return
    home = Path(environment.get("HF_HOME", Path(environment.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")))
    kept = Path(environment.get("HF_DATASETS_CACHE", home / "datasets")).expanduser()  # as datasets/config.py does
    if kept.is_dir() and any(_plain(folder.name) == _plain(name) for folder in kept.iterdir()):
        return
    if why := why_not_asked():
        raise errors.DatasetNotFoundError(
            f"No dataset {name!r}: there is no such file or folder, it is not cached in {kept}, and {why}.",
            hint=WHAT_IS_READ,
        )


def _plain(name: str) -> str:
    return name.replace("/", "").replace("_", "").lower()
