"""Online DPO: prompts are counted as its trainer samples from them, and what TRL would end with later is refused."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from autotrain_mem.checks import table, trl_arguments
from autotrain_mem.checks.flag_checks import Flags
from autotrain_mem.methods import online_dpo
from autotrain_mem.methods.interface import method_of
from autotrain_mem.support.errors import AutofitError, DatasetFormatError, ModelNotFoundError
from autotrain_mem.types.findings import refuse

pytestmark = pytest.mark.newest
Folder = Callable[[str], pathlib.Path]

TALK = [{"role": "user", "content": "What is 2 plus 2?"}]
BEGUN = [*TALK, {"role": "assistant", "content": "It is"}]


def filled(folder: pathlib.Path, **arguments: Any) -> Any:
    return method_of("online_dpo").configs({"output_dir": str(folder), "use_cpu": True, "bf16": False, **arguments})


@pytest.mark.slow
def test_prompts_are_counted_as_the_trainer_tokenizes_them(model_folder: Folder, tmp_path: pathlib.Path) -> None:
    """Text without special tokens, and conversations of which one ends in the middle of an answer."""
    folder = model_folder("llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompts in (["What is 2 plus 2?", "What?"], [TALK, BEGUN]):
        rows = Dataset.from_dict({"prompt": prompts})
        config = filled(tmp_path, max_new_tokens=2, reward_model_path=str(folder))
        made = online_dpo.build_trainer(config, str(folder), rows, None)
        _, mask, *_ = made._generate(made.model, prompts)
        counted = online_dpo.row_lengths(config, rows, tokenizer)
        assert counted.longer == mask.sum(dim=1).tolist()[: len(prompts)]


def test_rows_with_an_image_and_lengths_without_a_number_are_refused(tmp_path: pathlib.Path) -> None:
    rows = Dataset.from_dict({"prompt": ["What is this?"], "image": ["a.png"]})
    with pytest.raises(DatasetFormatError, match="Rows with images are not supported"):
        online_dpo.row_lengths(filled(tmp_path), rows, None)
    for keyword in ("auto", "p99", None):
        with pytest.raises(AutofitError, match="it limits a prompt with its completion"):
            refuse(table.FLAGS, Flags(method="online_dpo", given={"max_length": keyword}, own={}))


def test_training_needs_the_tokenizer_of_a_reward_model_that_reads_text(
    tmp_path: pathlib.Path, model_folder: Folder
) -> None:
    (tmp_path / "config.json").write_text((model_folder("qwen2") / "config.json").read_text())
    for method in ("online_dpo", "grpo"):
        name = "reward_model_path" if method == "online_dpo" else "reward_model_name_or_path"
        with pytest.raises(ModelNotFoundError, match="has no tokenizer, which it needs to read completions"):
            trl_arguments.reward_tokenizer(Flags(method=method, given={name: str(tmp_path)}, own={}))
    trl_arguments.reward_tokenizer(Flags(method="ppo", given={"reward_model_path": str(tmp_path)}, own={}))
