"""Plans in other tools' keys: the texts, and that every key exists and nothing the user said is lost; what each machine
of a cluster would run, whose words are autofit's own, whoever starts them.

``AUTOFIT_UPDATE_GOLDEN=1 scripts/test tests/exports`` writes the golden texts again.
"""

import dataclasses
import functools
import json
import os
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from nouns import TRL_DEFAULTS, divided
from transformers import TrainingArguments

from autotrain_mem.cli import flags
from autotrain_mem.cli.plan_files import check_export
from autotrain_mem.exports.tool_keys import keys_of, read_tool_file
from autotrain_mem.exports.tools import EXPORTERS, OF_MACHINES, export, methods_of
from autotrain_mem.exports.trl import dry_run
from autotrain_mem.parallel.launch_environment import launch_environment
from autotrain_mem.parallel.user_config import read_launch
from autotrain_mem.settings.knobs import APPLIED
from autotrain_mem.support import codec
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.support.yaml_files import read_yaml
from autotrain_mem.types import Hardware, Job, Knobs, Plan, ReservedByMode, Topology
from autotrain_mem.types.methods_table import METHODS
from tests.golden import kept
from tests.report.report_examples import PLAN, reserved

GOLDEN = Path(__file__).parent / "golden"
ALLOWED = yaml.safe_load((Path(__file__).parent / "allowed_keys.yaml").read_text())
KEYS = {tool: set(keys) for tool, keys in ALLOWED.items()}
KEYS["llamafactory"] |= {field.name for field in fields(TrainingArguments)}
IN_SHELL = ("slurm", "commands")
OF_CLUSTERS = (*OF_MACHINES, "accelerate", "axolotl")
TOOLS = [(name, method) for name in ("axolotl", "llamafactory") for method in methods_of(name)]
CARD = Hardware(name="rtx4090", origin="named", total_bytes=24 * GIB, free_bytes=24 * GIB, non_torch_bytes=255 * MIB)
HOST = replace(CARD, name="cpu", origin="cpu")
QLORA = divided(
    TRL_DEFAULTS,
    4,
    4,
    max_length=2048,
    use_peft=True,
    dtype="bfloat16",
    load_in_4bit=True,
    use_bnb_nested_quant=True,
    expandable_segments=True,
)
FULL = replace(TRL_DEFAULTS, gradient_accumulation_steps=2)
HALF = replace(FULL, dtype="bfloat16")
FOUR = replace(CARD, topology=Topology(devices=4))
FSDP2 = replace(FULL, processes=4, sharding="fsdp2")
TWO_MACHINES = replace(CARD, topology=Topology(nodes=2, devices=4))
HSDP = replace(FULL, processes=8, sharding="hsdp", dp_replicate_size=2, fsdp_offload_params=True)
DDP = replace(FULL, processes=4, sharding="ddp")
NO_RESHARD = replace(FSDP2, sharding="fsdp2-no-reshard")
ZERO3 = replace(DDP, sharding="zero3")
ALONE = replace(ZERO3, processes=1)
EVERYTHING_ON = replace(
    QLORA, packing=True, activation_offloading=True, optimizer_offload=True, max_length=None, dtype="float32"
)
OF_METHOD: dict[str, dict[str, Any]] = {
    "grpo": {"max_length": None, "max_completion_length": 512, "num_generations": 8},
    "rloo": {"max_length": None, "max_completion_length": 512, "num_generations": 2},
    "ppo": {"max_length": None, "response_length": 53, "local_rollout_forward_batch_size": 4},
}
TARGETS = {"lora_target_modules": ["q_proj", "v_proj"], "output_dir": "run"}
RESERVED = reserved(18 * GIB, slack_bytes=GIB)
MEMORY = replace(
    PLAN.estimate.memory,
    peak_allocated_bytes=17 * GIB,
    owners_at_peak={},
    reserved=ReservedByMode(native=RESERVED, expandable_segments=RESERVED),
)


