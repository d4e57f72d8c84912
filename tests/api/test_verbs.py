"""The verbs of Python do what the command does, say what is wrong in words of Python, and leave nothing behind."""

import json
import os
import pickle
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import autotrain_mem
from autotrain_mem import AutoFit, Plan, UsageError, api, verbs
from autotrain_mem.cli import main
from autotrain_mem.run import early
from autotrain_mem.support import codec
from autotrain_mem.support.errors import PlanFileError, RehearsalError
from autotrain_mem.types.python_names import PythonErrors, python_words
from tests.place import SharedWorkers

MODEL = "Qwen/Qwen2.5-0.5B"
PINNED = {"per_device_train_batch_size": 2, "gradient_checkpointing": True, "max_length": 64}
"""They leave a search next to nothing to choose, for tests of something else."""
CARD = AutoFit(gpu="300MiB", fit="lossless")


def pinned_plan(autofit: AutoFit = CARD, **arguments: Any) -> Plan:
    return autotrain_mem.plan("sft", MODEL, autofit=autofit, **{**PINNED, **arguments})


def without_clocks(noun: Any) -> Any:
    text = json.dumps(codec.to_json(noun) if not isinstance(noun, dict) else noun)
    return json.loads(re.sub(r'"(rehearsal_)?seconds": [\d.e-]+', '"seconds": 0', text))


