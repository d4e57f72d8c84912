"""Writes one autofit command, with the plan's settings, for each machine of a cluster.

On its machine, autofit starts the processes. The only added flags are the machine's rank, and the first machine's
address and port: ``--machine_rank``, ``--main_process_ip`` and ``--main_process_port``, as in ``accelerate launch``.
"""

import shlex
from collections.abc import Sequence

from autotrain_mem.exports.accelerate import FIRST_MACHINE
from autotrain_mem.exports.draft import Draft, Tool, document, draft_of, heading
from autotrain_mem.parallel.place import FIRST_PORT, PORT, PORTS
from autotrain_mem.settings.knobs import APPLIED, LAUNCHED
from autotrain_mem.settings.own import flag_words
from autotrain_mem.types import Job, Knobs, Plan

NOTES_HEAD = "Before it runs:"


def machine_words(draft: Draft) -> list[str]:
    """Returns the unquoted words that all machines' commands share: ``autofit sft --model ...``."""
    job, knobs = draft.job, draft.knobs
    launch = {name: getattr(knobs, name) for name in LAUNCHED if name not in ("processes", "dp_replicate_size")}
    single = {name: Knobs.__dataclass_fields__[name].default for name in launch}
    ours = {
        "model": job.model,
        "dataset": job.dataset,
        "prompt_length": job.prompt_length,
        "fit": None if job.fit == "all" else job.fit,
        "forbid": ",".join(sorted(job.forbid)) or None,
        "gpus": draft.devices,
        "nodes": draft.nodes if draft.nodes > 1 else None,
        **{name: value for name, value in launch.items() if value != single[name]},
        **{name: value for name in APPLIED if (value := getattr(knobs, name))},
    }
    given = {name: value for name, value in ours.items() if value is not None}
    settings = {name: value for name, value in draft.settings.items() if name != "model_name_or_path"}
    return ["autofit", job.method, *flag_words(given | settings)]


def rendezvous(draft: Draft, rank: str, host: str, port: str) -> list[str]:
    """Returns the flags by which machines find each other; none for a single machine."""
    flags = ["--machine_rank", rank, "--main_process_ip", host, "--main_process_port", port]
    return flags if draft.nodes > 1 else []


def note_shared_files(draft: Draft, extra: Sequence[str] = ()) -> None:
    """Adds notes on what every machine needs. The command holds all settings, so they count as answered."""
    machines = "the machine" if draft.nodes == 1 else "every machine"
    same = "" if draft.nodes == 1 else ", and output_dir is on a file system that all machines share"
    files = f"autofit, the model and the data are found by these names on {machines}{same}"
    draft.answered.update(draft.settings)
    draft.notes += [files, *extra]
    draft.note_data()


def shell_line(words: Sequence[str]) -> str:
    """Quotes words for bash, and escapes characters that would control a terminal.

    >>> print(shell_line(["echo", "a b", "c\\x1b[2J"]))
    echo 'a b' $'c\\U0000001b[2J'
    """

    def quoted(word: str) -> str:
        if word.isprintable():
            return shlex.quote(word)
        plain = word.replace("\\", "\\\\").replace("'", "\\'")
        spelled = "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in plain)
        return f"$'{spelled}'"

    return " ".join(map(quoted, words))


def commands(plan: Plan, job: Job) -> str:
    """Returns one command for each machine, to start by hand or with another launcher."""
    draft = draft_of(plan, job)
    first = f"write the address of the first machine in place of {FIRST_MACHINE}, in every command"
    notes = (first, "start all of them: each waits for the others") if draft.nodes > 1 else ()
    tool = Tool(name="a shell", command="each command on its machine", trains_with_trl=True, notes_head=NOTES_HEAD)
    note_shared_files(draft, notes)
    text = heading(draft, tool, {})
    variables = [f"{name}={value}" for name, value in draft.job.environment.items()]
    for rank in range(draft.nodes):
        place = rendezvous(draft, str(rank), FIRST_MACHINE, str(PORT))
        text += f"\n# machine {rank} of {draft.nodes}\n"
        text += shell_line([*(["env", *variables] if variables else []), *machine_words(draft), *place]) + "\n"
    return text


