"""The verbs of Python do what the command does, say what is wrong in words of Python, and leave nothing behind."""

from __future__ import annotations

import enum
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import autotrain_mem
from autotrain_mem import AutoFit, AutofitError, Plan, UsageError, api
from autotrain_mem.cli import main
from autotrain_mem.errors import PlanFileError, RehearsalError
from autotrain_mem.spec import codec
from autotrain_mem.spec.python_errors import python_errors, python_words
from autotrain_mem.worker.pool import Workers

MODEL = "Qwen/Qwen2.5-0.5B"
PINNED = {"per_device_train_batch_size": 2, "gradient_checkpointing": True, "max_length": 64}
"""They leave a search next to nothing to choose, for tests of something else."""
CARD = AutoFit(gpu="300MiB", fit="lossless")


def pinned_plan(autofit: AutoFit = CARD, **arguments: Any) -> Plan:
    return autotrain_mem.plan("sft", MODEL, autofit=autofit, **{**PINNED, **arguments})


def without_clocks(values: Any) -> Any:
    """All of a plan's JSON but how long it took to find."""
    if isinstance(values, Mapping):
        kept = {name: each for name, each in values.items() if name not in ("seconds", "rehearsal_seconds")}
        return {name: without_clocks(each) for name, each in kept.items()}
    return [without_clocks(each) for each in values] if isinstance(values, list) else values


# -- the same as the command ---------------------------------------------------------------------------------------


def test_plan_is_the_commands_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--gpu 300MiB --fit lossless --forbid optimizer_offload,max_length --effective_batch_size 8 --headroom 5%"
    trls = "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj --learning_rate 1e-4 --max_length 64"
    main.run(["plan", "sft", "--model", MODEL, "--dataset", "data.jsonl", "--json", *words.split(), *trls.split()])
    of_command = json.loads(capsys.readouterr().out)
    ours = AutoFit(
        gpu="300MiB",
        fit="lossless",
        forbid=frozenset({"optimizer_offload", "max_length"}),
        effective_batch_size=8,
        headroom="5%",
    )
    of_python = autotrain_mem.plan(
        "sft",
        MODEL,
        dataset="data.jsonl",
        autofit=ours,
        use_peft=True,
        lora_r=4,
        lora_target_modules=["q_proj", "v_proj"],
        learning_rate=1e-4,
        max_length=64,
    )
    assert without_clocks(json.loads(json.dumps(codec.to_json(of_python)))) == without_clocks(of_command)