def job(method: str = "sft", **changes: Any) -> Job:
    """With LoRA's targets spelled out, as the command does it; ``arguments`` come beside them."""
    arguments = {**TARGETS, **changes.pop("arguments", {})}
    return replace(Job(method=method, model="Qwen/Qwen3-8B", dataset="org/data", arguments=arguments), **changes)


def plan(made_for: Job, knobs: Knobs = QLORA, card: Hardware = CARD) -> Plan:
    """Not found by a search: what it says is all there."""
    asked = {name: tuple(each) if isinstance(each, list) else each for name, each in made_for.arguments.items()}
    given = {each.name: asked[each.name] for each in fields(Knobs) if each.name in asked}
    rate = {"learning_rate": made_for.method_facts.defaults["learning_rate"]}
    own = replace(knobs, **{**rate, **OF_METHOD.get(made_for.method, {}), **given})
    estimate = replace(PLAN.estimate, knobs=own, hardware=card, memory=MEMORY, budget_bytes=card.budget_bytes())
    level = "QLoRA" if own.use_peft else "lossless"
    return replace(PLAN, job=made_for, level=level, estimate=estimate, data=None, row_tokens=256)


def written(name: str, made_for: Job, knobs: Knobs = QLORA, card: Hardware = CARD) -> str:
    return export(name, plan(made_for, knobs, card), made_for)


def keys(name: str, made_for: Job, knobs: Knobs = QLORA, card: Hardware = CARD) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(written(name, made_for, knobs, card))
    return read


