"""``--out`` and ``--plan``: a plan on disk is the plan that was printed, and is followed where it still holds."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from autotrain_mem.cli import commands, flags
from autotrain_mem.cli.plan_files import command
from autotrain_mem.types import AutoFit, Job, Plan
from autotrain_mem.worker.client import Worker
from tests.place import Autofit, Ran

ASKED = shlex.split(
    "--model tiny --dataset data.jsonl --max_length 64 --per_device_train_batch_size 2 --gradient_checkpointing true "
    "--learning_rate 3e-4 --optimizer_offload --use_peft --expandable_segments --data_seed 3"
)
CARD = ("--gpu", "300MiB")


@pytest.fixture(scope="module")
def plan(autofit_once: Autofit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests here."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    ran = autofit_once("plan", "sft", *ASKED, *CARD, "--out", str(path), "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert json.loads(path.read_text()) == found
    assert f"autofit sft --plan {path}" in ran.err
    assert rehearsed(ran) == len(found["attempts"]) > 0
    assert 0 < found["data"]["truncated_tokens_fraction"] < 1
    return path


def rehearsed(ran: Ran) -> int:
    return ran.err.count("rehearsing: ")


def test_a_plan_that_still_holds_is_taken_as_it_is(autofit: Autofit, plan: Path) -> None:
    for asked in (("plan", "sft"), ("sft", "--plan_only")):
        ran = autofit(*asked, "--plan", str(plan), "--json")
        assert ran.code == 0, ran.err
        assert json.loads(ran.out) == json.loads(plan.read_text())
        assert rehearsed(ran) == 0


def test_the_command_that_trains_with_a_plan_leaves_out_the_card_and_what_only_predicts(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request, output = flags.read("autofit plan sft", ["--model", "tiny", "--gpu=rtx3060", "--tokens", "20M"])
    assert request.autofit.tokens == 20 * 10**6
    commands._print_plan(Plan.load(plan), request, output)
    assert "autofit sft --model tiny\n" in capsys.readouterr().out


def test_an_export_is_all_there_is_on_stdout_and_names_what_lora_adapts(autofit: Autofit, plan: Path) -> None:
    ran = autofit("sft", "--plan", str(plan), "--export", "axolotl")
    said = yaml.safe_load(ran.out)
    assert ran.code == 0
    assert (said["base_model"], said["micro_batch_size"], said["sequence_len"]) == ("tiny", 2, 64)
    assert said["lora_target_modules"] == ["q_proj", "v_proj"]
    assert said["output_dir"] == "tiny-SFT"
    assert "# - data_seed 3: Axolotl has no key for it here\n" in ran.out
    assert "all details" in ran.err


def test_a_dry_run_is_the_config_the_command_and_the_environment(autofit: Autofit, plan: Path) -> None:
    ran = autofit("sft", "--plan", str(plan), "--dry_run", "--json")
    said = json.loads(ran.out)
    assert ran.code == 0
    assert said["config"]["per_device_train_batch_size"] == 2
    assert said["command"][-4:] == ["-m", "trl.scripts.sft", "--config", "trl.yaml"]
    assert said["environment"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_VISIBLE_DEVICES": "0"}


def test_flags_given_beside_a_plan_are_laid_over_its_words_and_it_is_rehearsed_once(
    autofit: Autofit, plan: Path, files: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.json"
    flags = f"--model_name_or_path {files}/tiny --gpu rtx3060 --learning-rate 1e-5 --max_length=32 --out {again}"
    ran = autofit("plan", "sft", "--plan", str(plan), *shlex.split(flags))
    assert ran.code == 0, ran.err
    assert rehearsed(ran) == 1
    before, after = Plan.load(plan), Plan.load(again)
    given = {"model_name_or_path": f"{files}/tiny", "learning_rate": 1e-5, "max_length": 32}
    assert after.job.arguments == before.job.arguments | given
    assert after.knobs == replace(before.knobs, max_length=32, learning_rate=1e-5)
    assert (after.job.model, after.estimate.hardware.name) == (f"{files}/tiny", "rtx3060")
    assert all(changed in after.warnings[-1] for changed in ("max_length 64 -> 32", "300MiB -> rtx3060"))


def test_what_contradicts_it_is_refused_with_a_command_that_plans_again(autofit: Autofit, plan: Path) -> None:
    ran = autofit("sft", "--plan", str(plan), "--plan_only", "--per_device_train_batch_size", "4")
    assert (ran.code, ran.out, rehearsed(ran)) == (2, "", 0)
    assert "autofit plan sft --model tiny" in ran.err
    assert "--per_device_train_batch_size 4" in ran.err
    other = autofit("grpo", "--plan", str(plan))
    assert other.code == 2
    assert f"autofit sft --plan {plan}" in other.err


def test_training_on_the_plans_card_needs_no_gpu_flag_where_it_is_simulated(autofit: Autofit, plan: Path) -> None:
    """It comes as far as the output folder, which is the model's."""
    ran = autofit("sft", "--plan", str(plan), "--simulate", "--output_dir", "tiny")
    assert (ran.code, "is the model's folder" in ran.err) == (62, True), ran.err
    assert autofit("sft", "--plan", str(plan)).code == 10, "no GPU is here"


def test_a_plan_made_of_a_scripts_objects_is_followed_there(autofit: Autofit, plan: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.json"
    replace(Plan.load(plan), objects="digest").save(made)
    ran = autofit("sft", "--plan", str(made), "--plan_only")
    assert ran.code == 2
    assert f'AutoFit(plan="{made}")' in ran.err
    named = autofit("sft", "--plan", str(made), "--plan_only", "--model", "tiny", "--dataset", "data.jsonl", "--json")
    assert json.loads(named.out)["objects"] is None


def test_the_command_that_plans_again_says_every_word_of_the_job(worker: Worker) -> None:
    job = Job(
        method="sft",
        model="my model",
        dataset="data.jsonl",
        arguments={"max_length": None, "lora_target_modules": ["q_proj", "v_proj"], "use_peft": True}
        | {"packing": False, "learning_rate": 1e-5, "expandable_segments": True, "report_to": "none"}
        | {"sharding": "fsdp2", "fsdp_offload_params": True},
        effective_batch_size=12,
        fit="rounding",
        forbid=frozenset({"lora", "micro_batch"}),
        max_slowdown=2.5,
    )
    typed = shlex.split(command(job, AutoFit(gpu="l4", gpus=4), out="plan.json"))
    assert typed[:3] == ["autofit", "plan", "sft"]
    request, output = flags.read("autofit plan sft", typed[3:])
    given, _ = worker.parse("sft", request.argv, {}, {}, flags.own_names(), request.autofit.pins)
    assert request.job(given) == job
    assert (request.autofit.gpu, request.autofit.gpus, output.out) == ("l4", 4, "plan.json")
