"""ORPO and CPO of trl.experimental: rows that TRL does not cut to max_length are refused, and all others counted."""

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from nouns import TRL_DEFAULTS

from autotrain_mem.data.token_lengths import counting_arguments, load_tokenizer, profile
from autotrain_mem.methods.interface import method_of
from autotrain_mem.methods.row_lengths import prepared_lengths, smallest_model
from autotrain_mem.methods.worst_case_text import stub_tokenizer
from autotrain_mem.search.space import make_space
from autotrain_mem.settings.levers import LADDER
from autotrain_mem.support.errors import ContextLengthError, DatasetError
from autotrain_mem.types import Job
from autotrain_mem.types.methods_table import METHODS
from autotrain_mem.types.model import ModelFacts

pytestmark = pytest.mark.newest

EXPERIMENTAL = [name for name, row in METHODS.items() if row.long_rows == "kept"]
LONG_PROMPT = {"prompt": "one two three four " * 6, "chosen": "five", "rejected": "six six"}
SHORT = {"prompt": "one", "chosen": "two three", "rejected": "four"}


def written(folder: pathlib.Path, *rows: dict[str, str]) -> str:
    path = folder / "pairs.jsonl"
    Dataset.from_list(list(rows)).to_json(path)
    return str(path)


def job_of(method: str, model: pathlib.Path, data: str | None = None, **arguments: Any) -> Job:
    return Job(method=method, model=str(model), dataset=data, arguments=arguments)


def trained_on(job: Job, rows: Any, scratch: pathlib.Path, max_length: int) -> Any:
    """What TRL's trainer makes of rows."""
    from importlib import import_module

    facts = job.method_facts
    filled = method_of(job.method).configs(counting_arguments(job, str(scratch)) | {"max_length": max_length})
    tokenizer = load_tokenizer(job.model) if scratch.name else stub_tokenizer()
    trainer = getattr(import_module(facts.module), facts.trainer)
    return trainer(smallest_model(), filled.training, train_dataset=rows, processing_class=tokenizer).train_dataset


@pytest.mark.parametrize("method", EXPERIMENTAL)
def test_rows_that_stay_longer_than_max_length_are_refused_and_auto_counts_them_whole(
    method: str, model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    model, data = model_folder("qwen2"), written(tmp_path, LONG_PROMPT, SHORT)
    whole = profile(job_of(method, model, data), str(tmp_path)).longest
    rows = Dataset.from_list([LONG_PROMPT, SHORT])
    made = trained_on(job_of(method, model), rows, tmp_path, sys.maxsize)
    assert whole == max(prepared_lengths(made) or ())
    assert profile(job_of(method, model, data, max_length=whole), str(tmp_path)).longest == whole
    cut = max(prepared_lengths(trained_on(job_of(method, model), rows, tmp_path, 12)) or ())
    assert cut > 12, "TRL cuts no prompt"
    with pytest.raises(DatasetError, match=f"1 rows stay longer than --max_length 12, the longest {cut} tokens"):
        profile(job_of(method, model, data, max_length=12), str(tmp_path))


@pytest.mark.parametrize("method", EXPERIMENTAL)
@pytest.mark.parametrize("length", [3, 40])
def test_worst_rows_have_exactly_the_length_asked_for_on_both_sides(
    method: str, length: int, tmp_path: pathlib.Path
) -> None:
    job = job_of(method, tmp_path)
    filled = method_of(method).configs(counting_arguments(job, str(tmp_path)) | {"max_length": length})
    rows = method_of(method).worst_rows(filled, length, 2)
    made = trained_on(job, rows, pathlib.Path(), length)
    for side in ("chosen", "rejected"):
        assert [len(ids) for ids in made[f"{side}_input_ids"]] == [length, length]
    *_, last = method_of(method).rows_editor(filled)(list(made))
    assert (len(last["chosen_input_ids"]), len(last["rejected_input_ids"])) == (length, length - 1)


def test_no_plan_makes_rows_shorter_nor_goes_beyond_the_models_context(tmp_path: pathlib.Path) -> None:
    facts = ModelFacts(context_length=64, is_quantized=False)
    for method in EXPERIMENTAL:
        assert not [row.name for row in LADDER if row.suits(METHODS[method]) and "max_length" in row.knobs]
        with pytest.raises(ContextLengthError, match="a long prompt stays"):
            make_space(TRL_DEFAULTS, job_of(method, tmp_path), facts, longest=65)
