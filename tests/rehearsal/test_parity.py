"""A rehearsal against the same training for real: the same allocations, in the same order, with the same bytes."""

from __future__ import annotations

import itertools
import pathlib
from dataclasses import replace
from typing import Any

import pytest
from nouns import TRL_DEFAULTS
from tiny import FAMILIES, tiny_folder

from autotrain_mem.rehearsal.materialize import load_config
from autotrain_mem.rehearsal.methods import sft
from autotrain_mem.rehearsal.stage import Watch
from autotrain_mem.spec import Job, Knobs, Trace

LENGTH = 48

VARIANTS = {
    "full": {},
    "lora": {"use_peft": True},
    "lora-dropout-all-linear": {"use_peft": True, "lora_dropout": 0.1, "lora_target_modules": "all-linear"},
}


def knobs(**changes: Any) -> Knobs:
    small = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": LENGTH}
    return replace(TRL_DEFAULTS, **(small | changes))


def train_for_real(job: Job, chosen: Knobs, length: int, output_dir: str) -> Trace:
    """What ``sft.rehearse`` does, with real weights and real tensors."""
    import torch

    filled = sft.configs(sft.rehearsal_arguments(job, chosen, output_dir))
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, chosen.dtype))
    trainer = sft.build_trainer(filled, model, sft.worst_rows(chosen, length), processing_class=sft.stub_tokenizer())
    watch = Watch(edit_rows=list if chosen.packing else sft.pad_last_row)
    watch.train(trainer)
    return watch.recorder.trace()


def births(trace: Trace) -> list[tuple[str, str, int]]:
    return [(phase.value, block.owner.value, block.size_bytes) for phase, sign, block in trace.walk() if sign > 0]


def first_difference(rehearsed: Trace, real: Trace) -> str:
    """Empty when the two are alike; else the first place where they part, with the module."""
    pairs = itertools.zip_longest(_named(rehearsed), _named(real), fillvalue=("", "", 0, "nothing more"))
    for index, (fake, true) in enumerate(pairs):
        if fake[:3] != true[:3]:
            return f"birth {index}: rehearsed {fake}, real {true}"
    return ""


def _named(trace: Trace) -> list[tuple[str, str, int, str]]:
    return [(p.value, b.owner.value, b.size_bytes, b.module) for p, sign, b in trace.walk() if sign > 0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny_folder(root / family, family) for family in FAMILIES}


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "no-checkpointing"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rehearsal_allocates_what_the_real_run_allocates(
    family: str, variant: str, checkpointing: bool, folders: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    arguments = {"bf16": True, **VARIANTS[variant]}
    job = Job(method="sft", model=str(folders[family]), dataset=None, arguments=arguments)
    chosen = knobs(use_peft=variant != "full", gradient_checkpointing=checkpointing)
    rehearsed = sft.rehearse(job, chosen, load_config(job.model), LENGTH, str(tmp_path / "fake"))
    real = train_for_real(job, chosen, LENGTH, str(tmp_path / "real"))
    assert not first_difference(rehearsed, real)
    assert births(rehearsed) == births(real)


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_a_packed_rehearsal_allocates_what_the_real_run_allocates(
    strategy: str, folders: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    arguments = {"bf16": True, "packing_strategy": strategy}
    job = Job(method="sft", model=str(folders["qwen2"]), dataset=None, arguments=arguments)
    chosen = knobs(use_peft=False, gradient_checkpointing=True, packing=True)
    rehearsed = sft.rehearse(job, chosen, load_config(job.model), LENGTH, str(tmp_path / "fake"))
    real = train_for_real(job, chosen, LENGTH, str(tmp_path / "real"))
    assert not first_difference(rehearsed, real)


def test_a_bfd_packed_rehearsal_pays_for_the_mask_between_documents(
    folders: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    job = Job(method="sft", model=str(folders["qwen2"]), dataset=None, arguments={"packing_strategy": "bfd"})
    chosen = knobs(use_peft=False, gradient_checkpointing=True, packing=True)
    trace = sft.rehearse(job, chosen, load_config(job.model), LENGTH, str(tmp_path))
    tokens = LENGTH * chosen.per_device_train_batch_size  # bfd flattens the micro-batch into one row
    assert tokens**2 in [block.size_bytes for block in trace.blocks], "no boolean mask of tokens x tokens"
