"""Keeps workers' answers, so that later runs need not import TRL.

An answer is valid until its key changes: the question, the files that it names, commits in the local hub cache,
environment variables and versions. Errors are not kept, and neither are answers that depend on the user's code.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from autotrain_mem.planning.output_dir import RESUME, hub_cache
from autotrain_mem.planning.run_request import RunRequest
from autotrain_mem.settings.knobs import NOT_REHEARSED
from autotrain_mem.settings.trl_parser import read_kept
from autotrain_mem.settings.words import SAME_ARGUMENT
from autotrain_mem.support import codec
from autotrain_mem.support.store import Store
from autotrain_mem.support.versions import versions_key
from autotrain_mem.types import Job, Knobs
from autotrain_mem.types.methods_table import OTHER_MODEL_ARGUMENTS
from autotrain_mem.types.planned import as_recorded
from autotrain_mem.worker.pool import Workers

Answer = TypeVar("Answer")

NOWHERE = Store(None)

MOST_FILES = 10_000
"""A folder with more files than this is not scanned, and no answer about it is kept."""
SETTLED_SECONDS = 2.0
"""A file that changed less than this ago may change again at the same timestamp, so no answer about it is kept."""
HUB_SECONDS = 3600
"""The longest time that an answer about a hub id is valid, since new commits are visible only on the hub."""

_USERS_CODE = ("reward_funcs", "trust_remote_code")
"""Arguments that run the user's own code."""
_WRITTEN = ("output_dir", "logging_dir", RESUME)
"""Arguments that name what a run writes, or the checkpoint that it continues; no answer depends on them."""
_MAY_BE_HUB_IDS = ("datasets", "chat_template_path")
_READ_BY_LIBRARIES = (
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TRL_", "ACCELERATE_", "TORCH", "PYTORCH_", "BNB_", "XFORMERS_"),
    *("FSDP_", "WANDB_", "COMET_", "MLFLOW_", "PYTHONPATH", "XDG_CACHE_HOME", "HOME"),
)
"""Prefixes of the variables on which the libraries' answers may depend."""
_WITHOUT_GPU = frozenset({"PYTORCH_NVML_BASED_CUDA_CHECK"})
"""Variables that mean nothing where no GPU is visible. DeepSpeed sets it (``deepspeed/__init__.py``)."""


def parsed(store: Store, workers: Workers, request: RunRequest) -> tuple[dict[str, Any], Knobs]:
    """Returns the TRL arguments that the user gave, and TRL's defaults. Raises UsageError if TRL refuses one."""
    key, written = _parse_key(store, request)
    kept = None if key is None else store.get("parsed", key)
    if kept is not None:
        return kept["given"] | written, codec.from_json(Knobs, kept["defaults"])
    given, defaults = workers.first.parse(
        request.method,
        request.argv,
        request.config,
        request.environment,
        request.also_known,
        {**request.autofit.pins, **request.pins},
        request.own,
    )
    key = key or _parse_key(store, request)[0]  # the worker has stored TRL's flags
    if key is not None and as_recorded(job := request.job(given)).arguments == job.arguments:  # no secret among them
        store.put("parsed", key, {"given": _read(given), "defaults": codec.to_json(defaults)})
    return given, defaults


def is_parsed(store: Store, request: RunRequest) -> bool:
    """Returns whether :func:`parsed` will need no worker."""
    key, _ = _parse_key(store, request)
    return key is not None and store.get("parsed", key) is not None


def answered(
    store: Store,
    job: Job,
    question: str,
    words: Mapping[str, Any],
    noun: type[Answer],
    ask: Callable[[], Answer],
    *,
    reads_data: bool = False,
    keeps: Callable[[Answer], bool] = lambda answer: True,
) -> Answer:
    """Returns a worker's answer about a job, kept or new; ``words`` are the question's other arguments."""
    given = _read(job.arguments)
    key, call, job = None, job.python_call, replace(job, arguments=given, unrecorded=None)
    if (call is None or call.identity) and not any(given.get(name) for name in _USERS_CODE):
        data = job.dataset or given.get("dataset_name") or job.method_facts.example_dataset
        named = [job.model, *map(given.get, OTHER_MODEL_ARGUMENTS), *map(given.get, _MAY_BE_HUB_IDS)]
        hub_ids = [*_texts([*named, data if reads_data and call is None else None])]
        placed = job if call is None else replace(job, python_call=replace(call, path=""))
        key = _key({"job": codec.to_json(placed), **words}, [*hub_ids, *_texts(given)], hub_ids)
    return kept_or_asked(store, question, key, noun, ask, keeps)


