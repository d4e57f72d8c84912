"""Methods of trl.experimental: what is refused, which rows are counted, and how long the worst of them are."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from nouns import TRL_DEFAULTS
from transformers import AutoTokenizer
from trl.experimental.utils import DataCollatorForChatML
from trl.trainer.utils import RepeatSampler

from autotrain_mem.checks import table
from autotrain_mem.checks.flag_checks import Flags
from autotrain_mem.data.token_lengths import counting_arguments, load_tokenizer, profile
from autotrain_mem.methods import gkd, online_dpo
from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.interface import method_of
from autotrain_mem.methods.row_lengths import prepared_lengths, smallest_model
from autotrain_mem.methods.worst_case_text import stub_tokenizer
from autotrain_mem.search.space import make_space
from autotrain_mem.settings.levers import LADDER
from autotrain_mem.support import errors
from autotrain_mem.types import METHODS, Job, ModelFacts
from autotrain_mem.types.findings import refuse

pytestmark = pytest.mark.newest

Folder = Callable[[str], Path]

ASKED = {"role": "user", "content": "one two three four five"}
ANSWERED = {"role": "assistant", "content": "six seven"}


def job_of(method: str, model: Path, data: str | None = None, **arguments: Any) -> Job:
    return Job(method=method, model=str(model), dataset=data, arguments=arguments)


def gkd_job(model: Path, data: str | None = None, **arguments: Any) -> Job:
    return job_of("gkd", model, data, **{"teacher_model_name_or_path": str(model), "max_length": 64, **arguments})


def written(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    Dataset.from_list(list(rows)).to_json(path)
    return str(path)


def test_rows_prompts_and_answers_are_counted_as_trls_collator_makes_them(qwen: Path, tmp_path: Path) -> None:
    model = qwen
    longer = {"messages": [ASKED, ANSWERED, {"role": "user", "content": "eight"}, {**ANSWERED, "content": "nine"}]}
    rows = [{"messages": [ASKED, {**ANSWERED, "content": "six seven " * 9}]}, longer]
    counted = profile(gkd_job(model, written(tmp_path, *rows)), str(tmp_path / "scratch"))
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


def test_rows_without_a_prompt_that_is_their_beginning_are_refused(qwen: Path, tmp_path: Path) -> None:
    alone, text = {"messages": [ASKED]}, {"messages": [ASKED, ANSWERED], "prompt": "one two"}
    for row, why in ((alone, "1 of 1 conversations have a single message"), (text, "a column prompt with texts")):
        with pytest.raises(errors.DatasetError, match=why):
            profile(gkd_job(qwen, written(tmp_path, row)), str(tmp_path / "scratch"))


def test_a_prompt_that_is_a_conversation_becomes_the_text_that_trls_example_makes_of_it(qwen: Path) -> None:
    tokenizer = load_tokenizer(str(qwen))
    rows = Dataset.from_list([{"messages": [ASKED, ANSWERED], "prompt": [ASKED]}])
    text = gkd._with_prompt_texts(rows, tokenizer)[0]["prompt"]
    assert tokenizer.apply_chat_template([ASKED, ANSWERED], tokenize=False).startswith(text)
    assert text.endswith(tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)[-9:])


@pytest.mark.parametrize(("length", "prompt", "kept"), [(12, None, 11), (12, 5, 5), (12, 40, 11), (2, 5, 1)])
def test_worst_rows_have_the_longest_prompt_of_the_data_and_one_token_of_an_answer_at_least(
    length: int, prompt: int | None, kept: int
) -> None:
    known = Configs(script=None, training=None, model=None, dataset=None, prompt_length=prompt)
    rows = gkd.rows_editor(known)(list(gkd.worst_rows(known, length, 2)))
    batch = DataCollatorForChatML(stub_tokenizer("left"), max_length=length)(rows)
    assert (batch["input_ids"].shape, batch["prompts"].shape) == ((2, length), (2, kept))
    is_padded = kept > 1  # nothing is left of a shorter prompt
    assert batch["attention_mask"].sum().item() == 2 * length - is_padded
    answered = gkd._labelled(lambda rows: batch, 1)(rows)["labels"] != -100
    assert answered[:, -1:].all()
    assert not answered[:, :-1].any()
    everywhere = gkd._labelled(lambda rows: batch, None)(rows)["labels"] != -100
    assert everywhere.sum().item() == 2 * (length - 1) - is_padded


def gkd_configs(folder: Path, **arguments: Any) -> Configs:
    return method_of("gkd").configs(counting_arguments(gkd_job(folder, **arguments), str(folder)))


@pytest.mark.parametrize(("rows", "each", "iterations"), [(4000, 4, 1), (4001, 4, 1), (103, 2, 3), (3, 8, 1)])
def test_steps_are_those_of_trls_sampler(rows: int, each: int, iterations: int) -> None:
    knobs = replace(TRL_DEFAULTS, gradient_accumulation_steps=4, num_generations=4)  # 8 rows at once
    prompts = 8 * each // 4
    sampler = RepeatSampler(range(rows), mini_repeat_count=4, batch_size=prompts, repeat_count=iterations * each)
    batches = len(sampler) // (8 * each)
    for given in ({"steps_per_generation": each}, {"generation_batch_size": 8 * each}):
        steps = method_of("grpo").optimizer_steps(rows, 1.5, knobs, given | {"num_iterations": iterations})
        assert steps == math.ceil(1.5 * max(1, math.ceil(batches / 4)))


def test_a_training_generates_as_often_as_chance_says(tmp_path: Path) -> None:
    """Of 8 micro-steps that generate with a chance of 0.25, 2 do; a rehearsed step of two does once: 8 / 4 = 2."""
    for chance, micro_steps in ((1.0, 2), (0.5, 2), (0.25, 4), (0.0, 0)):
        known, knobs = gkd_configs(tmp_path, lmbda=chance), replace(TRL_DEFAULTS, gradient_accumulation_steps=4)
        assert gkd.micro_steps_per_generation(known, knobs) == micro_steps, chance
    known = gkd_configs(tmp_path, lmbda=0.5, seq_kd=True)
    assert gkd.micro_steps_per_generation(known, TRL_DEFAULTS) == 1


EXPERIMENTAL = [name for name, row in METHODS.items() if row.long_rows == "kept"]
LONG_PROMPT = {"prompt": "one two three four " * 6, "chosen": "five", "rejected": "six six"}
SHORT = {"prompt": "one", "chosen": "two three", "rejected": "four"}


def trained_on(job: Job, rows: Any, scratch: Path, max_length: int) -> Any:
    """What TRL's trainer makes of rows."""
    facts = job.method_facts
    filled = method_of(job.method).configs(counting_arguments(job, str(scratch)) | {"max_length": max_length})
    tokenizer = load_tokenizer(job.model) if scratch.name else stub_tokenizer()
    trainer = getattr(import_module(facts.module), facts.trainer)
    return trainer(smallest_model(), filled.training, train_dataset=rows, processing_class=tokenizer).train_dataset


