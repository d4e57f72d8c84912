"""Writes the YAML for ``accelerate launch --config_file FILE``: how processes start, and nothing about the training.

Keys are the fields of ``accelerate/commands/config/config_args.py: ClusterConfig``, which rejects any other.
"""

from autotrain_mem.exports.draft import Draft, Tool, document, draft_of, note_host_optimizer, note_variables
from autotrain_mem.parallel.place import PORT
from autotrain_mem.types import Job, Plan

TRL_FILE = "trl.yaml"
ACCELERATE_FILE = "accelerate.yaml"
FIRST_MACHINE = "FIRST_MACHINE"
"""A placeholder for the first machine's address, which is unknown here."""


def accelerate(plan: Plan, job: Job) -> str:
    """Returns the file for ``accelerate launch --config_file FILE``, for a method that has a TRL script."""
    draft = draft_of(plan, job)
    launch = "accelerate launch --config_file FILE"
    tool = Tool(name="accelerate", command=f"{launch} {script(job.method)}", trains_with_trl=True)
    # A single process gets one card: transformers would split each batch over all visible cards.
    on_cpu, several = draft.plan.estimate.hardware.origin == "cpu", draft.knobs.processes > 1
    place = {"main_process_ip": FIRST_MACHINE, "main_process_port": PORT} if draft.nodes > 1 else {}
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
        **draft.launch,
    }
    draft.keys |= dict(sorted(keys.items()))
    if place:
        draft.notes += [
            f"main_process_ip: write the address of the first machine in place of {FIRST_MACHINE}, on every machine",
            "machine_rank: 0 is the first machine's; the others have 1 and up, and run the same command",
        ]
    draft.answered.update(draft.settings)
    draft.notes.append(
        f"everything about the training: the same autofit command with --export trl > {TRL_FILE} writes it"
    )
    note_host_optimizer(draft, "autofit METHOD keeps them there")
    note_variables(draft)
    return document(draft, tool, draft.environment)


def script(method: str) -> str:
    """Returns the arguments that run TRL's script on a config (``trl/cli/commands/training.py: TrainingCommand``)."""
    return f"-m trl.scripts.{method} --config {TRL_FILE}"


def torchrun(draft: Draft) -> list[str]:
    """Returns the command that starts DeepSpeed's processes, even a single one; DeepSpeed's config is in TRL's file.

    accelerate's launcher rejects DeepSpeed's config beside its own (``accelerate/utils/dataclasses.py:
    DeepSpeedPlugin.__post_init__``), and TRL's command starts a single process without a process group.
    """
    several = ["--nnodes", str(draft.nodes), "--node_rank", "0", "--master_addr", FIRST_MACHINE]
    each = ["--nproc_per_node", str(draft.devices)]
    return ["torchrun", *(several if draft.nodes > 1 else []), *each]


def note_launch(draft: Draft) -> None:
    """Adds a note on the file that starts several processes."""
    if draft.knobs.processes > 1 and not draft.knobs.zero_stage:
        what = f"{draft.knobs.processes} processes ({draft.knobs.sharding})"
        command = f"the same autofit command with --export accelerate > {ACCELERATE_FILE} writes it"
        draft.notes.append(f"{what}: {command}")