GRPO = job("grpo", arguments={"reward_funcs": ["accuracy_reward", "mine.score"], "use_vllm": True, "epsilon": 0.1})
PPO = job("ppo", arguments={"reward_model_path": "org/judge", "kl_coef": 0.1})
TEXTS = {
    **{f"{name}_sft": functools.partial(written, name, job()) for name in EXPORTERS},
    **{f"{name}_hsdp": functools.partial(written, name, job(), HSDP, TWO_MACHINES) for name in OF_CLUSTERS},
    **{
        f"{name}_ddp": functools.partial(written, name, job(), DDP, FOUR) for name in ("trl", "axolotl", "llamafactory")
    },
    "axolotl_grpo": functools.partial(written, "axolotl", GRPO),
    "axolotl_everything": functools.partial(
        written, "axolotl", job(arguments={"eval_strategy": "epoch"}, environment={"WANDB_NAME": "b c"}), EVERYTHING_ON
    ),
    "llamafactory_ppo": functools.partial(written, "llamafactory", PPO, FULL),
    "llamafactory_dpo": functools.partial(written, "llamafactory", job("dpo", dataset="pairs.jsonl"), HALF),
    "dry_run_sft": lambda: dry_run(plan(job()), job(), {"CUDA_VISIBLE_DEVICES": "0"}).to_text(),
    "llamafactory_fsdp2": functools.partial(written, "llamafactory", job(), FSDP2, FOUR),
    "dry_run_fsdp2": lambda: dry_run(plan(job(), FSDP2, FOUR), job(), {}).to_text(),
    "trl_ddp_ppo": functools.partial(written, "trl", PPO, DDP, FOUR),
    "trl_zero3": functools.partial(written, "trl", job(), ZERO3, FOUR),  # without an accelerate.yaml beside it
    "trl_zero3_alone": functools.partial(written, "trl", job(), ALONE),  # by torchrun: without a group it ends
    "dry_run_zero3": lambda: dry_run(plan(job(), ALONE), job(), {}).to_text(),
    "dry_run_ppo": lambda: dry_run(plan(PPO, FULL), PPO, {}).to_text(),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_the_golden_one(name: str) -> None:
    text = TEXTS[name]()
    suffix = "sh" if name.partition("_")[0] in IN_SHELL else "yaml"
    assert text == kept(GOLDEN / f"{name}.{suffix}", text)


@functools.cache
def trl_arguments(method: str) -> dict[str, Any]:
    """Every argument of a method with a value unlike its default, where one can be made up."""
    from autotrain_mem.methods.interface import method_of

    filled = method_of(method).configs({"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"})
    parts = [filled.script, filled.training, filled.model]
    given = [field for part in parts for field in fields(part) if field.init]
    texts = {field.name: "something" for field in given if field.default is None or isinstance(field.default, str)}
    numbers = {field.name: field.default + 7 for field in given if isinstance(field.default, (int, float))}
    switches = {field.name: not field.default for field in given if isinstance(field.default, bool)}
    return texts | numbers | switches


@pytest.mark.parametrize(("tool", "method"), TOOLS)
@pytest.mark.parametrize("knobs", [QLORA, FULL, EVERYTHING_ON, HSDP])
def test_a_tool_has_every_key(tool: str, method: str, knobs: Knobs) -> None:
    """Every argument is given at once, but for those that an export reads as what they are."""
    shaped = {"reward_funcs", "report_to", "optim_args", "resume_from_checkpoint", "env", "lora_modules_to_save"}
    told = {
        name: value
        for name, value in trl_arguments(method).items()
        if name not in shaped and not name.startswith(("dataset", "vllm_server", "eval_", "gradient_"))
    }
    said = keys(tool, job(method, arguments=told), knobs)
    assert sorted(said.keys() - KEYS[tool]) == []
    if tool == "axolotl":
        blocks = {"fsdp": said.get("fsdp_config", {}), "trl": said.get("trl", {}), "vllm": said.get("vllm", {})}
        assert [name for name, block in blocks.items() if not block.keys() <= KEYS[f"axolotl_{name}"]] == []
        datasets = [*said["datasets"], *said.get("test_datasets", [])]
        assert all(dataset.keys() <= KEYS["axolotl_dataset"] for dataset in datasets)


SHAPED = {"report_to", "lora_modules_to_save", "eval_strategy", "eval_steps"}


@pytest.mark.parametrize(("tool", "method"), TOOLS)
@pytest.mark.parametrize("knobs", [QLORA, FULL, HALF, FSDP2, replace(QLORA, packing=True, load_in_4bit=False)])
def test_a_file_that_is_written_is_read_back_as_the_same_settings(tool: str, method: str, knobs: Knobs) -> None:
    """All arguments with a key are given at once. What is read makes the same file again, from TRL's defaults."""
    has_key = {key.trl for key in keys_of(tool) if key.kind in ("same", "adapter", "trl")}
    made_up = trl_arguments(method)
    told = {name: made_up[name] for name in has_key & made_up.keys() - SHAPED}
    told |= {"lora_modules_to_save": ["a", "b"], "lora_target_modules": ["q_proj", "v_proj"], "report_to": ["wandb"]}
    knobs = knobs if METHODS[method].is_packable else replace(knobs, packing=False)
    first = keys(tool, job(method, arguments=told), knobs)
    settings, notes, _ = read_tool_file(first, "a/b.yaml", f"autofit plan {method}", given=(), own=())
    assert notes[0].startswith("b.yaml is a file of")
    assert not [note for note in notes if "no counterpart is known" in note]
    read = {name: value for name, value in settings.items() if name not in ("dataset", "model", "prompt_length")}
    again = replace(TRL_DEFAULTS, processes=knobs.processes, sharding=read.pop("sharding", None))
    assert keys(tool, job(method, arguments=read), again) == first
    assert settings["model"] == "Qwen/Qwen3-8B"
    assert (settings.get("dataset") == "org/data") is (tool == "axolotl")


def test_a_total_batch_of_axolotl_and_a_number_without_a_point_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base_model: m\nmicro_batch_size: 2\nbatch_size: 16\nlearning_rate: 2e-4\n")
    content = read_yaml(str(tmp_path / "a.yaml"), "--config")
    settings, *_ = read_tool_file(content, "a.yaml", "autofit plan sft", given=(), own=())
    assert (settings["gradient_accumulation_steps"], settings["learning_rate"]) == (8, 2e-4)


MEANS_NOTHING = {
    *("bf16", "hub_token"),  # other tests try them
    *("dataset_name", "do_train", "model_name_or_path"),  # the job says it
    *("dataset_test_split", "eval_packing", "eval_steps"),  # without evaluation
    *("gradient_checkpointing_kwargs", "lora_modules_to_save", "reward_funcs", "vllm_server_timeout"),  # not made up
}


@pytest.mark.parametrize(("name", "method"), [pair for pair in TOOLS if pair[1] != "ppo"])
def test_nothing_that_the_user_said_is_lost(name: str, method: str) -> None:
    """Each argument by itself makes another file: a key, or a comment."""
    knobs = {field.name for field in fields(Knobs)}
    without = written(name, job(method))
    lost = [
        argument
        for argument, value in trl_arguments(method).items()
        if argument not in knobs | MEANS_NOTHING | {"output_dir"}
        and written(name, job(method, arguments={argument: value})) == without
    ]
    assert lost == []


def test_a_secret_is_named_and_not_written() -> None:
    secretive = job(arguments={"hub_token": "hf_abc"}, environment={"DATABASE_URL": "xyz", "OMP_NUM_THREADS": "1"})
    for name in EXPORTERS:
        text = written(name, secretive)
        assert "hf_abc" not in text
        assert "xyz" not in text
        assert {"# - hub_token", "# - DATABASE_URL"} <= {line.partition(":")[0] for line in text.splitlines()}
    assert keys("trl", secretive)["env"]["OMP_NUM_THREADS"] == "1"


def test_a_plan_without_data_exports_none_and_says_so() -> None:
    without = job(dataset=None)
    for name in EXPORTERS:
        text = written(name, without)
        assert "Capybara" not in text
        assert "--dataset" not in text
        assert name in IN_SHELL or not {"dataset", "datasets", "dataset_name"} & keys(name, without).keys()
        assert ("# - data: the plan was made without any" in text) is (name != "accelerate")


def test_what_would_steer_a_terminal_or_end_a_comment_is_spelled_out_and_read_back() -> None:
    hostile = job(model="a\x1b[2J\u202e\nb: c", environment={"WANDB_NAME": "\x1b]0;c\x07 d\ne"})
    for name in EXPORTERS:
        assert all(each.isprintable() or each == "\n" for each in written(name, hostile))
    commented = replace(hostile, arguments=hostile.arguments | {"data_seed": "x\ny: z"})
    assert keys("axolotl", commented).keys() == keys("axolotl", job()).keys()
    read = keys("trl", hostile)
    assert (read["model_name_or_path"], read["env"]["WANDB_NAME"]) == (hostile.model, "\x1b]0;c\x07 d\ne")
    shown = dry_run(plan(hostile), hostile, hostile.environment)
    assert yaml.safe_load(shown.to_text()) == shown.settings == read


@pytest.mark.parametrize("method", ["sft", "reward", "dpo", "grpo", "rloo"])
def test_trls_parser_reads_the_plans_settings(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotrain_mem.methods.interface import method_of

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # TRL's parser sets what ``env`` holds
    made_for = job(method, arguments={"use_cpu": True, "bf16": False, "learning_rate": 1e-5})
    path = tmp_path / "trl.yaml"
    path.write_text(written("trl", made_for), encoding="utf-8")
    script, training, model, _ = method_of(method).make_parser().parse_args_and_config(["--config", str(path)])
    read = {**vars(model), **vars(training)}
    knobs = codec.to_json(plan(made_for).knobs)
    expected = {name: value for name, value in knobs.items() if name not in APPLIED and name in read}
    assert {name: getattr(value, "value", value) for name in expected for value in [read[name]]} == expected
    assert read["learning_rate"] == 1e-5
    assert script.dataset_name == "org/data"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert keys("trl", job(dataset="a/b.jsonl"))["datasets"] == [{"path": "json", "data_files": "a/b.jsonl"}]


def test_autofit_reads_the_plans_settings_of_ppo_as_well() -> None:
    from autotrain_mem.checks import arguments

    read = arguments.parse("ppo", (), keys("trl", PPO, FULL), ())[0]
    assert (read["response_length"], read["gradient_accumulation_steps"]) == (53, FULL.gradient_accumulation_steps)


@pytest.mark.parametrize(
    ("knobs", "card", "gpus"),
    [(QLORA, CARD, "0"), (QLORA, HOST, None), (DDP, FOUR, "all"), (FSDP2, FOUR, "all"), (NO_RESHARD, FOUR, "all")],
)
def test_accelerate_launches_what_was_planned(knobs: Knobs, card: Hardware, gpus: str | None, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    made_for = job(arguments={"sharding": knobs.sharding})
    path = tmp_path / "accelerate.yaml"
    path.write_text(written("accelerate", made_for, knobs, card), encoding="utf-8")
    read = load_config_from_file(str(path))  # refuses what it does not know
    assert (read.num_processes, read.mixed_precision, read.use_cpu) == (knobs.processes, "bf16", card is HOST)
    assert read.gpu_ids == gpus
    if knobs.processes > 1:
        launch = read_launch(keys("accelerate", made_for, knobs, card), "the file")
        assert (launch.processes, launch.nodes, launch.sharding) == (4, 1, knobs.sharding)


def test_accelerate_mixes_as_the_trainer_does_and_a_users_own_file_stays() -> None:
    assert keys("accelerate", job(arguments={"bf16": False}))["mixed_precision"] == "no"
    assert keys("accelerate", job(), replace(QLORA, fp16=True))["mixed_precision"] == "fp16"
    own = {"distributed_type": "MULTI_GPU", "num_processes": 4, "num_machines": 1, "mixed_precision": "fp16"}
    assert launch_environment(keys("accelerate", job(accelerate=own), DDP, FOUR)) == launch_environment(own)


def test_lora_finds_the_same_modules() -> None:
    for asked, axolotl, llamafactory in (
        (["all-linear"], {"lora_target_linear": True}, "all"),
        ([r".*\.c_attn"], {"lora_target_modules": r".*\.c_attn"}, "c_attn"),
        (["k_proj", "v_proj"], {"lora_target_modules": ["k_proj", "v_proj"]}, "k_proj,v_proj"),
        (["(a|b)"], {"lora_target_modules": "(a|b)"}, None),
    ):
        made_for = job(arguments={"lora_target_modules": asked})
        assert axolotl.items() <= keys("axolotl", made_for).items()
        assert keys("llamafactory", made_for).get("lora_target") == llamafactory, asked


@pytest.mark.newest
def test_trls_defaults_are_those_that_are_written_out() -> None:
    import trl

    from autotrain_mem.exports.axolotl import VLLM_DEFAULTS, VLLM_SHARE
    from autotrain_mem.exports.draft import LORA_DEFAULTS, TRAINER_DEFAULTS

    def defaults(kind: Any) -> dict[str, Any]:
        return {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in fields(kind)
        }

    installed = {name: row.title for name, row in METHODS.items() if row.has_trl_command}
    of_trl = {name: defaults(getattr(trl, f"{title}Config")) for name, title in installed.items()}
    for name, found in of_trl.items():
        assert METHODS[name].defaults.items() <= found.items()
        assert TRAINER_DEFAULTS.items() <= found.items()
    share = {f"vllm_{name}": value for name, value in VLLM_SHARE.items()}
    assert {**VLLM_DEFAULTS, **share}.items() <= of_trl["grpo"].items()
    assert LORA_DEFAULTS.items() <= defaults(trl.ModelConfig).items()


RENDEZVOUS = ("--machine_rank", "--main_process_ip", "--main_process_port")
ODD = job(model="my model", environment={"WANDB_NAME": "a b$(c)"}, arguments={"run_name": "it's $HOME $(hostname) \\n"})
STAND_INS = {
    "scontrol": "assert sys.argv[1:] == ['show', 'hostnames', 'node[1-2]']; print('node1\\nnode2')",
    "srun": """
begin = next(at for at, word in enumerate(sys.argv) if at and not word.startswith("--"))
assert {"--nodes=2", "--ntasks-per-node=1"} <= {*sys.argv[1:begin]}
for node in range(int(os.environ.get("ONE", "2"))):
    done = subprocess.run(sys.argv[begin:], env={**os.environ, "SLURM_NODEID": str(node)})
sys.exit(done.returncode)
""",
    "autofit": "print(json.dumps([sys.argv[1:], os.environ.get('WANDB_NAME')]))",
}


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment in which a cluster's programs only say what they are told."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\nimport json, os, subprocess, sys\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}


def ran(script: str, environment: dict[str, str], **more: str) -> list[tuple[list[str], str | None]]:
    done = subprocess.run(["bash", "-c", script], env=environment | more, capture_output=True, text=True, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("body", "status", "starts"),
    [('[ "$(wc -l < starts)" = 3 ] || kill -9 $$', 0, 3), ("exit 2", 2, 1), ("kill $PPID; kill -9 $$", 137, 1)],
    ids=["killed", "its own error", "scancel"],
)
def test_on_slurm_a_killed_node_starts_again_and_one_that_ended_does_not(
    body: str, status: int, starts: int, programs: dict[str, str], tmp_path: Path
) -> None:
    for name, text in {"autofit": f"echo >> starts; {body}", "sleep": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    told = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "1", "ONE": "1"}
    script = written("slurm", job(), HSDP, TWO_MACHINES)
    done = subprocess.run(["bash", "-c", script], env=programs | told, cwd=tmp_path, capture_output=True)
    assert (done.returncode, len((tmp_path / "starts").read_text())) == (status, starts)
    assert {"--kill-on-bad-exit=0", "--wait=0"} <= {*script.split()}


@pytest.mark.parametrize("made_for", [job(), ODD])
def test_a_clusters_tool_has_every_field(made_for: Job) -> None:
    assert keys("skypilot", made_for, HSDP, TWO_MACHINES).keys() <= KEYS["skypilot"]
    spec = keys("kubernetes", made_for, HSDP, TWO_MACHINES)["spec"]
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    blocks = {"spec": spec, "trainer": spec["trainer"], "patch": patch, "pod": pod, "container": container}
    assert [name for name, block in blocks.items() if not block.keys() <= KEYS[f"trainjob_{name}"]] == []


def started(tool: str, programs: dict[str, str]) -> list[tuple[list[str], str | None]]:
    """Each machine's words after ``autofit``, and the variable that the job sets."""
    text = written(tool, ODD, HSDP, TWO_MACHINES)
    if tool == "slurm":
        return ran(text, programs, SLURM_JOB_NODELIST="node[1-2]", SLURM_JOB_ID="1234567")
    if tool == "commands":
        return ran(text, programs)
    read: dict[str, Any] = yaml.safe_load(text)
    if tool == "skypilot":
        told = {"SKYPILOT_NODE_IPS": "node1\nnode2", **read["envs"]}
        return [line for rank in "01" for line in ran(read["run"], programs, SKYPILOT_NODE_RANK=rank, **told)]
    return [of_pod(read["spec"]["trainer"], rank) for rank in range(2)]


def of_pod(container: dict[str, Any], rank: int) -> tuple[list[str], str | None]:
    """What Kubernetes makes of a pod's command, with the variables of Kubeflow's trainer."""
    variables = {"PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "node1", "PET_MASTER_PORT": "29500"}

    def expanded(word: str) -> str:
        for name, value in variables.items():
            word = value if word == f"$({name})" else word
        return word.replace("$$(", "$(")

    return [expanded(word) for word in container["command"][1:]], expanded(container["env"][0]["value"])


@pytest.mark.parametrize("tool", OF_MACHINES)
def test_each_machine_runs_the_same_command_and_knows_its_rank_and_address(tool: str, programs: dict[str, str]) -> None:
    first, second = started(tool, programs)
    at = first[0].index(RENDEZVOUS[0])
    common = first[0][:at]
    host = "FIRST_MACHINE" if tool == "commands" else "node1"
    for rank, (words, variable) in enumerate((first, second)):
        place = words[at:]
        assert words[:at] == common
        assert place[::2] == [*RENDEZVOUS]
        assert place[1:4:2] == [str(rank), host]
        assert 1024 < int(place[5]) < 32768
        own, _ = flags.make_parser("autofit sft").parse_known_args(words)
        assert (own.machine_rank, own.main_process_ip, own.main_process_port) == (rank, host, int(place[5]))
        assert variable == "a b$(c)"
    assert first[0][at + 5] == second[0][at + 5]
    assert common[common.index("--run_name") + 1] == "it's $HOME $(hostname) \\n"


@pytest.mark.parametrize(("knobs", "card"), [(QLORA, CARD), (FULL, CARD), (FSDP2, FOUR), (HSDP, TWO_MACHINES)])
def test_the_command_says_the_plans_settings_in_flags_that_autofit_takes(knobs: Knobs, card: Hardware) -> None:
    made_for = job(prompt_length=None, forbid=frozenset({"lora", "bf16_weights"}), fit="rounding")
    knobs = replace(knobs, max_length=None)
    text = written("commands", made_for, knobs, card)
    _, method, *words = shlex.split(next(line for line in text.splitlines() if line.startswith("autofit ")))
    own, others = flags.make_parser(f"autofit {method}").parse_known_args(words)
    nodes = card.topology.nodes
    assert (own.gpus * (own.nodes or 1), own.nodes or 1) == (knobs.processes, nodes)
    assert (own.sharding, own.fsdp_offload_params) == (knobs.sharding, knobs.fsdp_offload_params)
    assert (own.model, own.dataset) == (made_for.model, "org/data")
    assert (own.fit, own.forbid) == ("rounding", "bf16_weights,lora")
    assert own.expandable_segments == knobs.expandable_segments
    given = {name: others[others.index(name) + 1] for name in others if name.startswith("--")}
    assert given["--per_device_train_batch_size"] == str(knobs.per_device_train_batch_size)
    assert given["--max_length"] == "none"
    assert given["--use_peft"] == json.dumps(knobs.use_peft)
    assert ("--load_in_4bit" in given) is knobs.load_in_4bit
    assert ("--machine_rank" in text) is (nodes > 1)


def test_deepspeeds_offload_is_said_of_one_gpu_too_and_beside_a_users_config() -> None:
    zero = replace(FULL, sharding="zero3", offload_optimizer_device="cpu", offload_param_device="cpu")
    said = "--sharding zero3 --offload_optimizer_device cpu --offload_param_device cpu"
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    text = written("commands", job(arguments={"deepspeed": config}), zero)
    assert said in written("commands", job(), zero)
    assert f"--deepspeed '{json.dumps(config)}'" in text


def test_what_no_flag_can_say_is_refused_before_planning(tmp_path: Path) -> None:
    for flag, content, why in (
        ("--accelerate_config", "{distributed_type: MULTI_GPU, num_processes: 2}", "cannot carry your"),
        ("--config", "{datasets: [{path: a}, {path: b}]}", "a mixture of datasets"),
    ):
        (tmp_path / "file.yaml").write_text(content, encoding="utf-8")
        words = ["--model", "tiny", flag, str(tmp_path / "file.yaml"), "--export", "slurm"]
        with pytest.raises(UsageError, match=why):
            check_export(*flags.read("autofit plan sft", words))


def test_an_unknown_card_is_left_to_who_rents_it() -> None:
    text = written("skypilot", job(), HSDP, replace(TWO_MACHINES, name="rtx2060"))
    assert yaml.safe_load(text)["resources"] == {"accelerators": "CARD:4"}
    assert "write SkyPilot's name of rtx2060" in text