@pytest.mark.parametrize("method", EXPERIMENTAL)
def test_rows_that_stay_longer_than_max_length_are_refused_and_auto_counts_them_whole(
    method: str, qwen: Path, tmp_path: Path
) -> None:
    model, data = qwen, written(tmp_path, LONG_PROMPT, SHORT)
    whole = profile(job_of(method, model, data), str(tmp_path)).longest
    rows = Dataset.from_list([LONG_PROMPT, SHORT])
    made, shorter = (trained_on(job_of(method, model), rows, tmp_path, limit) for limit in (sys.maxsize, 12))
    lengths, cut_lengths = prepared_lengths(made), prepared_lengths(shorter)
    assert lengths is not None
    assert cut_lengths is not None
    assert whole == max(lengths.longer)
    assert profile(job_of(method, model, data, max_length=whole), str(tmp_path)).longest == whole
    cut = max(cut_lengths.longer)
    assert cut > 12, "TRL cuts no prompt"
    with pytest.raises(errors.DatasetError, match=f"1 rows stay longer than --max_length 12, the longest {cut} tokens"):
        profile(job_of(method, model, data, max_length=12), str(tmp_path))


@pytest.mark.parametrize("method", EXPERIMENTAL)
@pytest.mark.parametrize("length", [3, 40])
def test_worst_rows_have_exactly_the_length_asked_for_on_both_sides(method: str, length: int, tmp_path: Path) -> None:
    job = job_of(method, tmp_path)
    filled = method_of(method).configs(counting_arguments(job, str(tmp_path)) | {"max_length": length})
    rows = method_of(method).worst_rows(filled, length, 2)
    made = trained_on(job, rows, Path(), length)
    for side in ("chosen", "rejected"):
        assert [len(ids) for ids in made[f"{side}_input_ids"]] == [length, length]
    *_, last = method_of(method).rows_editor(filled)(list(made))
    assert (len(last["chosen_input_ids"]), len(last["rejected_input_ids"])) == (length, length - 1)


