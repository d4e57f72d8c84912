"""A batch script for Slurm: one task on each node, which starts that node's processes."""

from __future__ import annotations

from autotrain_mem.exports.case import Case, case_of
from autotrain_mem.exports.machines import NOTES_HEAD, machine_words, rendezvous, shared_files, shell_line
from autotrain_mem.exports.part import Tool, heading
from autotrain_mem.parallel.place import FIRST_PORT, PORTS
from autotrain_mem.types import Job, Plan


def slurm(plan: Plan, job: Job) -> str:
    """The script for ``sbatch FILE``."""
    case = case_of(plan, job)
    own = "partition, account and time limit: #SBATCH lines of your cluster, or flags of sbatch"
    tool = Tool(name="Slurm", command="sbatch FILE", trains_with_trl=True, notes_head=NOTES_HEAD)
    head = heading(case, tool, [shared_files(case, (own,))], {})
    return "\n".join(["#!/bin/bash", head.rstrip("\n"), *_directives(case), "", *_body(case), ""])


def _directives(case: Case) -> list[str]:
    asked = {
        "job-name": f"autofit-{case.job.method}",
        "nodes": case.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": case.knobs.processes // case.nodes,
        "exclusive": None,
        "requeue": None,  # after a node has failed: the same command goes on with its run
        "output": "%x-%j.log",
    }
    return [f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in asked.items()]


def _body(case: Case) -> list[str]:
    exports = [f"export {name}={shell_line([value])}" for name, value in case.job.environment.items()]
    srun = f"srun --nodes={case.nodes} --ntasks-per-node=1 --kill-on-bad-exit=1"
    command = shell_line(machine_words(case))
    if case.nodes == 1:
        return ["set -euo pipefail", *exports, "", f"{srun} {command}"]
    place = " ".join(rendezvous(case, '"$SLURM_NODEID"', '"$HOST"', '"$PORT"'))
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
