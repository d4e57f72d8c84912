"""What a user reads after every mistake. Golden files hold the words; AUTOFIT_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import threading
from pathlib import Path

import bad_cards
import bad_methods
import bad_pairs
import bad_plans
import bad_preflight
import bad_sweeps
import pytest
from command_line import Autofit, Ran

from autotrain_mem import api, errors
from autotrain_mem.rehearsal.client import Worker
from autotrain_mem.rehearsal.pool import Workers

GOLDEN = Path(__file__).parent / "golden"

TINY = "--model tiny --gpu 300MiB"
PLAN = f"plan sft {TINY}"
DATA = f"{PLAN} --dataset data.jsonl"
ESTIMATE = "estimate sft --gpu 300MiB"
REFUSED_FLAGS = "--load_in_4bit --padding_free --deepspeed ds.json --fsdp full_shard --auto_find_batch_size"

CASES = {
    # what was typed
    "unknown_flag": (2, f"sft {TINY} --learning-rat 1e-4"),
    "unknown_flags": (2, f"sft {TINY} --max_lenght 5 --batchsize=4 --epochs 3 --zzzzqq 1"),
    "unknown_flag_ours": (2, "sft --model tiny --gpus rtx3060"),
    "opposite_of_flag": (2, f"sft {TINY} --no_use_peft"),
    "stray_words": (2, f"sft {TINY} extra words"),
    "unknown_command": (2, "stf --model tiny"),
    "unknown_method": (2, "plan gpro"),
    "no_method": (2, "plan --model tiny"),
    "gpus_flag": (2, "gpus --foo"),
    "no_model": (2, "sft"),
    "number_expected": (2, f"sft {TINY} --learning_rate abc"),
    "value_missing": (2, "sft --model tiny --gpu"),
    "choice": (2, f"sft {TINY} --packing_strategy bfdd"),
    "truth_expected": (2, f"sft {TINY} --gradient_checkpointing maybe"),
    "fit_choice": (2, f"{DATA} --fit nonsense"),
    "forbid_unknown": (2, f"{DATA} --forbid lora,foo,checkpointing"),
    "slowdown_below_1": (2, f"{PLAN} --max_slowdown 0.5"),
    "slowdown_nan": (2, f"{PLAN} --max_slowdown nan"),
    "slowdown_words": (2, f"{PLAN} --max_slowdown twice"),
    "headroom_words": (2, f"{DATA} --headroom nonsense"),
    "headroom_infinite": (2, f"{DATA} --headroom inf%"),
    "headroom_negative": (2, f"{DATA} --headroom=-5%"),
    "headroom_share_too_large": (2, f"{DATA} --headroom 200%"),
    "headroom_size_too_large": (2, f"{DATA} --headroom 400MiB"),
    "not_rehearsed_yet": (2, f"{ESTIMATE} --model tiny {REFUSED_FLAGS}"),
    "tracker_not_installed": (2, f"{DATA} --report_to clearml"),
    "no_checkpoint": (2, f"{DATA} --output_dir nowhere --resume_from_checkpoint"),
    "no_checkpoint_folder": (2, f"{DATA} --resume_from_checkpoint nowhere"),
    "trl_refuses": (2, f"{DATA} --loss_type nll --accelerator_config nowhere.json"),
    "max_length_zero": (2, f"{DATA} --max_length 0"),
    "max_length_negative": (2, f"{DATA} --max_length -5"),
    "max_length_percentile_none": (2, f"{DATA} --max_length p0"),
    "max_length_percentile_above": (2, f"{DATA} --max_length p101"),
    "max_length_percentile_words": (2, f"{DATA} --max_length pfoo"),
    "max_length_words": (2, f"{DATA} --max_length abc"),
    "effective_batch_zero": (2, f"{DATA} --effective_batch_size 0"),
    "effective_batch_words": (2, f"{DATA} --effective_batch_size x"),
    "streaming": (2, f"{DATA} --dataset_streaming"),
    # the YAML file
    "config_missing": (2, "sft --config nowhere.yaml"),
    "config_folder": (2, "sft --config tiny"),
    **{f"config_{path}": (2, f"sft --config={path}.yaml") for path in ("not_yaml", "not_utf8", "a_list", "empty")},
    "config_unknown_keys": (2, "sft --config unknown_keys.yaml"),
    "config_env_number": (2, "sft --config env_number.yaml"),
    "config_autofit_number": (2, "sft --config autofit_number.yaml"),
    "config_autofit_unknown": (2, "sft --config autofit_unknown.yaml"),
    "config_autofit_choice": (2, "sft --config autofit_choice.yaml"),
    "config_wrong_type": (2, "sft --config wrong_type.yaml"),
    "config_wrong_length": (2, "sft --config wrong_length.yaml"),
    # the device
    "no_gpu": (10, "sft --model tiny"),
    "no_gpu_to_train_on": (10, "sft --model tiny --gpu rtx3060"),
    "unknown_gpu": (11, "plan sft --model tiny --gpu rtx309"),
    "ambiguous_gpu": (11, "plan sft --model tiny --gpu a100"),
    "gpu_in_gigabytes": (11, "plan sft --model tiny --gpu 24GB"),
    "simulate_without_gpu": (2, "sft --model tiny --simulate"),
    "gpu_and_cpu": (2, "sft --model tiny --gpu rtx3060 --use_cpu"),
    # the model
    "model_no_config": (20, f"{ESTIMATE} --model no_config"),
    "model_is_a_file": (20, f"{ESTIMATE} --model tiny/config.json"),
    "model_unreachable": (20, f"{ESTIMATE} --model no-such-org/no-such-model"),
    "model_no_tokenizer": (20, "plan sft --model no_tokenizer --gpu 300MiB --dataset data.jsonl"),
    "model_cut_short": (23, f"{ESTIMATE} --model cut_short"),
    "model_a_list": (23, f"{ESTIMATE} --model a_list"),
    "model_no_type": (23, f"{ESTIMATE} --model no_type"),
    "model_wrong_size": (23, f"{ESTIMATE} --model wrong_size"),
    "model_made_up_type": (21, f"{ESTIMATE} --model made_up_type"),
    "model_made_up_class": (21, f"{ESTIMATE} --model made_up_class"),
    "model_no_class": (21, f"{ESTIMATE} --model no_class"),
    "model_bert": (21, f"{ESTIMATE} --model bert"),
    "model_t5": (21, f"{ESTIMATE} --model t5"),
    "context_exceeded": (22, f"{DATA} --max_length 100000"),
    # the data
    "data_no_file": (30, f"{PLAN} --dataset nowhere.jsonl"),
    "data_no_path": (30, f"{PLAN} --dataset ./nowhere"),
    "data_unreachable": (30, f"{PLAN} --dataset no-such-org/no-such-data"),
    "data_no_files": (30, f"{PLAN} --dataset no_files"),
    "data_empty": (31, f"{PLAN} --dataset empty.jsonl"),
    "data_blank": (31, f"{PLAN} --dataset blank.jsonl"),
    "data_no_rows_json": (31, f"{PLAN} --dataset no_rows.json"),
    "data_no_rows_csv": (31, f"{PLAN} --dataset header_only.csv"),
    "data_text_is_empty": (31, f"{PLAN} --dataset text_is_empty.jsonl"),
    "data_kind": (32, f"{PLAN} --dataset notes.txt"),
    "data_not_json": (32, f"{PLAN} --dataset not_json.jsonl"),
    "data_not_an_object": (32, f"{PLAN} --dataset not_an_object.jsonl"),
    "data_not_utf8": (32, f"{PLAN} --dataset not_utf8.jsonl"),
    "data_cut_short": (32, f"{PLAN} --dataset cut_short.json"),
    "data_open_quote": (32, f"{PLAN} --dataset open_quote.csv"),
    "data_not_parquet": (32, f"{PLAN} --dataset not_parquet.parquet"),
    "data_other_columns": (33, f"{PLAN} --dataset other_columns.jsonl"),
    "data_other_text_field": (33, f"{PLAN} --dataset text.jsonl --dataset_text_field body"),
    "data_no_split": (33, f"{DATA} --dataset_train_split nowhere"),
    "data_no_test_split": (33, f"{DATA} --eval_strategy steps --eval_steps 5"),
    "data_no_template": (33, "plan sft --model no_template --gpu 300MiB --dataset data.jsonl"),
    **{
        f"data_{name}": (33, f"{PLAN} --dataset {name}.jsonl")
        for name in ("text_is_object", "text_is_number", "text_is_null", "messages_empty", "messages_text")
    },
    **{
        f"data_{name}": (33, f"{PLAN} --dataset {name}.jsonl")
        for name in ("messages_no_role", "prompt_and_text", "ids_empty")
    },
    # the plan and its rehearsal
    "batch_does_not_split": (40, f"{DATA} --effective_batch_size 10 --per_device_train_batch_size 4"),
    "does_not_fit": (41, "plan sft --model tiny --gpu 14MiB --dataset data.jsonl --max_length 512 --fit lossless"),
    "does_not_fit_pinned": (
        41,
        "plan sft --model tiny --gpu 56MiB --dataset data.jsonl --per_device_train_batch_size 8 --max_length 512 "
        "--gradient_checkpointing false --fit lossless",
    ),
    "optimizer_not_installed": (50, f"{ESTIMATE} --model tiny --max_length 16 --optim lomo"),
    "lora_target_unknown": (2, f"{ESTIMATE} --model tiny --max_length 16 --use_peft --lora_target_modules nope"),
    # the output folder
    "output_is_a_file": (62, f"sft {TINY} --simulate --dataset data.jsonl --output_dir data.jsonl"),
    "output_below_a_file": (62, f"sft {TINY} --simulate --dataset data.jsonl --output_dir data.jsonl/run"),
    "output_holds_a_run": (62, f"sft {TINY} --simulate --dataset data.jsonl --output_dir tiny"),
    "quickstart_folder_exists": (2, "quickstart --folder tiny"),
    "quickstart_unknown_flag": (2, "quickstart --foo"),
    "quickstart_unwritable": (62, "quickstart --folder data.jsonl/run"),
    # the environment
    "allocator_unknown_option": (2, f"{ESTIMATE} --model tiny --max_length 16"),
    "allocator_wrong_value": (2, f"{PLAN} --max_length 16"),
    "mishaps_unknown": (2, f"sft {TINY} --simulate --dataset data.jsonl --output_dir nowhere"),
    "allocator_of_env_block": (2, "plan sft --config env_allocator.yaml --gpu 300MiB --max_length 16"),
    **bad_cards.CASES,
    **bad_methods.CASES,
    **bad_pairs.CASES,
    **bad_plans.CASES,
    **bad_preflight.CASES,
    **bad_sweeps.CASES,
}

SHELL = {
    "allocator_unknown_option": ("PYTORCH_ALLOC_CONF", "max_split_size:64"),
    "allocator_wrong_value": ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:yes"),
    "mishaps_unknown": ("AUTOFIT_MISHAPS", "oom:sometimes"),
}
"""What the shell sets, where that is the mistake."""

ELSEWHERE = {
    3: "tests/trainers/test_ppo.py, test_help_of_a_method_that_is_not_installed_prints_no_half",
    1: "test_debug_shows_a_traceback_and_nothing_else_does",
    12: "tests/machine/test_detect.py",
    13: "tests/machine/test_room.py",
    51: "test_a_killed_worker_is_named_with_its_signal",
    52: "tests/test_processes.py",
    60: "test_training.py",
    61: "test_training.py",
    130: "test_training.py",
}
"""Exit codes that no command line alone brings about, and where they are met."""


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", CASES)
def test_every_mistake_has_one_clear_message(
    name: str, autofit: Autofit, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, line = CASES[name]
    typed = f"autofit {line}"
    if name in SHELL:
        monkeypatch.setenv(*SHELL[name])
        typed = f"{'='.join(SHELL[name])} {typed}"
    ran = autofit(*shlex.split(line))
    text = f"$ {typed}\nexit code {ran.code}\n{_normal(_message(ran), files, name)}"
    if os.environ.get("AUTOFIT_UPDATE_GOLDEN"):
        (GOLDEN / f"{name}.txt").write_text(text)
    assert text == (GOLDEN / f"{name}.txt").read_text()
    _is_one_message(ran, code)


def _message(ran: Ran) -> str:
    """From the error on: before it stands what was rehearsed."""
    return ran.err[ran.err.index("error: ") :]


def _normal(text: str, files: Path, name: str) -> str:
    text = re.sub(r"(transformers) \d+\.\d+\.\d+", r"\1 VERSION", text.replace(str(files), "FILES"))
    if name == "tracker_not_installed":
        text = re.sub(r"one of .*", "one of TRACKERS", text)
    return re.sub(r"[\d.]+ (B|KiB|MiB)\b", "SIZE", text) if name.startswith("does_not_fit") else text


def _is_one_message(ran: Ran, code: int) -> None:
    """The invariants beside the golden words."""
    assert ran.code == code
    assert len(re.findall("^error: ", ran.err, re.MULTILINE)) == 1
    assert "Traceback" not in ran.out + ran.err
    first, *hints = _message(ran).rstrip().splitlines()
    assert len(first) > len("error: ") + 10
    assert hints, "what to do about it is missing"
    assert all(hint.startswith("  ") for hint in hints)
    assert ran.out.strip() == "" or ran.out.strip().startswith("1. A tiny model")  # quickstart's first chapter


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


def test_every_error_has_its_own_exit_code_and_is_met_by_a_test() -> None:
    codes = [kind.exit_code for kind in errors._tree(errors.AutofitError).values() if "exit_code" in vars(kind)]
    assert len(codes) == len(set(codes))
    assert set(codes) == {code for code, _ in CASES.values()} | set(ELSEWHERE)


def test_debug_shows_a_traceback_and_nothing_else_does(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = autofit("estimate", "sft", "--model", "no_config", "--gpu", "300MiB")
    debugged = autofit("estimate", "sft", "--model", "no_config", "--gpu", "300MiB", "--debug")
    assert "Traceback" not in plain.err
    assert "Traceback" in debugged.err
    assert plain.err in debugged.err

    def defect() -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(api, "gpus", defect)
    unforeseen = autofit("gpus")
    assert (unforeseen.code, unforeseen.out) == (1, "")
    assert "--debug" in unforeseen.err
    assert "Traceback" not in unforeseen.err


def test_a_message_is_whole_in_a_log_of_any_width(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["plan", "sft", "--model", "tiny", "--gpu", "rtx309"]
    wide = autofit(*line)
    monkeypatch.setenv("COLUMNS", "40")
    assert autofit(*line).err == wide.err


def test_json_keeps_stdout_empty_when_something_is_wrong(autofit: Autofit) -> None:
    ran = autofit("estimate", "sft", "--model", "no_config", "--gpu", "300MiB", "--json")
    assert (ran.code, ran.out) == (20, "")


@pytest.mark.usefixtures("kept")
def test_the_suggested_flags_fit(autofit: Autofit) -> None:
    """The error does the user's next sum: its flags, typed as they stand, make a plan."""
    line = CASES["does_not_fit_pinned"][1]
    refused = _message(autofit(*shlex.split(line)))
    sizes = re.search(r"needs +([\d.]+) MiB.*budget +([\d.]+) MiB", refused, re.DOTALL)
    assert sizes is not None
    assert float(sizes[1]) > float(sizes[2])
    nearest = re.search(r"nearest that fits: (--.*?)(?:, without (--.*?))?  \(", refused)
    assert nearest is not None, refused
    given = line
    for flag in re.findall(r"--\w+", nearest[2] or ""):
        given = re.sub(rf"{flag} \S+", "", given)
    ran = autofit(*shlex.split(f"{given} {nearest[1]} --json"))
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["estimate"]["fits"]


def test_a_killed_worker_is_named_with_its_signal(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker() as own:
        monkeypatch.setattr(api, "Workers", lambda count=None: Workers.holding(own))
        # It imports TRL for seconds before it answers the first question.
        threading.Timer(0.5, os.kill, (own.pid, signal.SIGKILL)).start()
        ran = autofit(*f"{ESTIMATE} --model tiny".split())
    _is_one_message(ran, errors.WorkerDiedError.exit_code)
    assert "killed by signal 9" in ran.err
