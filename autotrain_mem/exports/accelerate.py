"""The YAML that ``accelerate launch --config_file FILE`` reads: how processes are started, and nothing of the training.

Keys are the fields of ``accelerate/commands/config/config_args.py: ClusterConfig``, which refuses any other.
"""

from __future__ import annotations

from autotrain_mem.exports.case import Case, case_of
from autotrain_mem.exports.part import Part, Tool, allocator, document, environment, host_optimizer
from autotrain_mem.spec import Job, Plan

TRL_FILE = "trl.yaml"


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


def _processes(case: Case) -> Part:
    """One process on one card: transformers would split each batch over all that it sees."""
    on_cpu = case.plan.estimate.hardware.origin == "cpu"
    return Part(
        keys={
            "compute_environment": "LOCAL_MACHINE",
            "debug": False,
            "distributed_type": "NO",
            "enable_cpu_affinity": False,
            **({} if on_cpu else {"gpu_ids": "0"}),
            "machine_rank": 0,
            "main_training_function": "main",
            "mixed_precision": case.precision,
            "num_machines": 1,
            "num_processes": 1,
            "rdzv_backend": "static",
            "same_network": True,
            "use_cpu": on_cpu,
        },
        answered=frozenset(case.settings),
    )
