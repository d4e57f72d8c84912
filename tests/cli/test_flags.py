"""Flags and YAML: who wins, what is pinned, and what TRL's parser is told."""

from dataclasses import fields
from pathlib import Path

import pytest
from test_flag_verdicts import INSTALLED_METHODS

from autotrain_mem.cli import flags
from autotrain_mem.methods.interface import method_of
from autotrain_mem.settings.knobs import knob_names
from autotrain_mem.settings.trl_parser import read_given, table_of
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import METHODS, AutoFit, Knobs
from autotrain_mem.worker.client import Worker
from tests.place import Autofit

YAML = """\
model_name_or_path: tiny
per-device-train-batch-size: 4
learning_rate: 1e-4
gradient_checkpointing: false
use_peft: true
lora_target_modules: [q_proj, v_proj]
max_length: auto
report_to: none
run_name: 2024-01-01
max_steps: null
datasets:
  - path: json
    data_files: data.jsonl
env:
  SOME_VARIABLE: 1
autofit:
  gpu: rtx3060
  plan-only: true
  forbid: [8bit_optimizer, max-length]
  effective_batch_size: 16
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(YAML)
    return tmp_path / "recipe.yaml"


def _given(worker: Worker, *argv: str) -> dict[str, object]:
    request, _ = flags.read("autofit sft", argv)
    return dict(worker.parse("sft", request.argv, request.config, request.environment, flags.own_names())[0])


def test_dashes_and_underscores_are_the_same_and_a_value_keeps_its_dashes(worker: Worker) -> None:
    with_dashes = flags.read("autofit sft", ["--effective-batch-size=8", "--plan-only", "--max-length", "5"])
    assert with_dashes == flags.read("autofit sft", ["--effective_batch_size", "8", "--plan_only", "--max_length", "5"])
    assert _given(worker, "--learning-rate", "1e-4") == _given(worker, "--learning_rate=1e-4")
    request, _ = flags.read("autofit sft", ["--model=some-org/some-model", "--gpu", "a100-80gb", "--run-name", "a-b"])
    assert (request.model, request.autofit.gpu) == ("some-org/some-model", "a100-80gb")
    assert request.argv == ("--run_name", "a-b")


OLD_NAMES = {
    "torch_dtype": ("bfloat16", {"dtype": "bfloat16"}),
    "evaluation_strategy": ("steps", {"eval_strategy": "steps"}),
    "max_seq_length": (512, {"max_length": 512}),
    "warmup_ratio": (0.03, {"warmup_steps": 0.03}),
    "group_by_length": (True, {"train_sampling_strategy": "group_by_length"}),
    "no_cuda": (True, {"use_cpu": True}),
    "use_liger": (False, {"use_liger_kernel": False}),
}


@pytest.mark.parametrize("old", OLD_NAMES)
def test_a_name_of_transformers_4_is_taken_as_a_flag_and_as_a_key(old: str, worker: Worker) -> None:
    value, read = OLD_NAMES[old]
    assert _given(worker, f"--{old}", str(value).lower()) == read
    as_key = worker.parse("sft", (), {old: value}, {}, flags.own_names())[0]
    assert as_key == read, "of YAML and of Python"


def test_an_old_name_beside_todays_must_say_the_same_and_a_flag_of_either_wins_over_a_key(
    worker: Worker, autofit: Autofit
) -> None:
    ran = autofit(*["plan", "sft", "--model", "tiny", "--gpu", "t44", "--torch_dtype", "float32"])
    assert ran.err.startswith("note: --torch_dtype is now --dtype.\nerror: No GPU")
    request = flags.read("autofit grpo", ["--no_cuda", "--reward_funcs", "a.b", "c.d"])[0]
    assert (request.argument("use_cpu"), request.argument("reward_funcs")) == ("true", "a.b c.d")
    assert _given(worker, "--group_by_length") == {"train_sampling_strategy": "group_by_length"}
    assert _given(worker, "--no_cuda") == {"use_cpu": True}
    assert _given(worker, "--group_by_length", "false") == {"train_sampling_strategy": "random"}
    assert _given(worker, "--torch_dtype=bfloat16", "--dtype=bfloat16") == {"dtype": "bfloat16"}
    for flag in ("--dtype=float32", "--torch_dtype=float32"):
        keys = {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
        assert worker.parse("sft", (flag,), keys, {}, ())[0] == {"dtype": "float32"}
    with pytest.raises(UsageError, match="--torch_dtype and --dtype are an old and a new name") as caught:
        worker.parse("sft", (), {"torch_dtype": "bfloat16", "dtype": "float32"}, {}, ())
    assert caught.value.hint == "Remove --torch_dtype."
    with pytest.raises(UsageError, match="--torch_dtype does not take 'bf16'"):
        _given(worker, "--torch_dtype", "bf16")
    with pytest.raises(UsageError, match="Unknown key: torch_dtypes") as caught:
        worker.parse("sft", (), {"torch_dtypes": "bfloat16"}, {}, ())
    assert caught.value.hint == "torch_dtypes: did you mean dtype?"


def test_every_switch_needs_no_value() -> None:
    parser = method_of("sft").make_parser()
    switches = [flag.dest for flag in table_of(parser).flags if flag.kind == "string_to_bool" and flag.nargs != 0]
    assert {"bf16", "fp16", "tf32", "greater_is_better"} <= set(switches)
    read = read_given(parser, "sft", [f"--{name}" for name in switches], {}, (), lambda name: [])
    assert read == dict.fromkeys(switches, True)


def test_a_recipe_is_read_in_its_three_parts_and_our_keys_may_stand_at_the_top(recipe: Path, tmp_path: Path) -> None:
    request, _ = flags.read("autofit sft", [f"--config={recipe}"])
    assert (request.autofit.gpu, request.plan_only, request.autofit.effective_batch_size) == ("rtx3060", True, 16)
    assert request.autofit.forbid == {"8bit_optimizer", "max_length"}
    assert request.environment == {"SOME_VARIABLE": "1"}
    assert request.config["per_device_train_batch_size"] == 4
    assert not {"env", "autofit"} & set(request.config)
    path = tmp_path / "flat.yaml"
    path.write_text("model: tiny\ngpu: 300MiB\nsimulate: true\njson: false\n")
    request, output = flags.read("autofit sft", ["--config", str(path)])
    assert (request.model, request.autofit.gpu, request.simulate, output.json) == ("tiny", "300MiB", True, False)


def test_a_recipe_means_what_the_same_flags_mean_and_says_what_no_flag_can(recipe: Path, worker: Worker) -> None:
    as_flags = (
        "--model_name_or_path tiny --per_device_train_batch_size 4 --learning_rate 1e-4 --gradient_checkpointing false "
        "--use_peft --lora_target_modules q_proj v_proj --max_length auto --report_to none --run_name 2024-01-01"
    )
    no_flags = {"max_steps": None, "datasets": [{"path": "json", "data_files": "data.jsonl"}]}
    assert _given(worker, "--config", str(recipe)) == _given(worker, *as_flags.split()) | no_flags
    argv = ["--config", str(recipe), "--gpu", "t4", "--per_device_train_batch_size", "2", "--use_peft", "false"]
    assert flags.read("autofit sft", argv)[0].autofit.gpu == "t4", "a flag wins over the recipe"
    given = _given(worker, *argv)
    assert (given["per_device_train_batch_size"], given["use_peft"]) == (2, False)


@pytest.mark.parametrize("method", INSTALLED_METHODS)
def test_defaults_are_those_of_the_installed_trl(method: str, worker: Worker) -> None:
    teacher = ["--teacher_model_name_or_path", "teacher"]
    needed = {"ppo": ["--reward_model_path", "judge"], "distillation": teacher, "gkd": teacher}
    defaults = worker.parse(method, needed.get(method, []), {}, {}, ())[1]
    filled = method_of(method).configs({"output_dir": "nowhere", "use_cpu": True, "bf16": False})
    compared = []
    for name in (field.name for field in fields(Knobs)):
        config = next((each for each in (filled.training, filled.model) if hasattr(each, name)), None)
        if config is not None:
            expected = getattr(config, name)
            assert getattr(defaults, name) == getattr(expected, "value", expected), name
            compared.append(name)
    assert set(knob_names(METHODS[method].knobs, defaults)) <= set(compared)


def test_headroom_is_a_size_or_a_share_and_any_other_is_refused() -> None:
    good = {"8%": 80, "0%": 0, "500B": 500, None: None}
    assert {text: AutoFit(headroom=text).headroom_bytes(1000) for text in good} == good
    for text in ("", "%", "8", "nan%", "inf%", "-1%", "100%", "1KiB", "1GB"):
        with pytest.raises(UsageError):
            AutoFit(headroom=text).headroom_bytes(1000)
