"""The YAML that ``accelerate launch --config_file FILE`` reads: how processes are started, and nothing of the training.

Keys are the fields of ``accelerate/commands/config/config_args.py: ClusterConfig``, which refuses any other.
"""

from __future__ import annotations

from autotrain_mem.exports.case import Case, case_of
from autotrain_mem.exports.part import Part, Tool, allocator, document, environment, host_optimizer
from autotrain_mem.types import Job, Plan

TRL_FILE = "trl.yaml"
ACCELERATE_FILE = "accelerate.yaml"
FIRST_MACHINE = "FIRST_MACHINE"
"""Stands for an address that nobody here knows."""
PORT = 29500
"""accelerate's own default (``utils/launch.py: prepare_multi_gpu_env``)."""


def accelerate(plan: Plan, job: Job) -> str:
    """The file for ``accelerate launch --config_file FILE``, for a method that TRL has a script for."""
    case = case_of(plan, job)
    launch = "accelerate launch --config_file FILE"
    tool = Tool(name="accelerate", command=f"{launch} {script(job.method)}", trains_with_trl=True)
    settings = f"everything about the training: the same autofit command with --export trl > {TRL_FILE} writes it"
    parts = [
        _processes(case),
        Part(notes=(settings,)),
        host_optimizer(case, "autofit METHOD trains with it"),
        allocator(case),
        environment(case),
    ]
    return document(case, tool, parts, case.environment)


def script(method: str) -> str:
    """TRL's own, with its settings in a file (``trl/cli/commands/training.py: TrainingCommand`` launches the same)."""
    return f"-m trl.scripts.{method} --config {TRL_FILE}"


def torchrun(case: Case) -> list[str]:
    """Lists what starts the processes that DeepSpeed trains in, one too, whose config stands in TRL's own file.

    accelerate's launcher refuses such a config beside its own (``accelerate/utils/dataclasses.py: DeepSpeedPlugin.
    __post_init__``), and TRL's command starts a single process without a group.
    """
    several = ["--nnodes", str(case.nodes), "--node_rank", "0", "--master_addr", FIRST_MACHINE]
    each = ["--nproc_per_node", str(case.knobs.processes // case.nodes)]
    return ["torchrun", *(several if case.nodes > 1 else []), *each]


def launch_note(case: Case) -> Part:
    """Says where the file is that starts several processes."""
    if case.knobs.processes == 1 or case.knobs.zero_stage:
        return Part()
    what = f"{case.knobs.processes} processes ({case.knobs.sharding})"
    return Part(notes=(f"{what}: the same autofit command with --export accelerate > {ACCELERATE_FILE} writes it",))


def _processes(case: Case) -> Part:
    """A single process has one card: transformers would split each batch over all that it sees."""
    on_cpu, several = case.plan.estimate.hardware.origin == "cpu", case.knobs.processes > 1
    place = {"main_process_ip": FIRST_MACHINE, "main_process_port": PORT} if case.nodes > 1 else {}
    keys = {
        "debug": False,
        "enable_cpu_affinity": False,
        **({} if on_cpu else {"gpu_ids": "all" if several else "0"}),
        "machine_rank": 0,
        **place,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": on_cpu,
        **case.launch,
    }
    each = (
        f"main_process_ip: write the address of the first machine in place of {FIRST_MACHINE}, on every machine",
        "machine_rank: 0 is the first machine's; each other has its own, from 1, and runs the same command",
    )
    return Part(
        keys=dict(sorted(keys.items())),
        answered=frozenset(case.settings),
        notes=each if "main_process_ip" in place else (),
    )