def test_estimate_is_the_commands_estimate(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main.run(["estimate", "sft", "--model", MODEL, "--gpu", "300MiB", "--max_length", "64", "--optim", "sgd", "--json"])
    of_command = json.loads(capsys.readouterr().out)
    found = autotrain_mem.estimate("sft", Path(MODEL), autofit=AutoFit(gpu="300MiB"), max_length=64, optim="sgd")
    assert without_clocks(json.loads(json.dumps(codec.to_json(found)))) == without_clocks(of_command)


class Strategy(enum.Enum):
    """As transformers' IntervalStrategy is one."""

    STEPS = "steps"


def test_values_of_python_are_taken_as_flags_take_them(here: Path) -> None:
    import torch

    targets = ("q_proj", "v_proj")
    planned = pinned_plan(
        dtype=torch.bfloat16,
        output_dir=Path("out"),
        save_strategy=Strategy.STEPS,
        use_peft=True,
        lora_target_modules=targets,
        learning_rate="1e-4",
    )
    given = planned.job.arguments
    assert given["dtype"] == planned.knobs.dtype == "bfloat16"
    assert (given["output_dir"], given["save_strategy"], given["learning_rate"]) == ("out", "steps", 1e-4)
    assert given["lora_target_modules"] == list(targets)


def test_only_what_is_given_is_pinned(here: Path) -> None:
    assert pinned_plan().job.arguments.keys() == PINNED.keys()


# -- a plan that was made before -----------------------------------------------------------------------------------


def test_a_plan_is_followed_with_its_own_words_where_none_are_given(here: Path, tmp_path: Path) -> None:
    made = pinned_plan(learning_rate=3e-4)
    made.save(tmp_path / "plan.json")
    for plan in (made, tmp_path / "plan.json", str(tmp_path)):
        followed = autotrain_mem.plan("sft", MODEL, autofit=AutoFit(plan=plan))
        assert without_clocks(codec.to_json(followed)) == without_clocks(codec.to_json(made))
    renewed = autotrain_mem.plan("sft", MODEL, autofit=AutoFit(plan=made), learning_rate=1e-5)
    assert (renewed.knobs, renewed.job.arguments["learning_rate"]) == (made.knobs, 1e-5)


def test_a_word_against_the_plan_is_refused(here: Path) -> None:
    made = pinned_plan()
    with pytest.raises(UsageError, match="per_device_train_batch_size is 4, and 2 in the plan"):
        autotrain_mem.plan("sft", MODEL, autofit=AutoFit(plan=made), per_device_train_batch_size=4)
    with pytest.raises(UsageError, match=r'for sft, not for dpo.\n  Give "sft"'):
        autotrain_mem.plan("dpo", MODEL, autofit=AutoFit(plan=made))


def test_a_file_that_holds_no_plan_is_an_error_of_its_own(here: Path) -> None:
    with pytest.raises(PlanFileError):
        autotrain_mem.plan("sft", MODEL, autofit=AutoFit(plan=here / "data.jsonl"))


# -- what is wrong -------------------------------------------------------------------------------------------------


WRONG: Mapping[str, tuple[Callable[[], object], str]] = {
    "unknown names": (
        lambda: autotrain_mem.plan("sft", MODEL, max_lenght=5, lr=2),
        "Unknown keys: max_lenght, lr.\n  max_lenght: did you mean max_length?\n  lr: did you mean learning_rate?",
    ),
    "one of ours": (
        lambda: autotrain_mem.plan("sft", MODEL, gpu="l4", effective_batch_size=8),
        "gpu, effective_batch_size are not TRL's to take.\n  Write autofit=AutoFit(gpu='l4', effective_batch_size=8).",
    ),
    "a model given twice": (
        lambda: autotrain_mem.estimate("sft", MODEL, model_name_or_path="other"),
        "The model is given twice, as model and as model_name_or_path.\n  Remove one.",
    ),
    "unknown method": (
        lambda: autotrain_mem.fit("stf", MODEL),
        "Unknown method 'stf'.\n  Did you mean \"sft\"? Known: sft, reward, dpo, grpo, rloo, ppo.",
    ),
    "rows": (
        lambda: autotrain_mem.plan("sft", MODEL, dataset=[{"text": "a"}]),  # type: ignore[arg-type]
        "dataset takes a hub id or a path, not a list.\n"
        "  Objects go to a trainer: from autotrain_mem import SFTTrainer; SFTTrainer(train_dataset=...).",
    ),
    "a function": (
        lambda: autotrain_mem.plan("grpo", MODEL, reward_funcs=[len]),
        "reward_funcs takes a builtin_function_or_method in a trainer only: here arguments go to another process.\n"
        "  Give it by name, as a flag would, or use the trainer: from autotrain_mem import SFTTrainer.",
    ),
    "a pin": (
        lambda: autotrain_mem.plan("sft", MODEL, autofit=AutoFit(pin=frozenset({"packing"}))),
        "AutoFit(pin=...) is for trainers, whose config does not say what was given; plan(...) does.\n"
        "  Give an argument to keep it; remove it to have it tuned.",
    ),
    "a plan to estimate": (
        lambda: autotrain_mem.estimate("sft", MODEL, autofit=AutoFit(plan="plan.json")),
        "AutoFit(plan=...) has no place here: estimate tells what arguments need; plan(...) and fit(...) follow a "
        "plan.\n  Remove plan.",
    ),
    "several cards": (
        lambda: autotrain_mem.plan("sft", MODEL, autofit=AutoFit(gpu="l4,t4"), max_length=64),
        "--gpu l4,t4 names several cards.\n"
        "  Only autofit plan METHOD compares cards; give --gpu one name here (autofit gpus lists them).",
    ),
    "no headroom": (
        lambda: autotrain_mem.plan("sft", MODEL, autofit=AutoFit(gpu="l4", headroom="99GiB"), max_length=64),
        "A headroom of 99GiB leaves nothing of a device of 22.0 GiB.\n"
        "  headroom takes a size such as 500MiB or a share such as 8%, less than the device has.",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_every_mistake_has_one_clear_message(mistake: str, here: Path) -> None:
    call, said = WRONG[mistake]
    with pytest.raises(UsageError) as raised:
        call()
    assert str(raised.value) == said


def test_an_error_with_flags_says_what_they_are_in_python(here: Path) -> None:
    with pytest.raises(UsageError, match="--use_cpu and --gpu exclude each other") as raised:
        pinned_plan(use_cpu=True)
    assert raised.value.__cause__ is None
    assert raised.value.__notes__ == [
        "In Python --use_cpu is use_cpu=..., --gpu is AutoFit(gpu=...), --simulate is fit(..., simulate=True)"
    ]


def test_what_the_installed_libraries_raised_keeps_its_traceback() -> None:
    for kind, kept in ((RehearsalError, True), (UsageError, False)):
        with pytest.raises(kind) as raised, python_errors():
            raise kind("Failed.") from RuntimeError("a worker's traceback")
        assert (raised.value.__cause__ is not None) is kept


def test_words_without_flags_get_no_note() -> None:
    assert python_words("Write autofit=AutoFit(gpu='l4'). Run autofit sft --help; --debug shows the traceback.") == ""
    assert python_words("--max-length 5 or --max_length=5") == "In Python --max_length is max_length=..."


def test_an_error_says_message_and_hint_and_survives_pickling() -> None:
    error = UsageError("No model is given.", hint="Give one.\nOr two.")
    assert str(error) == "No model is given.\n  Give one.\n  Or two."
    assert str(AutofitError("Nothing helps.")) == "Nothing helps."
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), received.message, received.hint) == (UsageError, error.message, error.hint)


# -- what is left behind -------------------------------------------------------------------------------------------


def test_an_environment_is_for_the_run_and_not_for_this_process(here: Path) -> None:
    before = dict(os.environ)
    setting = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    planned = autotrain_mem.plan("sft", MODEL, autofit=CARD, environment=setting, **PINNED)
    assert planned.knobs.expandable_segments
    assert planned.job.environment == setting
    assert dict(os.environ) == before


@pytest.mark.parametrize("ending", [KeyboardInterrupt, UsageError("wrong")], ids=["Ctrl-C", "an error"])
def test_workers_end_with_the_call_however_it_ends(
    ending: BaseException | type[BaseException], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    class Watched(Workers):
        def __init__(self, count: int | None = None) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            ended.append(self)

    def interrupted(*_: object, **__: object) -> api.Rehearsals:
        raise ending

    monkeypatch.setattr(api, "Workers", Watched)
    monkeypatch.setattr(api, "rehearsals_for", interrupted)
    for verb in (autotrain_mem.estimate, autotrain_mem.plan, autotrain_mem.fit, autotrain_mem.cards):
        with pytest.raises(type(ending) if isinstance(ending, BaseException) else ending):
            verb("sft", MODEL, autofit=AutoFit(gpu="l4"))
    assert len(ended) == 4
