"""GKD of trl.experimental: which rows are refused, what is counted of the others, and which way each step goes."""

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from datasets import Dataset
from nouns import TRL_DEFAULTS

from autotrain_mem.data.token_lengths import counting_arguments, load_tokenizer, profile
from autotrain_mem.methods import gkd
from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.interface import method_of
from autotrain_mem.methods.worst_case_text import stub_tokenizer
from autotrain_mem.support.errors import DatasetError
from autotrain_mem.types import Job

pytestmark = pytest.mark.newest

ASKED = {"role": "user", "content": "one two three four five"}
ANSWERED = {"role": "assistant", "content": "six seven"}


def job_of(model: pathlib.Path, data: str | None = None, **arguments: Any) -> Job:
    given = {"teacher_model_name_or_path": str(model), "max_length": 64, **arguments}
    return Job(method="gkd", model=str(model), dataset=data, arguments=given)


def filled(model: pathlib.Path, scratch: pathlib.Path, **arguments: Any) -> Configs:
    return method_of("gkd").configs(counting_arguments(job_of(model, **arguments), str(scratch)))


def written(folder: pathlib.Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    Dataset.from_list(list(rows)).to_json(path)
    return str(path)


def test_rows_prompts_and_answers_are_counted_as_trls_collator_makes_them(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    from trl.experimental.utils import DataCollatorForChatML

    model = model_folder("qwen2")
    longer = {"messages": [ASKED, ANSWERED, {"role": "user", "content": "eight"}, {**ANSWERED, "content": "nine"}]}
    rows = [{"messages": [ASKED, {**ANSWERED, "content": "six seven " * 9}]}, longer]
    counted = profile(job_of(model, written(tmp_path, *rows)), str(tmp_path / "scratch"))
    collate = DataCollatorForChatML(load_tokenizer(str(model)), max_length=500)
    batches = [collate([row]) for row in rows]
    lengths, prompts = ([batch[name].shape[1] for batch in batches] for name in ("input_ids", "prompts"))
    assert counted.rows_by_length == dict.fromkeys(lengths, 1)
    answers = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    assert (counted.longest_prompt, counted.longest_answer) == (max(prompts), max(answers))
    assert prompts[1] > prompts[0]
    assert counted.least_length == max(answers) + 1
    with pytest.raises(ValueError, match="no prompt tokens left"):
        DataCollatorForChatML(load_tokenizer(str(model)), max_length=max(answers))(rows)
    DataCollatorForChatML(load_tokenizer(str(model)), max_length=counted.least_length)(rows)


def test_rows_without_a_prompt_or_with_one_that_is_no_beginning_are_refused(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    alone, text = {"messages": [ASKED]}, {"messages": [ASKED, ANSWERED], "prompt": "one two"}
    for row, why in ((alone, "1 of 1 conversations have a single message"), (text, "texts in a column prompt")):
        with pytest.raises(DatasetError, match=why):
            profile(job_of(model_folder("qwen2"), written(tmp_path, row)), str(tmp_path / "scratch"))


def test_a_prompt_that_is_a_conversation_becomes_the_text_that_trls_example_makes_of_it(
    model_folder: Callable[[str], pathlib.Path],
) -> None:
    tokenizer = load_tokenizer(str(model_folder("qwen2")))
    rows = Dataset.from_list([{"messages": [ASKED, ANSWERED], "prompt": [ASKED]}])
    text = gkd._with_prompt_texts(rows, tokenizer)[0]["prompt"]
    assert tokenizer.apply_chat_template([ASKED, ANSWERED], tokenize=False).startswith(text)
    assert text.endswith(tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)[-9:])


@pytest.mark.parametrize(("length", "prompt", "kept"), [(12, None, 11), (12, 5, 5), (12, 40, 11), (2, 5, 1)])
def test_worst_rows_have_the_longest_prompt_of_the_data_and_one_token_of_an_answer_at_least(
    length: int, prompt: int | None, kept: int
) -> None:
    from trl.experimental.utils import DataCollatorForChatML

    known = Configs(script=None, training=None, model=None, dataset=None, prompt_length=prompt)
    rows = gkd.rows_editor(known)(list(gkd.worst_rows(known, length, 2)))
    batch = DataCollatorForChatML(stub_tokenizer("left"), max_length=length)(rows)
    assert batch["input_ids"].shape == (2, length)
    assert batch["prompts"].shape == (2, kept)
    is_padded = kept > 1  # nothing is left of a shorter prompt
    assert batch["attention_mask"].sum().item() == 2 * length - is_padded
    answered = gkd._labelled(lambda rows: batch, 1)(rows)["labels"] != -100
    assert answered[:, -1:].all()
    assert not answered[:, :-1].any()
    everywhere = gkd._labelled(lambda rows: batch, None)(rows)["labels"] != -100
    assert everywhere.sum().item() == 2 * (length - 1) - is_padded


def test_a_training_generates_as_often_as_chance_says(tmp_path: pathlib.Path) -> None:
    """Of 8 micro-steps that generate with a chance of 0.25, 2 do; a rehearsed step of two does once: 8 / 4 = 2."""
    for chance, micro_steps in ((1.0, 2), (0.5, 2), (0.25, 4), (0.0, 0)):
        known, knobs = filled(tmp_path, tmp_path, lmbda=chance), replace(TRL_DEFAULTS, gradient_accumulation_steps=4)
        assert gkd.micro_steps_per_generation(known, knobs) == micro_steps, chance
    known = filled(tmp_path, tmp_path, lmbda=0.5, seq_kd=True)
    assert gkd.micro_steps_per_generation(known, TRL_DEFAULTS) == 1
