"""What no plan can be made with is refused before anything is started, with the cure."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import AutoModelForCausalLM

import autotrain_mem
from autotrain_mem import AutoFit
from autotrain_mem.support import errors
from autotrain_mem.support.errors import UsageError
from tests.drop_in.conftest import QUIET, SETTLED, config, prompts, shortness, texts


def sft(folder: Path, rows: Any, autofit: AutoFit = QUIET, **settings: Any) -> Any:
    args = config(trl.SFTConfig, folder, **{"max_length": 64, **SETTLED} | settings)
    return autotrain_mem.SFTTrainer(str(folder), args=args, train_dataset=rows, autofit=autofit)


@pytest.mark.parametrize("is_object", [False, True])
@pytest.mark.parametrize(("model", "folder"), [("model", "model"), ("run/checkpoint-5", "run")])
def test_no_model_is_saved_over(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, folder: str, is_object: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(qwen, model)
    (tmp_path / "link").symlink_to(tmp_path / folder)
    args = trl.SFTConfig("link", use_cpu=True, report_to="none")
    given = AutoModelForCausalLM.from_pretrained(model) if is_object else model
    with pytest.raises(errors.OutputFolderError, match=f"would replace the model in {model}"):
        autotrain_mem.SFTTrainer(given, args=args, train_dataset=texts(), autofit=QUIET)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"tools": [shortness]}, "tools is not supported yet.*longer by a whole completion"),
        ({"rollout_func": shortness}, "rollout_func is not supported yet.*the script's own code"),
        ({"environment_factory": shortness}, "environment_factory is not supported yet.*no prompt's length"),
    ],
    ids=["tools", "a rollout", "an environment"],
)
def test_a_call_of_grpos_is_refused(qwen: Path, tmp_path: Path, words: dict[str, Any], said: str) -> None:
    args = config(trl.GRPOConfig, tmp_path, num_generations=4)
    call = {"reward_funcs": shortness, "args": args, "train_dataset": prompts(), **words}
    with pytest.raises(UsageError) as raised:
        autotrain_mem.GRPOTrainer(str(qwen), **call, autofit=QUIET)
    assert isinstance(raised.value, ValueError), "as what TRL itself refuses"
    assert re.search(said, f"{raised.value.message} {raised.value.hint}")


def test_a_stream_is_planned_for_rows_that_fill_max_length_and_unreadable_rows_are_refused(qwen: Path) -> None:
    trainer = sft(qwen, texts().to_iterable_dataset())
    assert trainer.plan.data is None
    assert trainer.plan.row_tokens == 64
    with pytest.raises(UsageError, match=r"SFTConfig\(max_length="):
        sft(qwen, texts().to_iterable_dataset(), max_length=None)
    stream, args = prompts().to_iterable_dataset(), config(trl.GRPOConfig, qwen / "run", num_generations=4)
    sampled = autotrain_mem.GRPOTrainer(
        str(qwen), reward_funcs=shortness, args=args, train_dataset=stream, autofit=QUIET
    )
    assert sampled.plan.data.rows == 24
    assert any("the first 24 prompts were counted" in warning for warning in sampled.plan.warnings)
    with pytest.raises(errors.DatasetFormatError, match="train_dataset holds"):
        sft(qwen, texts().rename_column("text", "words"))
    with pytest.raises(errors.EmptyDatasetError, match="train_dataset has no rows"):
        sft(qwen, texts().select([]))


def test_words_are_refused_before_a_worker_is_asked(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotrain_mem.drop_in.call_plan._rehearsals", None)
    autofit: Any
    for autofit, said in (
        ({"gpu": "80MiB"}, "autofit takes an AutoFit, not"),
        (AutoFit(gpu="80MiB", effective_batch_size=0), "effective_batch_size 0 is not a whole number"),
        (AutoFit(gpu="80MiB", headroom="200%"), "leaves nothing"),
    ):
        with pytest.raises(UsageError, match=said):
            sft(qwen, texts(), autofit)


def test_words_that_no_plan_can_be_made_with() -> None:
    for words, said in (
        ({"fit": "everything"}, "fit does not take 'everything'"),
        ({"max_slowdown": 0.5}, "max_slowdown 0.5 is not a factor"),
        ({"pin": ["optim"], "tune": ["optim"]}, "pin and tune both name optim"),
        ({"forbid": "lora"}, "forbid takes names, not one text"),
        ({"forbid": None}, "forbid takes names, not None"),
        ({"optimizer_offload": "no"}, "optimizer_offload takes True or False, not 'no'"),
        ({"headroom": 0.1}, "headroom takes a text"),
        ({"max_slowdown": None}, "max_slowdown takes a number, not None"),
        ({"plan": {"a": 1}}, "plan takes a Plan or the path of its file"),
    ):
        with pytest.raises(UsageError, match=said):
            AutoFit(**words)


def test_a_trl_without_ppo_is_told_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl.experimental.ppo", None)
    for module in ("drop_in.experimental_ppo", "trainers.ppo_trainer"):
        monkeypatch.delitem(sys.modules, f"autotrain_mem.{module}", raising=False)
    monkeypatch.delitem(vars(autotrain_mem), "PPOTrainer", raising=False)
    with pytest.raises(errors.MissingExtraError, match=r"trl 1\.12") as caught:
        _ = autotrain_mem.PPOTrainer
    assert "autotrain_mem[ppo]" in caught.value.hint