RESTARTING = """\
trap STOPPED=1 TERM INT HUP USR1  # the command gets these signals too, and saves
for TRY in {{1..10}}; do
  "$@" {place} && exit
  STATUS=$?
  (( STATUS <= 130 || STOPPED )) && exit $STATUS  # only a killed command starts again
  sleep 5
done
exit $STATUS"""
"""What each of several nodes runs in bash: Slurm starts no task again. 130 is the status of an interrupted run; beyond
it are those of signals (bash(1), "EXIT STATUS")."""


def slurm(plan: Plan, job: Job) -> str:
    """Returns the script for ``sbatch FILE``: one task on each node, which starts that node's processes.

    With several nodes, a task that ends does not end the others (srun(1), ``--kill-on-bad-exit``, ``--wait``): they
    wait until it is back. If a node fails, Slurm ends the whole job, and starts it again on other nodes (sbatch(1),
    ``--requeue``, ``--no-kill``); the same command then resumes its run.
    """
    draft = draft_of(plan, job)
    notes = ["partition, account and time limit: #SBATCH lines of your cluster, or flags of sbatch"]
    if draft.nodes > 1:
        notes.append(
            "when a node fails, Slurm starts the job again (--requeue), and the run resumes; to continue with "
            "at least N nodes: --min_nodes N in COMMAND, and --no-kill for both sbatch and srun"
        )
    tool = Tool(name="Slurm", command="sbatch FILE", trains_with_trl=True, notes_head=NOTES_HEAD)
    note_shared_files(draft, notes)
    srun = f"srun --nodes={draft.nodes} --ntasks-per-node=1"
    command = shell_line(machine_words(draft))
    lines = [
        "#!/bin/bash",
        heading(draft, tool, {}).rstrip("\n"),
        f"#SBATCH --job-name=autofit-{draft.job.method}",
        f"#SBATCH --nodes={draft.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={draft.devices}",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        "#SBATCH --output=%x-%j.log",
        "",
        "set -euo pipefail",
        *(f"export {name}={shell_line([value])}" for name, value in draft.job.environment.items()),
    ]
    if draft.nodes == 1:
        return "\n".join([*lines, "", f"{srun} --kill-on-bad-exit=1 {command}", ""])
    place = " ".join(rendezvous(draft, '"$SLURM_NODEID"', '"$HOST"', '"$PORT"'))
    lines += [
        'HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "HOST=${HOSTS%%$'\\n'*}  # the first one's name",
        f"PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
        "export HOST PORT",
        "",
        f"COMMAND=({command})",
        "# shellcheck disable=SC2016  # each node has a number of its own, which is set only inside its task",
        f"{srun} --kill-on-bad-exit=0 --wait=0 bash -c '{RESTARTING.format(place=place)}' autofit \"${{COMMAND[@]}}\"",
        "",
    ]
    return "\n".join(lines)


CARD = "CARD"
"""A placeholder for a card whose SkyPilot name is unknown here."""
CARDS = {
    **{"a10": "A10", "a10g": "A10G", "a100-40gb": "A100", "a100-80gb": "A100-80GB", "b200": "B200"},
    **{"h100-80gb": "H100", "h200": "H200", "l4": "L4", "l40s": "L40S", "rtx3090": "RTX3090"},
    **{"rtx4090": "RTX4090", "rtx5090": "RTX5090"},
    **{"t4": "T4", "v100-16gb": "V100", "v100-32gb": "V100-32GB"},
}
"""Our names of cards -> SkyPilot's (its catalog, ``sky gpus list``)."""


