"""What each machine of a cluster would run: its words are autofit's own, whoever starts them."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_examples import FOUR, FSDP2, FULL, HSDP, QLORA, TWO_MACHINES, job, plan

from autotrain_mem.cli import flags
from autotrain_mem.cli.plan_files import check_export
from autotrain_mem.exports.tools import OF_MACHINES, export
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Hardware, Job, Knobs

RENDEZVOUS = ("--machine_rank", "--main_process_ip", "--main_process_port")
ODD = job(model="my model", environment={"WANDB_NAME": "a b$(c)"}, arguments={"run_name": "it's $HOME $(hostname) \\n"})
STAND_INS = {
    "scontrol": "assert sys.argv[1:] == ['show', 'hostnames', 'node[1-2]']; print('node1\\nnode2')",
    "srun": """
begin = next(at for at, word in enumerate(sys.argv) if at and not word.startswith("--"))
assert {"--nodes=2", "--ntasks-per-node=1"} <= {*sys.argv[1:begin]}
for node in range(2):
    subprocess.run(sys.argv[begin:], env={**os.environ, "SLURM_NODEID": str(node)}, check=True)
""",
    "autofit": "print(json.dumps([sys.argv[1:], os.environ.get('WANDB_NAME')]))",
}


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment in which a cluster's programs only say what they are told."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(
            f"#!{sys.executable}\nimport json, os, subprocess, sys\n{body}\n", encoding="utf-8"
        )
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}


def ran(script: str, environment: dict[str, str], **more: str) -> list[tuple[list[str], str | None]]:
    done = subprocess.run(["bash", "-c", script], env=environment | more, capture_output=True, text=True, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def written(tool: str, made_for: Job = ODD, knobs: Knobs = HSDP, card: Hardware = TWO_MACHINES) -> str:
    return export(tool, plan(made_for, knobs, card), made_for)


def started(tool: str, programs: dict[str, str]) -> list[tuple[list[str], str | None]]:
    """Each machine's words after ``autofit``, and the variable that the job sets."""
    text = written(tool)
    if tool == "slurm":
        return ran(text, programs, SLURM_JOB_NODELIST="node[1-2]", SLURM_JOB_ID="1234567")
    if tool == "commands":
        return ran(text, programs)
    read: dict[str, Any] = yaml.safe_load(text)
    if tool == "skypilot":
        told = {"SKYPILOT_NODE_IPS": "node1\nnode2", **read["envs"]}
        return [line for rank in "01" for line in ran(read["run"], programs, SKYPILOT_NODE_RANK=rank, **told)]
    return [of_pod(read["spec"]["pytorchReplicaSpecs"][kind], rank) for rank, kind in enumerate(("Master", "Worker"))]


def of_pod(replicas: dict[str, Any], rank: int) -> tuple[list[str], str | None]:
    """What Kubernetes makes of a pod's command, with the variables of Kubeflow's operator."""
    (container,) = replicas["template"]["spec"]["containers"]
    variables = {"RANK": str(rank), "MASTER_ADDR": "node1", "MASTER_PORT": "23456"}

    def expanded(word: str) -> str:
        for name, value in variables.items():
            word = value if word == f"$({name})" else word
        return word.replace("$$(", "$(")

    return [expanded(word) for word in container["command"][1:]], expanded(container["env"][0]["value"])


@pytest.mark.parametrize("tool", OF_MACHINES)
def test_each_machine_runs_the_same_command_and_knows_its_number_and_the_first_ones_address(
    tool: str, programs: dict[str, str]
) -> None:
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


@pytest.mark.parametrize(("knobs", "card"), [(QLORA, None), (FULL, None), (FSDP2, FOUR), (HSDP, TWO_MACHINES)])
def test_the_command_says_the_plans_settings_in_flags_that_autofit_takes(knobs: Knobs, card: Hardware | None) -> None:
    made_for = job(prompt_length=None, forbid=frozenset({"lora", "bf16_weights"}), fit="rounding")
    knobs = dataclasses.replace(knobs, max_length=None)
    text = export("commands", plan(made_for, knobs, *([card] if card else [])), made_for)
    _, method, *words = shlex.split(next(line for line in text.splitlines() if line.startswith("autofit ")))
    own, others = flags.make_parser(f"autofit {method}").parse_known_args(words)
    nodes = 1 if card is None else card.topology.nodes
    assert (own.gpus * (own.nodes or 1), own.nodes or 1) == (knobs.processes, nodes)
    assert (own.sharding, own.fsdp_offload_params) == (knobs.sharding, knobs.fsdp_offload_params)
    assert (own.model, own.dataset, own.fit, own.forbid) == (
        made_for.model,
        "org/data",
        "rounding",
        "bf16_weights,lora",
    )
    assert own.expandable_segments == knobs.expandable_segments
    given = {name: others[others.index(name) + 1] for name in others if name.startswith("--")}
    assert given["--per_device_train_batch_size"] == str(knobs.per_device_train_batch_size)
    assert given["--max_length"] == "none"
    assert given["--use_peft"] == json.dumps(knobs.use_peft)
    assert ("--load_in_4bit" in given) is knobs.load_in_4bit
    assert ("--machine_rank" in text) is (nodes > 1)


def test_deepspeeds_offload_is_said_of_one_gpu_too_and_nvme_by_its_config_alone() -> None:
    zero = dataclasses.replace(FULL, sharding="zero3", offload_optimizer_device="cpu", offload_param_device="cpu")
    assert "--sharding zero3 --offload_optimizer_device cpu --offload_param_device cpu" in written(
        "commands", knobs=zero
    )
    nvme = dataclasses.replace(zero, offload_optimizer_device="nvme")
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}}
    text = written("commands", job(arguments={"deepspeed": config}), nvme)
    assert "--offload_optimizer_device" not in text
    assert f"--deepspeed '{json.dumps(config)}'" in text


@pytest.mark.parametrize(
    ("flag", "content", "why"),
    [
        ("--accelerate_config", "{distributed_type: MULTI_GPU, num_processes: 2}", "is a file of yours"),
        ("--config", "{datasets: [{path: a}, {path: b}]}", "a mixture of datasets"),
    ],
)
def test_what_no_flag_can_say_is_refused_before_a_plan_is_made(
    flag: str, content: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "file.yaml").write_text(content, encoding="utf-8")
    words = ["--model", "tiny", flag, str(tmp_path / "file.yaml"), "--export", "slurm"]
    with pytest.raises(UsageError, match=why):
        check_export(*flags.read("autofit plan sft", words))


def test_an_unknown_card_is_left_to_who_rents_it() -> None:
    text = written("skypilot", card=dataclasses.replace(TWO_MACHINES, name="rtx2060"))
    assert yaml.safe_load(text)["resources"] == {"accelerators": "CARD:4"}
    assert "write SkyPilot's name of rtx2060" in text
