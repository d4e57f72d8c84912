"""Every script in ``scripts`` runs: its main path on the smallest case that there is, but for the hardware.

Processes that a script starts are forked off one that has imported everything (``tests/forked.py``).
"""

import csv
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import command_cases.runs
import gpu_records.runs
import hollow_cuda.hours
import mixed_runs
import pytest
import survival_cases.command
from accuracy_rows import adapters
from gpu_records.record import Levels, read_records, write
from hollow_cuda.build import Hollow
from hollow_cuda.cases import small_cases
from real_allocator import simulated
from recorded_run import a_record
from script_runner import SCRIPTS, Script

from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.estimator.mixed_steps import reserved_after
from autotrain_mem.support.yaml_files import recipe
from autotrain_mem.types import Knobs
from tests.forked import Forge
from tests.tiny import tiny_config

pytestmark = pytest.mark.slow

ROOT = SCRIPTS.parent
OF_BASH = ("browser", "docs", "environment", "install_check", "newest", "quickstart", "test", "versions")
INSTRUMENTS = sorted(path.name for path in SCRIPTS.iterdir() if path.is_file() and not path.suffix)

Load = Callable[..., Script]


def test_every_script_has_a_smoke_test_and_is_checked_for_style_and_types() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    ours = sorted(set(INSTRUMENTS) - set(OF_BASH))
    packages = sorted(path.parent.name for path in SCRIPTS.glob("*/__init__.py"))
    assert sorted(tools["ruff"]["extend-include"]) == [f"scripts/{name}" for name in ours]
    checked = [f"scripts/{name}" for name in (*ours, *packages, "bench.py")]
    assert sorted(tools["mypy"]["files"]) == ["autotrain_mem", *sorted(checked), "tests/api/typed_script.py"]
    elsewhere = {"test_oracle", "test_survival"}  # in files of that name
    assert {f"test_{name}" for name in (*ours, "quickstart")} <= set(globals()) | elsewhere


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models")
    for name, layers in {"Qwen/Qwen2.5-0.5B": 2, "meta-llama/Llama-3.1-8B": 8}.items():
        config = tiny_config("qwen2").to_dict() | {"architectures": ["Qwen2ForCausalLM"], "layer_types": None}
        (folder / name).mkdir(parents=True)
        deeper = {"num_hidden_layers": layers, "max_position_embeddings": 4096}
        (folder / name / "config.json").write_text(json.dumps(config | deeper), encoding="utf-8")
    return folder


ROW = {
    **{"id": "one", "model": "Qwen/Qwen2.5-0.5B", "task": "sft", "method": "lora", "gpu": "A100-80GB", "n_gpus": "1"},
    **{"metric": "allocated", "core": "A", "offload": "none", "quant": "", "stack": "trl", "versions": "torch 2.13"},
    **{"batch": "2", "seq_len": "64", "grad_accum": "1", "grad_ckpt": "yes", "attn": "sdpa", "loss_impl": "liger"},
    **{"weights_dtype": "bfloat16", "mixed_precision": "bf16", "optimizer": "adamw_torch", "lora_r": "8"},
    **{"lora_targets": "q_proj v_proj", "notes": "", "nvidia_smi_gib": "", "reserved_gib": "0.02"},
}


def write_csv(path: pathlib.Path, *rows: dict[str, str]) -> pathlib.Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_accuracy(script: Load, models: pathlib.Path, tmp_path: pathlib.Path, forge: Forge) -> None:
    rows = [{**ROW, "id": name, "alloc_gib": size} for name, size in (("near", "0.0025"), ("far", "0.1"), ("bare", ""))]
    runs = write_csv(tmp_path / "runs.csv", *rows)
    with forge.children():
        missed = script("accuracy").run("--runs", runs, "--models", models, "--limit", 0.5)
    missed.assert_says("left out: 1 rows (no allocated peak was measured)", "per family", code=1)


