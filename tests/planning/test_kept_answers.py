"""What a worker answered is kept as long as nothing that it depends on has changed, and no longer."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.planning import for_processes, kept_answers
from autotrain_mem.planning.kept_answers import answered, is_parsed, parsed
from autotrain_mem.run import early
from autotrain_mem.settings.trl_parser import TrlFlag, TrlFlags, keep_flags
from autotrain_mem.support.errors import ModelNotFoundError, UnknownGpuError, UsageError
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.types import Job
from autotrain_mem.types.autofit import AutoFit
from autotrain_mem.worker import pool

LONG_AGO = 1_700_000_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def write(file: Path, text: str) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    os.utime(file, (LONG_AGO, LONG_AGO + len(text)))
    return str(file)


WISH = api.RunRequest(method="sft", model="org/tiny", argv=("--learning_rate", "1e-4"))


@pytest.mark.parametrize(
    ("given", "other", "asked"),
    [
        ({}, WISH, 1),
        ({}, replace(WISH, argv=("--learning_rate", "2e-4")), 2),
        ({}, replace(WISH, config={"lora_r": 8}), 2),
        ({}, replace(WISH, autofit=AutoFit(gpu="l4")), 2),
        ({}, replace(WISH, environment={"HF_HOME": "elsewhere"}), 2),
        ({"hub_token": "hf_secret"}, WISH, 2),
    ],
)
def test_the_same_words_are_parsed_once_and_a_token_is_never_kept(
    given: dict[str, Any], other: api.RunRequest, asked: int, store: Store, tmp_path: Path
) -> None:
    workers = Mock()
    workers.first.parse.return_value = given, TRL_DEFAULTS
    assert not is_parsed(store, WISH)
    assert parsed(store, workers, WISH) == parsed(store, workers, other) == (given, TRL_DEFAULTS)
    assert workers.first.parse.call_count == asked
    assert not [file for file in (tmp_path / "cache").glob("*") if b"hf_secret" in file.read_bytes()]


def test_what_runs_the_users_code_or_reads_a_run_is_asked_each_time(store: Store) -> None:
    workers = Mock()
    workers.first.parse.return_value = {}, TRL_DEFAULTS
    for name in ("reward_funcs", "trust_remote_code", "resume_from_checkpoint"):
        request = replace(WISH, config={name: "true"})
        parsed(store, workers, request)
        assert not is_parsed(store, request), name
        assert asked_twice(store, Job(method="grpo", model="m", dataset=None, arguments={name: "true"})) == 2, name


def asked_twice(store: Store, job: Job, between: Callable[[], object] = lambda: None) -> int:
    ask = Mock(return_value="answer")
    for _ in range(2):
        assert answered(store, job, "data", {}, str, ask, reads_data=True) == "answer"
        between()
    return ask.call_count


def test_an_answer_counts_as_long_as_no_file_changes_and_no_new_commit_is_there(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    data, model = tmp_path / "rows.jsonl", tmp_path / "model"
    local = Job(method="sft", model=str(model), dataset=write(data, "a"))
    write(model / "config.json", "{}")
    assert asked_twice(store, local) == 1
    assert asked_twice(store, replace(local, fit="lossless")) == 1
    write(data, "ab")
    assert asked_twice(store, local, lambda: write(data, "abc")) == 2
    data.touch()  # it may be written again within the resolution of its date
    assert asked_twice(store, local) == 2
    hub = Job(method="sft", model="org/tiny", dataset=write(data, "a"))
    ref = tmp_path / "hub" / "models--org--tiny" / "refs"
    ref.mkdir(parents=True)
    assert asked_twice(store, hub, lambda: write(ref / "main", "commit")) == 2
    assert asked_twice(store, hub) == 0


def test_an_answer_about_a_hub_id_counts_for_an_hour(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Job(method="sft", model="org/tiny", dataset="org/data")
    now = [2.0e9]
    monkeypatch.setattr(kept_answers.time, "time", lambda: now[0])
    assert asked_twice(store, hub) == 1
    now[0] += kept_answers.HUB_SECONDS
    assert asked_twice(store, hub) == 1


FLAGS = (
    TrlFlag(names=("--learning_rate", "--learning-rate"), dest="learning_rate", nargs=None, kind="float", choices=None),
    TrlFlag(names=("--packing_strategy",), dest="packing_strategy", nargs=None, kind="str", choices=("bfd", "wrapped")),
    TrlFlag(names=("--bf16",), dest="bf16", nargs=None, kind="string_to_bool", choices=None),
    TrlFlag(names=("--warmup_steps",), dest="warmup_steps", nargs=None, kind="float", choices=None),
    TrlFlag(names=("--no_bf16",), dest="bf16", nargs=0, kind="", choices=None),
)
BETA = TrlFlag(names=("--beta",), dest="beta", nargs=None, kind="float", choices=None)


def test_a_typo_is_told_by_the_flags_that_were_kept_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path))
    tables = {"sft": TrlFlags(flags=FLAGS, help=""), "dpo": TrlFlags(flags=(*FLAGS, BETA), help="")}
    early.refuse_flags(replace(WISH, argv=("--learnig_rate", "1")))  # nothing was kept: a worker reads them
    keep_flags(Store(cache_folder()), tables)
    for argv, config, message in (
        (("--learnig_rate", "1"), {}, "did you mean --learning_rate"),
        (("--learning_rate", "abc"), {}, "invalid float value: 'abc'"),
        (("--packing_strategy", "bfdd"), {}, "Did you mean bfd"),
        (("--beta", "0.1"), {}, "a flag of dpo"),
        ((), {"learning_ratt": 1}, "did you mean learning_rate"),
        ((), {"learning_rate": "abc"}, "invalid float value: 'abc'"),
        (("--bf16", "perhaps", "--learning_rate=1"), {}, ""),
        (("--bf16",), {"warmup_ratio": 0.03}, ""),
        (("--warmup_ratio", "3"), {}, "3 is not a share; --warmup_steps 3 counts steps"),
        (("--warmup_ratio=0.1",), {"warmup_steps": 5}, ""),
        (("--warmup_ratio=0.1", "--warmup_steps=5"), {}, "Remove --warmup_ratio."),
        (("--no_bf16",), {"learning_rate": 1e-4}, ""),
    ):
        request = replace(WISH, argv=argv, config=config)
        with pytest.raises(UsageError) if message else nullcontext() as caught:
            early.refuse_flags(request)
        assert caught is None or message in f"{caught.value.message} {caught.value.hint}", (argv, config)


def test_what_needs_no_trl_is_refused_before_a_worker_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(count: int | None) -> None:
        raise AssertionError("a worker")

    monkeypatch.setattr(pool, "Workers", made)
    monkeypatch.setattr(for_processes, "find_spec", lambda name: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for autofit, model, refused, said in (
        (AutoFit(gpu="rtx309"), "tiny", UnknownGpuError, "rtx309"),
        (AutoFit(gpu="a100-80gb", gpus=4, sp_size=3), "tiny", UsageError, "does not divide 4 GPUs"),
        (AutoFit(gpu="a100-80gb", gpus=2, sharding="zero2"), "tiny", UsageError, "which is not installed"),
        (AutoFit(gpu="a100-80gb"), "somebody/no-such-model", ModelNotFoundError, "HF_HUB_OFFLINE forbids"),
    ):
        request = replace(WISH, autofit=autofit, model=model)
        with pytest.raises(refused, match=said), early.opened(request, to_train=False):
            pass
        with pytest.raises(AssertionError, match="a worker"), early.opened(request, to_train=False, is_late=True):
            pass
