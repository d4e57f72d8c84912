"""Drop-in trainers in this process, planned by workers that all of these tests share."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from autotrain_mem import AutoFit
from autotrain_mem.cli import tiny_model, word_problems
from autotrain_mem.drop_in import call_plan as planning
from autotrain_mem.worker.pool import Workers
from tests.forked import Forge
from tests.tiny import tiny_config

QUIET = AutoFit(gpu="80MiB", show=False, fit="lossless", forbid=["activation_offloading", "optimizer_offload"])
"""Leaves a search little to choose, for tests of something else."""
SETTLED = {"per_device_train_batch_size": 4, "gradient_checkpointing": False, "optim": "adamw_torch"}


@pytest.fixture(scope="session")
def workers(forge: Forge, request: pytest.FixtureRequest) -> Iterator[Workers]:
    """One that imports what it needs, where it is alone to do so."""
    alone = request.config.option.markexpr == "newest"
    with contextlib.nullcontext() if alone else forge.children():
        started = Workers(1)
        started.start()
    with started:
        yield started


@pytest.fixture(autouse=True)
def _shared_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting two for each test would take longer than all else in it; where nothing is planned, none is started."""
    monkeypatch.setattr(planning, "Workers", lambda: contextlib.nullcontext(request.getfixturevalue("workers")))


@pytest.fixture(scope="session")
def tiny_reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A judge of one score, with the tokenizer of the model that it judges."""
    folder = tmp_path_factory.mktemp("models") / "judge"
    tiny_model.train_tokenizer(word_problems.texts(word_problems.problems(100, seed=0))).save_pretrained(folder)
    config = tiny_config("qwen2")
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def config(kind: Any, folder: Path, **more: Any) -> Any:
    """One of TRL's, for a step on the CPU."""
    return kind(str(folder / "out"), use_cpu=True, **{"report_to": "none", "max_steps": 1} | more)


def texts(count: int = 24) -> Any:
    return Dataset.from_dict(
        {"text": [f"row {index} " + "of some more words " * (2 + index % 20) for index in range(count)]}
    )


def pairs(count: int = 24) -> Any:
    rows = [
        ("what is it ? ", "it is this " * (1 + index % 9), "it is that " * (1 + index % 5)) for index in range(count)
    ]
    prompts, chosen, rejected = zip(*rows, strict=True)
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


def prompts(count: int = 24) -> Any:
    return Dataset.from_dict({"prompt": ["count to " + "ten " * (1 + index % 7) for index in range(count)]})


def shortness(completions: list[Any], **_: Any) -> list[float]:
    return [-float(len(each)) for each in completions]


def ppo_models(policy: Path, judge: Path) -> dict[str, Any]:
    kinds = {"model": AutoModelForCausalLM, "ref_model": AutoModelForCausalLM}
    judges = {"reward_model": AutoModelForSequenceClassification, "value_model": AutoModelForSequenceClassification}
    policies = {name: kind.from_pretrained(policy, dtype="float32") for name, kind in kinds.items()}
    return policies | {name: kind.from_pretrained(judge, dtype="float32") for name, kind in judges.items()}
