"""Writes what every machine of a cluster runs: autofit itself, with the plan's settings, one command on each.

autofit starts that machine's processes. Which machine it is, and where the first one listens, are the only words that
differ: ``--machine_rank``, ``--main_process_ip`` and ``--main_process_port``, as ``accelerate launch`` calls them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from autotrain_mem.exports.accelerate import FIRST_MACHINE, PORT
from autotrain_mem.exports.document import Tool, heading
from autotrain_mem.exports.draft import Draft, draft_of
from autotrain_mem.parallel.place import FIRST_PORT, PORTS
from autotrain_mem.settings.knobs import APPLIED, LAUNCHED
from autotrain_mem.settings.own import flag_words
from autotrain_mem.types import Job, Knobs, Plan

NOTES_HEAD = "Before it runs:"


def machine_words(draft: Draft) -> list[str]:
    """Lists the words that every machine's command has in common, not quoted: ``autofit sft --model ...``."""
    job, devices = draft.job, draft.knobs.processes // draft.nodes
    ours = {
        "model": job.model,
        "dataset": job.dataset,
        "prompt_length": job.prompt_length,
        "fit": None if job.fit == "all" else job.fit,
        "forbid": ",".join(sorted(job.forbid)) or None,
        "gpus": devices,
        "nodes": draft.nodes if draft.nodes > 1 else None,
        **_launch(draft.knobs),
        **{name: value for name in APPLIED if (value := getattr(draft.knobs, name))},
    }
    given = {name: value for name, value in ours.items() if value is not None}
    settings = {name: value for name, value in draft.settings.items() if name != "model_name_or_path"}
    return ["autofit", job.method, *flag_words(given | settings)]


def _launch(knobs: Knobs) -> dict[str, Any]:
    """How processes share the model, where that is not as a single one has it; HSDP has a group on each machine."""
    single = {name: Knobs.__dataclass_fields__[name].default for name in LAUNCHED}
    said = {name: getattr(knobs, name) for name in LAUNCHED if name not in ("processes", "dp_replicate_size")}
    changed = {name: value for name, value in said.items() if value != single[name]}
    return {name: value for name, value in changed.items() if value != "nvme"}  # which --deepspeed says alone


def rendezvous(draft: Draft, rank: str, host: str, port: str) -> list[str]:
    """Lists the words by which machines find each other; none where there is one."""
    if draft.nodes == 1:
        return []
    return ["--machine_rank", rank, "--main_process_ip", host, "--main_process_port", port]


def note_shared_files(draft: Draft, extra: Sequence[str] = ()) -> None:
    """Says what must be in place on every machine; all settings stand in the command."""
    machines = "the machine" if draft.nodes == 1 else "every machine"
    same = "" if draft.nodes == 1 else ", and output_dir on a file system that all machines share"
    files = f"autofit, the model and the data are found by these names on {machines}{same}"
    draft.answered.update(draft.settings)
    draft.notes += [files, *extra]
    draft.note_data()


def shell_line(words: Sequence[str]) -> str:
    """Quotes words for bash, and spells out what would steer a terminal.

    >>> print(shell_line(["echo", "a b", "c\\x1b[2J"]))
    echo 'a b' $'c\\U0000001b[2J'
    """
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_spelled_out(word)}'" for word in words)


def _spelled_out(word: str) -> str:
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in plain)


def commands(plan: Plan, job: Job) -> str:
    """One command for each machine, for whoever starts them by hand or by a launcher of their own."""
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