def test_plan_and_estimate_are_the_commands(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(words: str) -> Any:
        main.run([*words.split(), "--json"])
        return without_clocks(json.loads(capsys.readouterr().out))

    words = "--gpu 300MiB --fit lossless --forbid optimizer_offload,activation_offloading --headroom 5%"
    words += " --effective_batch_size 8 --max_length 64"
    words += " --use_peft --lora_r 4 --lora_target_modules q_proj v_proj --learning_rate 1e-4"
    forbid = frozenset({"optimizer_offload", "activation_offloading"})
    ours = AutoFit(gpu="300MiB", fit="lossless", forbid=forbid, effective_batch_size=8, headroom="5%")
    lora = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    arguments = {**lora, "learning_rate": 1e-4, "max_length": 64}
    for name, value in {"TTY_COMPATIBLE": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    of_python = autotrain_mem.plan("sft", MODEL, dataset="data.jsonl", autofit=ours, **arguments)
    assert " tried: needs " in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(verbs, "_begun", lambda *_, **__: nullcontext((None, Mock())))
        patch.setattr(api, "plan", lambda *_, **__: of_python)
        patch.setattr(api, "train", lambda *given: given[3]({"event": "note", "message": "no room"}))
        autotrain_mem.fit("sft", MODEL, on_event=(seen := Mock()))
    shown = capsys.readouterr().err
    assert all(words in shown for words in ("starting the training process", "no room"))
    seen.assert_called_once_with({"event": "note", "message": "no room"})
    monkeypatch.delenv("TTY_COMPATIBLE")
    assert without_clocks(of_python) == told(f"plan sft --model {MODEL} --dataset data.jsonl {words}")
    found = autotrain_mem.estimate("sft", Path(MODEL), autofit=AutoFit(gpu="300MiB"), max_length=64, optim="sgd")
    assert without_clocks(found) == told(f"estimate sft --model {MODEL} --gpu 300MiB --max_length 64 --optim sgd")


def test_values_of_python_are_taken_as_flags_take_them_and_an_environment_is_for_the_run_alone(here: Path) -> None:
    import torch
    from transformers.trainer_utils import IntervalStrategy

    before = dict(os.environ)
    words = {"dtype": torch.bfloat16, "output_dir": Path("out"), "save_strategy": IntervalStrategy.STEPS}
    words |= {"use_peft": True, "lora_target_modules": ("q_proj", "v_proj"), "learning_rate": "1e-4"}
    setting = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    planned = pinned_plan(**words, environment=setting)
    given = planned.job.arguments
    assert given["dtype"] == planned.knobs.dtype == "bfloat16"
    assert (given["output_dir"], given["save_strategy"], given["learning_rate"]) == ("out", "steps", 1e-4)
    assert given["lora_target_modules"] == ["q_proj", "v_proj"]
    assert given.keys() == PINNED.keys() | words.keys()
    assert planned.knobs.expandable_segments
    assert planned.job.environment == setting
    assert dict(os.environ) == before


def test_a_plan_is_followed_with_its_own_words_where_none_are_given(here: Path, tmp_path: Path) -> None:
    made = pinned_plan(learning_rate=3e-4)
    made.save(tmp_path / "plan.json")
    for plan in (made, tmp_path / "plan.json", str(tmp_path)):
        followed = autotrain_mem.plan("sft", MODEL, autofit=AutoFit(plan=plan))
        assert without_clocks(followed) == without_clocks(made)
    with pytest.raises(UsageError, match="per_device_train_batch_size is 4, and 2 in the plan"):
        autotrain_mem.plan("sft", MODEL, autofit=AutoFit(plan=made), per_device_train_batch_size=4)
    with pytest.raises(PlanFileError):
        autotrain_mem.plan("sft", MODEL, autofit=AutoFit(plan=here / "data.jsonl"))


def planned(method: str = "sft", autofit: AutoFit | None = None, **arguments: Any) -> Callable[[], object]:
    return lambda: autotrain_mem.plan(method, MODEL, autofit=autofit or AutoFit(), **arguments)


WRONG: Mapping[str, tuple[Callable[[], object], str]] = {
    "unknown names": (planned(max_lenght=5, lr=2), "max_length learning_rate"),
    "one of ours": (planned(gpu="l4", effective_batch_size=8), "autofit=AutoFit(gpu='l4', effective_batch_size=8)"),
    "a model given twice": (planned(model_name_or_path="other"), "model_name_or_path"),
    "unknown method": (planned("stf"), "sft reward dpo grpo rloo ppo"),
    "rows": (planned(dataset=[{"text": "a"}]), "dataset list SFTTrainer(train_dataset=...)"),
    "a function": (planned("grpo", reward_funcs=[len]), "reward_funcs builtin_function_or_method"),
    "a pin": (planned(autofit=AutoFit(pin=frozenset({"packing"}))), "AutoFit(pin=...) plan(...)"),
    "several cards": (planned(autofit=AutoFit(gpu="l4,t4"), max_length=64), "--gpu l4,t4"),
    "no headroom": (planned(autofit=AutoFit(gpu="l4", headroom="99GiB"), max_length=64), "99GiB 22.0 500MiB 8%"),
    "a plan to estimate": (
        lambda: autotrain_mem.estimate("sft", MODEL, autofit=AutoFit(plan="plan.json")),
        "AutoFit(plan=...) estimate plan(...) fit(...)",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_has_one_message(mistake: str, here: Path) -> None:
    call, words = WRONG[mistake]
    with pytest.raises(UsageError) as raised:
        call()
    assert not [word for word in words.split() if word not in str(raised.value)], raised.value
    assert raised.value.hint


def test_an_error_with_flags_says_what_they_are_in_python(here: Path) -> None:
    with pytest.raises(UsageError, match="--use_cpu and --gpu exclude each other") as raised:
        pinned_plan(use_cpu=True)
    assert raised.value.__cause__ is None
    assert {Path(each.path) for each in raised.traceback} == {Path(__file__)}, "without the package's own lines"
    assert raised.value.__notes__ == [
        "In Python --use_cpu is use_cpu=..., --gpu is AutoFit(gpu=...), --simulate is fit(..., simulate=True)"
    ]


def test_an_error_keeps_what_libraries_raised_gets_no_note_without_flags_and_survives_pickling() -> None:
    for kind, kept in ((RehearsalError, True), (UsageError, False)):
        with pytest.raises(kind) as raised, PythonErrors():
            raise kind("Failed.") from RuntimeError("a worker's traceback")
        assert (raised.value.__cause__ is not None) is kept
    assert python_words("Write autofit=AutoFit(gpu='l4'). Run autofit sft --help; --debug shows the traceback.") == ""
    assert python_words("--max-length 5 or --max_length=5") == "In Python --max_length is max_length=..."
    error = UsageError("No model is given.", hint="Give one.\nOr two.")
    assert str(error) == "No model is given.\n  Give one.\n  Or two."
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), received.message, received.hint) == (UsageError, error.message, error.hint)


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), UsageError("wrong")], ids=["Ctrl-C", "an error"])
def test_workers_end_with_the_call(ending: BaseException, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []

    def interrupted(*_: object) -> api.Rehearsals:
        raise ending

    monkeypatch.setattr(SharedWorkers, "__exit__", lambda self, *_: ended.append(self))
    monkeypatch.setattr(early, "refuse", lambda *request, **facts: None)
    monkeypatch.setattr(api, "rehearsals_for", interrupted)
    for verb in (autotrain_mem.estimate, autotrain_mem.plan, autotrain_mem.fit, autotrain_mem.cards):
        with pytest.raises(type(ending)):
            verb("sft", MODEL, autofit=AutoFit(gpu="l4"))
    assert len(ended) == 4
