"""A batch script for Slurm: one task on each node, which starts that node's processes."""

from __future__ import annotations

from autotrain_mem.exports.document import Tool, heading
from autotrain_mem.exports.draft import Draft, draft_of
from autotrain_mem.exports.machines import NOTES_HEAD, machine_words, note_shared_files, rendezvous, shell_line
from autotrain_mem.parallel.place import FIRST_PORT, PORTS
from autotrain_mem.types import Job, Plan


def slurm(plan: Plan, job: Job) -> str:
    """The script for ``sbatch FILE``."""
    draft = draft_of(plan, job)
    own = "partition, account and time limit: #SBATCH lines of your cluster, or flags of sbatch"
    tool = Tool(name="Slurm", command="sbatch FILE", trains_with_trl=True, notes_head=NOTES_HEAD)
    note_shared_files(draft, (own,))
    head = heading(draft, tool, {})
    return "\n".join(["#!/bin/bash", head.rstrip("\n"), *_directives(draft), "", *_body(draft), ""])


def _directives(draft: Draft) -> list[str]:
    asked = {
        "job-name": f"autofit-{draft.job.method}",
        "nodes": draft.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": draft.knobs.processes // draft.nodes,
        "exclusive": None,
        "requeue": None,  # after a node has failed: the same command goes on with its run
        "output": "%x-%j.log",
    }
    return [f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in asked.items()]


def _body(draft: Draft) -> list[str]:
    exports = [f"export {name}={shell_line([value])}" for name, value in draft.job.environment.items()]
    srun = f"srun --nodes={draft.nodes} --ntasks-per-node=1 --kill-on-bad-exit=1"
    command = shell_line(machine_words(draft))
    if draft.nodes == 1:
        return ["set -euo pipefail", *exports, "", f"{srun} {command}"]
    place = " ".join(rendezvous(draft, '"$SLURM_NODEID"', '"$HOST"', '"$PORT"'))
    return [
        "set -euo pipefail",
        *exports,
        'HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "HOST=${HOSTS%%$'\\n'*}  # the first one's name",
        f"PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
        "export HOST PORT",
        "",
        f"COMMAND=({command})",
        "# shellcheck disable=SC2016  # each node has a number of its own, which only its task knows",
        f'{srun} bash -c \'exec "$@" {place}\' autofit "${{COMMAND[@]}}"',
    ]
