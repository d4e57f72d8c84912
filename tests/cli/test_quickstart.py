"""The quickstart: its rows are problems whose answers follow, its model loads as any other, and the first run that a
newcomer sees tells its story, with fewer rows and steps than theirs."""

import operator
import re
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, GenerationConfig

from autotrain_mem import api
from autotrain_mem.cli import quickstart, tiny_model, word_problems
from autotrain_mem.types import Plan
from tests.place import Autofit

ROWS = list(word_problems.problems(200, seed=0))
STRANGE_TEXT = "Ünïcode,\n\n  tabs\tand 'll x=3,14 1234 \N{SNOWMAN} 日本語"
CONVERSATION = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Answer: 4"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("quickstart") / "model"
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    tiny_model.build(path, word_problems.texts(ROWS))
    assert torch.equal(torch.rand(3), expected), "building leaves the caller's random numbers alone"
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_the_model_is_a_million_tied_parameters_and_agrees_with_its_tokenizer_on_the_special_tokens(folder, tokenizer):
    loaded, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert loaded.dtype == torch.float32
    assert 0.9e6 < loaded.num_parameters() < 1.2e6
    assert (folder / "model.safetensors").stat().st_size < 4.5e6
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for settings in (loaded.config, GenerationConfig.from_pretrained(folder)):
        assert settings.eos_token_id == tokenizer.eos_token_id
        assert settings.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.convert_ids_to_tokens(list(range(4))) == list(tiny_model.SPECIAL_TOKENS)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) <= tiny_model.VOCABULARY_SIZE
    assert AutoProcessor.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()


def test_text_survives_the_tokenizer_and_digits_are_tokens_of_their_own(tokenizer):
    for text in [*list(word_problems.texts(ROWS))[:6], STRANGE_TEXT, ""]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokens = tokenizer.tokenize("137 + 25 = 162.")
    assert [token for token in tokens if any(map(str.isdigit, token))] == list("13725162")


def test_the_assistants_words_and_the_end_of_its_turn_are_marked_for_the_loss(tokenizer):
    marked = tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    kept = [token for token, mask in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(kept) == "Answer: 4<|im_end|>"
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert whole == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\nAnswer: 4<|im_end|>\n"
    prompt = tokenizer.apply_chat_template(CONVERSATION[:1], tokenize=False, add_generation_prompt=True)
    assert whole.startswith(prompt)
    assert prompt.endswith("<|im_start|>assistant\n")


def test_the_same_texts_make_the_same_folder_and_the_same_seed_the_same_texts(folder, tmp_path):
    tiny_model.build(tmp_path, word_problems.texts(word_problems.problems(200, seed=0)))
    first, again = ({path.name: path.read_bytes() for path in each.iterdir()} for each in (folder, tmp_path))
    assert first == again
    assert list(word_problems.problems(200, seed=1)) != ROWS


SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\.$", re.MULTILINE)

APPLIED = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def test_the_question_opens_the_reasoning_and_every_line_of_reasoning_follows_from_the_last():
    symbols = Counter()
    for problem in word_problems.problems(600, seed=1):
        user, assistant = problem["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        opening, *reasoning, answer = assistant["content"].splitlines()
        start, *amounts = re.findall(r"\d+", user["content"])
        assert [SUM.search(line)[3] for line in reasoning] == amounts
        total = int(start)
        assert opening == f"We start with {total}."
        for line in reasoning:
            left, symbol, right, result = SUM.search(line).groups()
            assert int(left) == total
            total = int(result)
            assert total == APPLIED[symbol](int(left), int(right))
        assert answer == f"Answer: {total}"
        symbols.update({SUM.search(line)[2] for line in reasoning})
    assert symbols.keys() == set("+-*/")
    assert min(symbols.values()) >= 60


@pytest.mark.parametrize("count", [20, 100, 1000])
def test_one_row_in_every_hundred_is_eight_times_the_median(count):
    problems = word_problems.problems(count, seed=count)
    rows = [sum(len(message["content"]) for message in problem["messages"]) for problem in problems]
    long_rows = [place for place, length in enumerate(rows) if length >= 8 * median(rows)]
    assert [place // 100 for place in long_rows] == list(range(-(-count // 100)))


FEW_ROWS, STEPS = 300, 3
"""TRL's defaults draw the first long one of these rows in their second step, of 600 rows in their 17th."""


def with_pins(rehearsals: api.Rehearsals, *reports: Any, plan: Any = api.plan, **options: Any) -> Plan:
    """A search that has nothing to choose; the tutorial's test has a real one on this card."""
    forbid = frozenset({"activation_offloading", "optimizer_offload"})
    pins = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": True}
    job = rehearsals.job
    job = replace(job, fit="lossless", forbid=forbid, arguments={**job.arguments, **pins})
    return plan(replace(rehearsals, job=job), *reports, **options)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_trls_defaults_run_out_of_memory_and_the_plan_fits_and_learns_as_predicted(
    autofit_once: Autofit, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = " ".join(quickstart.FLAGS).replace(f"--max_steps {quickstart.STEPS}", f"--max_steps {STEPS}")
    # without the levels that round
    shorter = flags.replace("--logging_steps 5", "--logging_steps 1 --dtype float32 --optim adamw_torch_fused")
    for name, value in {"ROWS": FEW_ROWS, "STEPS": STEPS, "FLAGS": shorter.split()}.items():
        monkeypatch.setattr(quickstart, name, value)
    monkeypatch.setattr(api, "plan", with_pins)
    ran = autofit_once("quickstart", "--folder", "quickstart-tried")
    assert ran.code == 0, ran.err
    said = " ".join(ran.out.split())  # lines joined where a terminal of 80 columns ended them
    assert f"does not fit {quickstart.CARD}: needs" in said
    refused = re.search(
        r"Out of memory during \w+, after step (\d+): (CUDA out of memory\. Tried to allocate .*)", said
    )
    assert refused is not None
    assert 0 < int(refused[1]) < STEPS
    assert f"GPU 0 has a total capacity of {quickstart.CARD.removesuffix('MiB')}.00 MiB" in refused[2]
    assert "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large" in refused[2]
    plan, _, run = said.partition("4. ")
    assert f" fits {quickstart.CARD}" in plan
    assert f"finished: {STEPS} steps" in run
    assert "retries" not in run
    loss = re.search(r"loss ([\d.]+) -> ([\d.]+)", run)
    shown = re.search(r"([\d.]+) MiB reserved predicted, ([\d.]+) MiB measured", said)
    assert loss is not None
    assert shown is not None
    assert float(loss[2]) < float(loss[1])
    assert float(shown[2]) <= float(shown[1])