def kept_or_asked(
    store: Store,
    kind: str,
    key: Mapping[str, Any] | None,
    noun: type[Answer],
    ask: Callable[[], Answer],
    keeps: Callable[[Answer], bool] = lambda answer: True,
) -> Answer:
    """Returns the answer stored under a key, else that of ``ask``; stores it if there is a key and ``keeps`` agrees."""
    kept = None if key is None else store.get(kind, key)
    if kept is not None:
        return codec.from_json(noun, kept)
    answer = ask()
    if key is not None and keeps(answer):
        store.put(kind, key, codec.to_json(answer))
    return answer


UNSEEN = frozenset(
    (
        *("output_dir", "run_name", "report_to", "logging_steps", "logging_dir", "logging_strategy", "push_to_hub"),
        *("max_steps", "seed", "data_seed", "save_steps", "save_strategy", "save_total_limit", "eval_steps"),
        *(NOT_REHEARSED, "lr_scheduler_type", "warmup_steps", "num_train_epochs", RESUME),
    )
)
"""Arguments that no rehearsal depends on. ``weight_decay`` is not among them: it may copy gradients."""


def job_key(job: Job) -> dict[str, Any]:
    """Returns the parts of a job that a rehearsal depends on."""
    recorded = as_recorded(job)  # without secrets, which must not reach the cache's files
    seen = {name: value for name, value in recorded.arguments.items() if name not in UNSEEN}
    others = {name: value for name, value in job.environment.items() if name not in recorded.environment}
    digests = {name: hashlib.blake2b(value.encode(), digest_size=16).hexdigest() for name, value in others.items()}
    environment = {**recorded.environment, **digests}
    call = None if job.python_call is None else job.python_call.digest
    words = {"method": job.method, "model": job.model, "arguments": seen, "environment": environment}
    return words | {"python_call": call, "accelerate": job.accelerate}


def _parse_key(store: Store, request: RunRequest) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Returns the key of a parser's answer, and the given arguments of ``_WRITTEN``, which are not in it. The key has
    values instead of words, so that a resumed run has the key of the first, though its plan gives the values."""
    read = read_kept(store, request.method, request.argv, request.config, request.also_known)
    if read is None or request.names(*_USERS_CODE):
        return None, {}
    given = {SAME_ARGUMENT.get(name, name): value for name, value in read.items()}
    words = {"method": request.method, "given": _read(given), "environment": request.environment, "own": request.own}
    words |= {"pins": {**request.autofit.pins, **request.pins}}
    return _key(words, _texts(_read(given)), ()), {name: given[name] for name in _WRITTEN if name in given}


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in _WRITTEN}


def _key(words: Mapping[str, Any], texts: Iterable[str], hub_ids: Iterable[str]) -> dict[str, Any] | None:
    """Returns a key with digests of the arguments, which may hold secrets; None if a named file has no ``_state``."""
    files = {text: _state(Path(text)) for text in sorted({*texts}) if os.path.exists(text)}
    if None in files.values():
        return None
    # The commits in the local hub cache, by ref (``huggingface_hub/file_download.py: repo_folder_name``).
    hub: dict[str, list[tuple[str, str]]] = {}
    for text in (each for each in hub_ids if each not in files):
        folders = [hub_cache() / f"{kind}--{text.replace('/', '--')}" / "refs" for kind in ("models", "datasets")]
        refs = [ref for folder in folders for ref in sorted(folder.rglob("*")) if ref.is_file()]
        hub[text] = [(str(ref), ref.read_text(encoding="utf-8", errors="replace")) for ref in refs]
    read = {name for name in os.environ if name.startswith(_READ_BY_LIBRARIES)} - _WITHOUT_GPU
    return {
        "words": _digest(words),
        "files": _digest(files),
        "hub": _digest(hub),
        "hour": int(time.time()) // HUB_SECONDS if hub else None,
        "environment": _digest({name: os.environ[name] for name in read}),
        "folder": str(Path.cwd()),
        "versions": versions_key(),
    }


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _state(path: Path) -> list[Any] | None:
    """Returns sizes and times of a file, or of a folder's visible files; None if they do not identify the content."""
    files = [path] if path.is_file() else []
    for parent, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names]
        if len(files) > MOST_FILES:
            return None
    try:
        status = [(str(file), file.stat()) for file in files]
    except OSError:
        return None
    if any(each.st_mtime > time.time() - SETTLED_SECONDS for _, each in status):
        return None
    return [str(path.resolve()), sorted((name, each.st_size, each.st_mtime_ns) for name, each in status)]


def _digest(value: Any) -> str:
    text = json.dumps(codec.to_json(value), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