def test_accuracy_of_adapters(
    script: Load, models: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models / "Qwen/Qwen2.5-0.5B"
    monkeypatch.setattr(adapters, "LONGEST", 2)
    config = {"batch_size": 4, "autocast_adapter_dtype": True, **adapters.PLAIN}
    targets = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    for name, adapter in {adapters.KNOWN: "LORA", "vera--here": "VERA", "frod--here": "FROD"}.items():
        info = {"peft_config": {"peft_type": adapter, **targets}, "train_config": config}
        trained = {"status": "success", "accelerator_memory_max": 1}
        result = {"run_info": info, "train_info": trained}
        if adapter == "VERA":
            trained["accelerator_memory_max"] = adapters.rehearsed_bytes(model, adapters.Run(name, result), 1)
        (tmp_path / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    ran = script("accuracy").run("--adapters", tmp_path, "--model", model)
    ran.assert_says("rows of 1 tokens", "GiB reserved +0.0%", "not rehearsed: which parts of a weight")


def test_change_cost(script: Load) -> None:
    ran = script("change_cost", holds=lambda *_: True).run()  # the contract and four plans: half a minute each
    ran.assert_says("method: 4 files", "setting: 2 files", "rule: 1 files")


def test_throughput(script: Load, models: pathlib.Path, tmp_path: pathlib.Path) -> None:
    runs = write_csv(tmp_path / "runs.csv", *({**ROW, "id": name, "alloc_gib": "1"} for name in "abc"))
    values = {"a": "3", "b": "4", "x": "5"}
    rates = write_csv(tmp_path / "rates.csv", *({"id": name, "value": value} for name, value in values.items()))
    ran = script("throughput").run("--runs", runs, "--rates", rates, "--models", models)
    ran.assert_says("left out: 1 rows (its settings are not stated)", "least tau of 0 families")  # two make no order


def test_parity(script: Load) -> None:
    ran = script("parity").run("--methods", "sft", "--variants", "full", "--families", "gpt2")
    ran.assert_says("2 compared at", ", 0 different")


def test_rank_parity(script: Load) -> None:
    small = ("--families", "gemma3", "--processes", 2, "--accumulation", 2, "--checkpointing", "off")
    ran = script("rank_parity").run(*small, "--strategies", "fsdp2-no-reshard", "--modes", "lora-bf16,8-bit")
    ran.assert_says("1 compared, 0 different")  # FSDP shards no 8-bit base


def test_expansion(script: Load, models: pathlib.Path) -> None:
    names = ("--names", "Qwen/Qwen2.5-0.5B,meta-llama/Llama-3.1-8B")
    ran = script("expansion").run("--models", models, *names, "--settings", "lora", "--layers", 0)
    ran.assert_says("rehearsed whole: no pattern, or too few layers", "0.0000%", "same events")


def test_record_gpu(script: Load, tmp_path: pathlib.Path, forge: Forge) -> None:
    record_gpu, accuracy = script("record_gpu"), script("accuracy")
    with forge.commands(gpu_records.runs):
        ran = record_gpu.run("--dry", "--out", tmp_path, "--only", "grpo-4bit")
        ran.assert_says("1 recorded now, 1 of 1 in all, 0 failed")
        (record,) = read_records(tmp_path)
        assert (record.case.method, record.case.knobs.load_in_4bit) == ("grpo", True)
        assert len(record.history) > 1000
        assert record.trained.peak_reserved_bytes >= record.trained.peak_allocated_bytes > 0
        accuracy.run("--records", tmp_path, "--differences").assert_says("1 of 1 histories replay to the byte")


RECORDED: dict[str, Any] = json.loads((ROOT / "tests" / "rehearsal" / "recorded_cuda.json").read_text())


def test_cuda_parity(script: Load, tmp_path: pathlib.Path, forge: Forge) -> None:
    cuda_parity = script("cuda_parity", build=Hollow)
    for case, measured in zip(small_cases(), RECORDED["cases"], strict=True):
        sizes = {name: measured[name] for name in ("peak_allocated_bytes", "peak_reserved_bytes")}
        record = replace(
            a_record(case),
            model_files={"config.json": json.dumps(RECORDED["model_config"])},
            versions=RECORDED["versions"],
            trained=Levels(allocated_bytes=0, reserved_bytes=0, **sizes),
            memory_stats={"num_alloc_retries": measured["num_alloc_retries"]},
        )
        write(tmp_path / "runs", record)
    with forge.children():
        cuda_parity.run("--cache", tmp_path, "--only", "small-sft-lora").assert_says("1 figures, 0.0", "1 cases: kept")
    assert cuda_parity.run("--cache", tmp_path, "--record", tmp_path / "again.json").code == 0
    again = json.loads((tmp_path / "again.json").read_text())
    for one in (again, expected := json.loads(json.dumps(RECORDED))):
        one["date"] = None
        for case in one["cases"]:
            case["knobs"] = Knobs(**case["knobs"])  # of which there may be more by now
    assert again == expected


def test_cuda_parity_over_hours(script: Load, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_parity = script("cuda_parity", build=Hollow)
    pair = mixed_runs.rehearsed(mixed_runs.LONGEST), mixed_runs.rehearsed(mixed_runs.SHORTER)
    tokens = [200, 700, 1000, 400, 300, 900, 200, 640, 1000, 333]
    reserved = reserved_after(*pair, tokens, AllocatorSettings(), longest_first=False)
    monkeypatch.setattr(hollow_cuda.hours, "rehearsed", lambda *_: pair)
    monkeypatch.setattr(hollow_cuda.hours.api, "Worker", nullcontext)
    (tmp_path / "hours").mkdir()
    for share, code in ((1.0, 0), (1.1, 1)):
        rows = [{"tokens": each, "reserved": int(share * size)} for each, size in zip(tokens, reserved, strict=True)]
        (tmp_path / "hours" / "dpo-lora-1024-checkpointing-10.json").write_text(json.dumps(rows))
        ran = cuda_parity.run("--cache", tmp_path, "--hours", 10, "--only", "dpo-lora-1024-checkpointing")
        assert ran.code == code, ran.out


COMMAND_OUTPUT = """
probe: 8 x 1 rows of 320 tokens: needs 558.0 MiB of 1.07 GiB, predicted 558.0 MiB; 2 steps and a save in 3.1 s: fits
the training process ended after 3 steps (crash: killed by SIGKILL); a new one continues from step 2
  peak           {allocated} MiB allocated predicted, 200.0 MiB measured: error +0.0 %
                 378.0 MiB reserved predicted, 378.0 MiB measured: error +0.0 %
finished: 4 steps in 30.2 s, loss 6.778 -> 6.677, peak 378.0 MiB reserved, predicted 378.0 MiB
"""


def test_cuda_commands(script: Load, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an echo in the commands' place: what they print is compared, with the bars and with one another."""
    commands = script("cuda_commands", build=Hollow)

    def popen(command: list[str], **options: Any) -> Any:
        text = COMMAND_OUTPUT.format(allocated=207.0 if "sft-lora" in command[-1] else 200.0)
        return subprocess.Popen(
            [sys.executable, "-c", "import sys; print(sys.argv[1])", text], stdout=options["stdout"]
        )

    monkeypatch.setattr(command_cases.runs, "subprocess", SimpleNamespace(Popen=popen))
    only = ("--cache", tmp_path / "cache", "--work", tmp_path, "--only", "sft full", "kill -9, resumed: sft")
    commands.run(*only).assert_says("allocated: 2 figures, 0.00% off")
    ran = commands.run(*only, "sft lora", "driver")
    ran.assert_says("+3.50%", "FAILED a driver that is too old: exit code 0 instead of 12", code=1)


def test_allocator_parity(script: Load, tmp_path: pathlib.Path) -> None:
    """With our simulator in the place of torch's allocator: it answers as that does, and then at another address."""
    allocator_parity = script("allocator_parity", build=Hollow)
    tight = allocator_parity.names.of_kind("tight", 0, 50)
    allocator_parity.replace(plays=lambda *_: [tight])

    def really_at(modulus: int) -> Callable[..., Iterator[list[dict[str, Any]]]]:
        def really(hollow: Hollow, settings: str, played: Sequence[Any]) -> Iterator[list[dict[str, Any]]]:
            for play in played:
                answers = list(simulated(settings, play.card.capacity_bytes, play.card.total_bytes, play.events))
                for answer in answers:
                    for place in (answer, *answer.get("segments", ())):
                        place |= {"region": 0, "offset": place["address"] % modulus} if "address" in place else {}
                yield answers

        return really

    for modulus, code in ((4096, 1), (1 << 60, 0)):
        allocator_parity.replace(really=really_at(modulus))
        ran = allocator_parity.run("--settings", "expandable_segments:True")
        assert ran.code == code, ran.out
    assert allocator_parity.run("--settings", "", "--record", tmp_path).code == 0
    assert json.loads((tmp_path / "default.json").read_text())["at_the_end"]["num_ooms"] > 0


def test_search_quality(script: Load, models: pathlib.Path, forge: Forge) -> None:
    search_quality = script("search_quality")
    small = replace(next(search_quality.names.questions()), flags="--max_length 64", effective_batch_size=1)
    search_quality.replace(questions=lambda: [small])
    with forge.children():
        ran = search_quality.run("--models", models, "--jobs", 1)
    ran.assert_says("Qwen2.5-0.5B sft 1 rows, max_length 64, rtx3060", "skipped levels that have a plan 0")


def test_quality(script: Load) -> None:
    """Two steps teach nothing: full fine-tuning and a bare adapter end alike, which misses a bar."""
    quality = script("quality", ProcessPoolExecutor=lambda *_: ThreadPoolExecutor(1), TRAINED_TEXTS=20)
    quality.replace(SIZE=quality.names.Size(layers=1, pretraining_steps=1, steps=2, rows=40, held_out=4))
    quality.run("--seeds", 1).assert_says("LoRA with default settings: at least 1.", code=1)


def test_first_day(script: Load, tmp_path: pathlib.Path, forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails ends only itself; what is sent holds no name of the user or the machine, and no path."""
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "lovelace.example.org")
    first_day, out = script("first_day"), tmp_path / "day"
    first_day.names.FLAGS["sft"] += " --max_length 64"
    steps = ("doctor", "record", "resume", "accuracy")
    with forge.commands(first_day.names, survival_cases.command, gpu_records.runs):
        ran = first_day.run("--dry", "--out", out, "--only", *steps)
    ran.assert_says("1 of 1 histories replay", "allocated, MiB   predicted", *map("{:10} passed".format, steps))

    def fails(options: Any, seconds: float) -> Any:
        raise OSError(f"ada: {ROOT}/x.py,\n/srv/data/y, https://h.co/a/b, GPU-{'0' * 8}-11, lovelace")

    first_day.replace(steps=lambda *_: {"one": (1, fails), "two": (-1, fails)}, write_material=lambda options: None)
    first_day.run("--dry", "--out", out).assert_says("one        failed: OSError", "two        left out", code=1)
    shutil.unpack_archive(f"{out}.tar.gz", tmp_path / "sent")
    texts = {path.name: path.read_text() for path in (tmp_path / "sent").rglob("*.*")}
    assert r"one        failed: OSError('USER: x.py,\n..., https://h.co/a/b, GPU-UUID, HOST')" in texts["summary.txt"]
    assert {"sft-lora-512.record.json", "plan.json", "run.json", "events.jsonl"} <= set(texts)
    private = rf"{tmp_path}|{ROOT}|{pathlib.Path.home()}\b|\blovelace\b|\bada\b"
    assert not [name for name, text in texts.items() if re.search(private, text)]


def test_recipes(script: Load, models: pathlib.Path, tmp_path: pathlib.Path, forge: Forge) -> None:
    recipes, one = script("recipes"), recipe("sft-qwen2.5-0.5b")
    copied = replace(one, path=tmp_path / one.path.name)
    copied.path.write_text(one.path.read_text(encoding="utf-8"), encoding="utf-8")
    recipes.replace(all_rows=lambda: [(copied, one.card)], GOLDEN=tmp_path)
    small = ["--model", str(models / "Qwen/Qwen2.5-0.5B"), "--max_length", "64", "--effective_batch_size", "2"]
    recipes.replace(flags=lambda recipe, models: small)
    arguments = ("--models", models, "--only", one.name, "--cache", tmp_path / "cache")
    with forge.commands(recipes.names):
        codes = [recipes.run(*arguments, *more).code for more in ((), ("--write",))]
    assert codes == [1, 0]
    assert "# peak" in copied.path.read_text(encoding="utf-8")
    assert (tmp_path / f"{one.name}.{one.card}.txt").read_text().startswith("level lossless\nneeds ")


def test_speed(script: Load, models: pathlib.Path, forge: Forge) -> None:
    """Nothing is imported here, so each command takes many times as long as the import."""
    speed = script("speed", _cpu=time.process_time)  # of children that another process waits for
    few = "--max_length 64 --per_device_train_batch_size 2 --effective_batch_size 2 --gradient_checkpointing true"
    estimate, plan = speed.names.ESTIMATES[0], speed.names.PLANS[0]
    plan = replace(plan, words=f"sft --model SMALL --gpu rtx4090 {few}")
    speed.replace(ESTIMATES=(replace(estimate, words=estimate.words.replace("LLAMA", "SMALL")),))
    speed.replace(AT_ONCE=speed.names.AT_ONCE[:1], PLANS=(plan,))
    with forge.commands(speed.names):
        ran = speed.run("--runs", 1, "--models", models)
    ran.assert_says(estimate.what, "  the same plan again", " rehearsals", "an unknown card", code=1)


PYTHON = """#!/bin/sh
echo "$*" >> "$RAN"
[ "$2" != wheel ] && [ "$3" != wheel ] || { mkdir wheel; touch wheel/autotrain_mem-0-py3-none-any.whl; }
[ "$2" != venv ] || { mkdir -p "$3/bin" "$3/lib/python3/site-packages"; cp "$0" "$3/bin/python"; }
[ "$2" != venv ] || cp "$0" "$3/bin/autofit"
[ "$1" != gpus ] || { echo no such card; exit 1; }
"""


def test_install_check(tmp_path: pathlib.Path) -> None:
    """Its commands in their order, without an installation; one that fails makes the exit status."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "RAN": str(tmp_path / "ran")}
    done = subprocess.run([ROOT / "scripts" / "install_check"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "autofit gpus: status 1, 0 s\nno such card\nautofit recipes: status 0" in done.stdout
    ran = (tmp_path / "ran").read_text().splitlines()
    installed = [line.split("/")[-1] for line in ran if line.endswith(("torch", ".whl"))]
    assert installed == ["constraints.txt torch", "autotrain_mem-0-py3-none-any.whl"]
    assert ran[-3:] == [f"{verb} quickstart-run/run" for verb in ("report", "watch", "explain")]


def test_trl_suite(script: Load, tmp_path: pathlib.Path) -> None:
    """Tests that only TRL's classes pass are told; what TRL's fail too, or skip, is not compared."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sft_trainer.py").write_text(OF_TRL)
    ran = script("trl_suite").run("--trl", tmp_path, "--files", "sft", "--work", tmp_path)
    ran.assert_says(
        "sft: 2 pass with TRL's classes, 1 of them with ours", "1 fail here with TRL's, 1 are skipped", code=1
    )
    ran.assert_says("test_classes: AssertionError: autotrain_mem", code=1)


OF_TRL = """
import pytest
from datasets import load_dataset
from transformers import AutoConfig
from trl import SFTTrainer

def test_classes():
    assert SFTTrainer.__module__.startswith("trl."), SFTTrainer.__module__

def test_stand_ins():
    assert AutoConfig.from_pretrained("trl-internal-testing/tiny-Qwen2ForCausalLM-2.5").model_type == "qwen2"
    (row,) = load_dataset("trl-internal-testing/zen", "conversational_preference", split="train[:1]")
    assert [row[name][0]["role"] for name in ("prompt", "chosen", "rejected")] == ["user", "assistant", "assistant"]
    texts = load_dataset("trl-internal-testing/zen", "standard_language_modeling", streaming=True)["test"]
    assert "text" in next(iter(texts))

def test_of_nobody():
    raise ValueError

@pytest.mark.skip
def test_skipped(): ...
"""


def test_versions(tmp_path: pathlib.Path) -> None:
    """The set is installed in place of the pinned versions, with torch first; an error of pip fails it."""
    python = tmp_path / "python"
    environment = {**os.environ, "PYTHON": str(python), "RAN": str(tmp_path / "ran"), "TMPDIR": str(tmp_path)}
    for said, end in (("passes", "true"), ("failed", '[ "$3" != install ]')):
        python.write_text(f"{PYTHON}{end}\n")
        python.chmod(0o755)
        versions = [ROOT / "scripts" / "versions", "peft==0.18.1 trl==1.10.0"]
        done = subprocess.run(versions, env=environment, capture_output=True, text=True)
        assert f"peft==0.18.1 trl==1.10.0: {said}" in done.stdout, done.stderr
        assert done.returncode == (said == "failed")
    first, second = [line.split() for line in (tmp_path / "ran").read_text().splitlines() if " install " in line][:2]
    assert first[-1].startswith("torch==")
    assert {"peft==0.18.1", "trl==1.10.0", first[-1]} <= {*second}
    assert sum(each.startswith(("peft=", "trl=")) for each in second) == 2


def test_quickstart(tmp_path: pathlib.Path) -> None:
    for name in ("pyproject.toml", "scripts/constraints.txt", "scripts/environment", "scripts/quickstart"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "autofit"):
        (commands / name).write_text(f'#!/bin/sh\necho "{name} $*"\n')
        (commands / name).chmod(0o755)
    quickstart = ["bash", str(tmp_path / "scripts" / "quickstart"), "--steps", "3"]
    around = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    first, second = (subprocess.check_output(quickstart, env=around, text=True).splitlines() for _ in range(2))
    assert first[-1:] == second == ["autofit quickstart --steps 3"]
    assert [line.split()[:4] for line in first[1:-1]] == [["python", "-m", "pip", "install"]] * 5