def test_no_plan_makes_rows_shorter_nor_goes_beyond_the_models_context(tmp_path: Path) -> None:
    facts = ModelFacts(context_length=64, is_quantized=False)
    for method in EXPERIMENTAL:
        assert not [row.name for row in LADDER if row.suits(METHODS[method]) and "max_length" in row.knobs]
        with pytest.raises(errors.ContextLengthError, match="a long prompt stays"):
            make_space(TRL_DEFAULTS, job_of(method, tmp_path), facts, longest=65)


TALK = [{"role": "user", "content": "What is 2 plus 2?"}]


def online_configs(folder: Path, **arguments: Any) -> Any:
    return method_of("online_dpo").configs({"output_dir": str(folder), "use_cpu": True, "bf16": False, **arguments})


@pytest.mark.slow
def test_prompts_are_counted_as_the_trainer_tokenizes_them(model_folder: Folder, tmp_path: Path) -> None:
    """Text without special tokens, and conversations of which one ends in the middle of an answer."""
    folder = model_folder("llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompts in (["What is 2 plus 2?", "What?"], [TALK, [*TALK, {"role": "assistant", "content": "It is"}]]):
        rows = Dataset.from_dict({"prompt": prompts})
        config = online_configs(tmp_path, max_new_tokens=2, reward_model_path=str(folder))
        made = online_dpo.build_trainer(config, str(folder), rows, None)
        _, mask, *_ = made._generate(made.model, prompts)
        counted = online_dpo.row_lengths(config, rows, tokenizer)
        assert counted.longer == mask.sum(dim=1).tolist()[: len(prompts)]


def test_rows_with_an_image_and_lengths_without_a_number_are_refused(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"prompt": ["What is this?"], "image": ["a.png"]})
    with pytest.raises(errors.DatasetFormatError, match="Rows with images are not supported"):
        online_dpo.row_lengths(online_configs(tmp_path), rows, None)
    for keyword in ("auto", "p99", None):
        with pytest.raises(errors.AutofitError, match="TRL needs a number for prompt plus completion"):
            refuse(table.FLAGS, Flags(method="online_dpo", given={"max_length": keyword}, own={}))


PAIRS = (
    ({"max_length": None}, "--max_length none as a limit of 512 tokens"),
    ({"generate_during_eval": True}, "its samples are not rehearsed"),
    ({"max_completion_length": 8}, "are for encoder-decoder models"),
    ({"is_encoder_decoder": True}, "are for encoder-decoder models"),
)
REFUSED: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "orpo": PAIRS,
    "cpo": PAIRS,
    "gkd": (
        *(({name: True}, f"--{name} is not for GKD") for name in ("packing", "eval_packing", "padding_free")),
        ({"assistant_only_loss": True}, "--assistant_only_loss is not for GKD"),
        ({"max_length": None}, "--max_length none as a limit of 1,024 tokens"),
        ({"teacher_model_init_kwargs": {"device_map": "auto"}}, "cannot place or quantize the teacher"),
        ({"chat_template_path": "org/model"}, "is not a file"),
    ),
    "distillation": (({"teacher_model_init_kwargs": {"device_map": "auto"}}, "cannot place or quantize the teacher"),),
    "online_dpo": (
        ({"eval_strategy": "steps", "eval_steps": 1}, "cannot be evaluated"),
        ({"beta": [0.1, 0.2]}, "--beta with 2 values"),
        ({"use_vllm": True}, "--use_vllm is not supported"),
        ({"remove_unused_columns": True}, "would remove the prompts"),
        ({"train_sampling_strategy": "group_by_length"}, "needs input_ids"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ends_trls_trainer_or_is_not_rehearsed_is_refused(name: str, tmp_path: Path) -> None:
    method, job = method_of(name), Job(method=name, model="model", dataset=None, arguments={"max_length": 64})
    known = counting_arguments(job, str(tmp_path))
    method.check(method.configs(known))
    for given, told in REFUSED[name]:
        with pytest.raises(errors.UsageError, match=told):
            method.check(method.configs(known | given))


def test_a_job_without_a_teacher_or_a_reward_is_refused() -> None:
    for name, row in METHODS.items():
        method, argument = method_of(name), row.teacher_argument or row.reward_model_argument
        if argument is None:
            continue
        assert f"--{argument} MODEL" in str(method.missing({}.get, to_train=True))
        assert method.missing({argument: "org/model"}.get, to_train=True) is None
        takes_functions = row.teacher_argument is None and name != "ppo"
        assert (method.missing({}.get, to_train=False) is None) == takes_functions, "a plan can do without a reward"
        assert (method.missing({"reward_funcs": ["mine.judge"]}.get, to_train=True) is None) == takes_functions
