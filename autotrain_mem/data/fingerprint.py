"""Computes a digest of everything that token counts depend on."""

import hashlib
import inspect
import json
import os
import pathlib
import sys
import sysconfig
import uuid
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from autotrain_mem.data import load
from autotrain_mem.data.image_sizes import IMAGE_COLUMNS, image_files
from autotrain_mem.data.token_lengths import counting_arguments, load_tokenizer
from autotrain_mem.methods.configs import Configs, trusts_remote_code
from autotrain_mem.methods.interface import method_of
from autotrain_mem.methods.reward_functions import built_in_rewards, reward_functions
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support.data_files import is_compressed
from autotrain_mem.support.versions import versions_key
from autotrain_mem.trainers.script_call import keyword_of
from autotrain_mem.types import Fingerprint, Job, Knobs

READ_WHOLE_BYTES = 64 * 2**20
"""Files up to this size are digested whole, in at most 0.1 s; larger ones by path, size, date, first and last MiB."""
_END_BYTES = 2**20

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")

_WITHOUT_EFFECT = ("packing_strategy", "eval_packing", "padding_free", "truncation_mode", "dataset_num_proc")
"""Arguments that act after the rows are counted, or only set the number of processes."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


def fingerprint(job: Job, scratch: str) -> Fingerprint:
    """Returns a digest of the data, tokenizer, chat template, formatting, reward functions and installed packages.

    Reward functions are included, since counting calls them, and ``max_length`` unless TRL only truncates rows to it.

    Raises:
        DatasetError, ModelNotFoundError: as :func:`autotrain_mem.data.token_lengths.profile`.
        UsageError: a reward function does not exist.
    """
    filled = method_of(job.method).configs(counting_arguments(job, scratch))
    template = getattr(filled.training, "chat_template_path", None)
    names = getattr(filled.script, "reward_funcs", None) or []
    handed = keyword_of(job, "processing_class")
    data, rows = _data(job, filled)
    images = []  # image files of rows: path, size and date
    for each in rows:
        found = [(os.path.abspath(file), status) for file, status in image_files(each)]
        places = [f"{path} {status.st_size} {status.st_mtime_ns}".encode() for path, status in found]
        images.append(_digest(places) if places else "")
    known = built_in_rewards() if names else {}
    own = [name for name in names if name not in known]
    files = [inspect.getsourcefile(inspect.unwrap(function)) for function in reward_functions(own)] if own else []
    parts = {
        "data": data,
        "images": images,
        "tokenizer": _model(job.model, filled, scratch) if handed is None else _written(handed, scratch),
        "chat template": None if template is None else _model(template, filled, scratch),
        "arguments": _formatting(job),
        "rewards": [*names, *(_content(pathlib.Path(file), pathlib.Path(file)) for file in files if file)],
        "formatting function": _formatting_function(job),
        "installed": versions_key(),
    }
    digest = _digest([json.dumps(parts, sort_keys=True, default=str).encode()])
    return Fingerprint(digest=digest, names_files=any(images))


def _data(job: Job, filled: Configs) -> tuple[Any, list[Any]]:
    """Returns digests of the data, by content or by the datasets library's fingerprint (datasets/builder.py:
    _get_dataset_fingerprint), and the rows that may name image files."""
    name = load.dataset_name(job)
    path = pathlib.Path(name)
    if job.python_call is not None:
        splits = load.load(job, filled)
        return [(split, rows._fingerprint) for split, rows in sorted(splits.items())], [*splits.values()]
    is_mixture = bool(filled.dataset.datasets) and job.dataset is None
    files = _files(path) if path.exists() and not is_mixture else []
    content = [_content(file, path) for file in files]
    if files and not any(map(_may_name_images, files)):
        return [name, *content], []
    splits = load.load(job, filled)
    used = [*dict.fromkeys((filled.script.dataset_train_split, filled.script.dataset_test_split))]
    rows = [splits[split] for split in used if split in splits]
    return [name, *(content or [each._fingerprint for each in rows])], rows


def _may_name_images(file: pathlib.Path) -> bool:
    """Returns whether a file mentions a column of images at its start or end; true if it is compressed."""
    if is_compressed(file):
        return True
    with open(file, "rb") as opened:
        head = opened.read(READ_WHOLE_BYTES)
        opened.seek(-min(_END_BYTES, file.stat().st_size), os.SEEK_END)
        return any(name.encode() in part for name in IMAGE_COLUMNS for part in (head, opened.read()))


def _model(name: str, filled: Configs, scratch: str) -> Any:
    """Returns what identifies a tokenizer or a template: digests of its file or folder (without weights), the commit of
    a cached hub model, or digests of the loaded tokenizer."""
    path = pathlib.Path(name)
    if path.exists():
        return [_content(file, path) for file in _files(path) if file.suffix not in WEIGHTS]
    from huggingface_hub import try_to_load_from_cache

    for file in _TOKENIZER_FILES:  # .../snapshots/COMMIT/tokenizer.json; TRL loads only revision main
        if isinstance(cached := try_to_load_from_cache(name, file), str):
            return pathlib.Path(cached).parent.name
    return _written(load_tokenizer(name, trust_remote_code=trusts_remote_code(filled)), scratch)


def _written(tokenizer: Any, scratch: str) -> Any:
    folder = pathlib.Path(scratch) / "tokenizer"
    tokenizer.save_pretrained(folder)
    return [_content(file, folder) for file in _files(folder)]


def _formatting(job: Job) -> dict[str, Any]:
    """Returns the arguments that may change a row's tokens: all of TRL's own except those known to have no effect."""
    from transformers import TrainingArguments
    from trl import ModelConfig

    elsewhere = {field.name for kind in (TrainingArguments, ModelConfig, Knobs) for field in fields(kind)}
    counts = job.method_facts.long_rows != "truncated"  # max_length decides which rows there are
    ignored = elsewhere.union(_WITHOUT_EFFECT) - ({MAX_LENGTH} if counts else set())
    given = {name: value for name, value in job.arguments.items() if name not in ignored}
    trust = {name: job.arguments.get(name) for name in ("trust_remote_code", "max_pixels")}
    return given | trust | {"method": job.method, "is_evaluated": job.is_evaluated}


def _formatting_function(job: Job) -> Any:
    """Returns digests of a script's formatting function and of the user's own modules, whose functions the datasets
    library hashes by name alone (``datasets/utils/_dill.py: Pickler``). If hashing fails, the result is random."""
    if (function := keyword_of(job, "formatting_func")) is None:
        return None
    from datasets.fingerprint import Hasher

    try:
        names = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
        paths = [pathlib.Path(name) for name in sorted(names) if os.path.isabs(name)]  # torch.ops has "_ops.py"
        own = [path for path in paths if {"site-packages", "dist-packages"}.isdisjoint(path.parts)]
        own = [path for path in own if not any(path.is_relative_to(place) for place in _INSTALLED)]
        return [Hasher.hash(function), *(_content(file, file) for file in own)]
    except Exception:  # the user's objects may raise anything when pickled; a module may lack a file
        return uuid.uuid4().hex


_INSTALLED = (sysconfig.get_paths()["stdlib"], pathlib.Path(__file__).parents[1])
"""Folders of Python's own modules and of ours."""


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the file itself, or all files below the folder except hidden ones."""
    if path.is_file():
        return [path]
    below = (pathlib.Path(parent, name) for parent, _, names in os.walk(path) for name in names)
    return sorted(file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts))


def _content(file: pathlib.Path, root: pathlib.Path) -> tuple[str, str]:
    """Returns a file's name below the root, and its digest."""
    name, status = str(file.relative_to(root)), file.stat()
    if status.st_size <= READ_WHOLE_BYTES:
        return name, _digest([file.read_bytes()])
    with open(file, "rb") as opened:
        first = opened.read(_END_BYTES)
        opened.seek(-_END_BYTES, os.SEEK_END)
        place = f"{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode()
        return name, _digest([place, first, opened.read()])


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