def skypilot(plan: Plan, job: Job) -> str:
    """Returns the task for ``sky launch FILE``: SkyPilot rents the machines, and runs the command on each.

    Fields follow SkyPilot's ``sky/utils/schemas.py: get_task_schema``, and variables ``sky/skylet/constants.py``.
    """
    draft = draft_of(plan, job)
    tool = Tool(name="SkyPilot", command="sky launch FILE", trains_with_trl=True, notes_head=NOTES_HEAD)
    ours = draft.plan.estimate.hardware.name
    card = CARDS.get(ours, CARD)
    unknown = f"write SkyPilot's name of {ours} in place of {CARD}: sky gpus list shows the names"
    run = f"{shell_line(machine_words(draft))}\n"
    if draft.nodes > 1:
        place = " ".join(rendezvous(draft, '"$SKYPILOT_NODE_RANK"', '"$HOST"', str(PORT)))
        run = f"HOST=${{SKYPILOT_NODE_IPS%%$'\\n'*}}  # the first one's address\n{run.rstrip()} {place}\n"
    draft.keys |= {
        "name": f"autofit-{draft.job.method}",
        "num_nodes": draft.nodes,
        "resources": {"accelerators": f"{card}:{draft.devices}"},
        "workdir": ".",
        **({"envs": dict(draft.job.environment)} if draft.job.environment else {}),
        "setup": "pip install -c scripts/constraints.txt .\n",
        "run": run,
    }
    notes = (
        *((unknown,) if card == CARD else ()),
        "workdir is a clone of autotrain_mem, which setup installs, with your data in it",
        "a machine's disk is lost with it: mount a bucket (file_mounts), and put output_dir there",
        "sky jobs launch FILE starts all machines again when one is lost, and the run resumes",
    )
    note_shared_files(draft, notes)
    return document(draft, tool, {})


IMAGE = "IMAGE"
"""A placeholder for an image in a registry; it is not a valid image name."""
CLAIM = "autofit-workspace"
WORKSPACE = "/workspace"
"""The working directory of the project's Dockerfile."""
NODE = "node"
"""The job and the container that the runtime has for training (``pkg/constants/constants.go: Node``)."""
MANAGER = "autotrain-mem/autofit"
"""The owner of a patch, which must have a domain as its prefix (``pkg/runtime/framework/plugins/jobset/jobset.go``)."""


def kubernetes(plan: Plan, job: Job) -> str:
    """Returns the manifest for ``kubectl apply -f FILE``: a TrainJob, with one pod for each machine.

    Fields follow Kubeflow Trainer 2.2 to 2.4 (``pkg/apis/trainer/v1alpha1/trainjob_types.go``). The runtime sets each
    pod's rank and the first one's address (``pkg/runtime/framework/plugins/torch/torch.go``), and Kubernetes replaces
    ``$(NAME)`` in a command by a variable's value. JobSet's default starts a failed container again
    (``pkg/webhooks/jobset_webhook.go: Default``).
    """
    draft = draft_of(plan, job)
    tool = Tool(name="Kubernetes", command="kubectl apply -f FILE", trains_with_trl=True, notes_head=NOTES_HEAD)
    notes = (
        f"write your image in place of {IMAGE}: the project's Dockerfile makes one, which starts in {WORKSPACE}",
        f"make a volume claim {CLAIM} that many pods can write (ReadWriteMany): it is mounted at {WORKSPACE}",
        "Kubeflow Trainer 2.2 or newer is installed, with its runtime torch-distributed",
        "if nodes have different GPUs, select some: nodeSelector beside volumes, such as nvidia.com/gpu.product",
        "pods that fail start again, 6 times in all: this backoffLimit is a Job's default, and only a runtime sets it",
    )
    place = rendezvous(draft, "$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)")
    environment = [{"name": name, "value": _escaped(value)} for name, value in draft.job.environment.items()]
    mounts = {"shm": "/dev/shm", "workspace": WORKSPACE}
    pod = {
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # for NCCL and dataloaders; the default is 64 MiB
            {"name": "workspace", "persistentVolumeClaim": {"claimName": CLAIM}},
        ],
        "containers": [{"name": NODE, "volumeMounts": [{"name": name, "mountPath": mounts[name]} for name in mounts]}],
    }
    patch = {"replicatedJobs": [{"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}]}
    draft.keys |= {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": f"autofit-{draft.job.method}"},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": IMAGE,
                "command": [*(_escaped(word) for word in machine_words(draft)), *place],
                **({"env": environment} if environment else {}),
                "numNodes": draft.nodes,
                "resourcesPerNode": {"limits": {"nvidia.com/gpu": draft.devices}},
            },
            "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": patch}}}],
        },
    }
    note_shared_files(draft, notes)
    return document(draft, tool, {})


def _escaped(word: str) -> str:
    """Escapes a word so that Kubernetes replaces no variables in it."""
    return word.replace("$(", "$$(")
