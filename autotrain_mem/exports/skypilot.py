"""A task for SkyPilot, which rents the machines: ``sky launch`` runs its command on each.

Fields are those of SkyPilot's ``sky/utils/schemas.py: get_task_schema``, variables of ``sky/skylet/constants.py``.
"""

from __future__ import annotations

from typing import Any

from autotrain_mem.exports.accelerate import PORT
from autotrain_mem.exports.document import Tool, document
from autotrain_mem.exports.draft import Draft, draft_of
from autotrain_mem.exports.machines import NOTES_HEAD, machine_words, note_shared_files, rendezvous, shell_line
from autotrain_mem.types import Job, Plan

CARD = "CARD"
"""Stands for a card whose name at SkyPilot is not known here."""
CARDS = {
    **{
        "a10": "A10",
        "a10g": "A10G",
        "a100-40gb": "A100",
        "a100-80gb": "A100-80GB",
        "b200": "B200",
        "h100-80gb": "H100",
    },
    **{"h200": "H200", "l4": "L4", "l40s": "L40S", "rtx3090": "RTX3090", "rtx4090": "RTX4090", "rtx5090": "RTX5090"},
    **{"t4": "T4", "v100-16gb": "V100", "v100-32gb": "V100-32GB"},
}
"""SkyPilot's names of cards (its catalog, ``sky gpus list``), by ours."""


def skypilot(plan: Plan, job: Job) -> str:
    """The task for ``sky launch FILE``."""
    draft = draft_of(plan, job)
    tool = Tool(name="SkyPilot", command="sky launch FILE", trains_with_trl=True, notes_head=NOTES_HEAD)
    unknown = (
        f"write SkyPilot's name of {draft.plan.estimate.hardware.name} in place of {CARD}: sky gpus list shows them"
    )
    notes = (
        *(() if _card(draft) != CARD else (unknown,)),
        "workdir is a clone of autotrain_mem with your data in it, which setup installs",
        "a machine's disk goes with it: mount a bucket (file_mounts) and let output_dir lie there",
    )
    draft.keys |= _task(draft)
    note_shared_files(draft, notes)
    return document(draft, tool, {})


def _task(draft: Draft) -> dict[str, Any]:
    return {
        "name": f"autofit-{draft.job.method}",
        "num_nodes": draft.nodes,
        "resources": {"accelerators": f"{_card(draft)}:{draft.knobs.processes // draft.nodes}"},
        "workdir": ".",
        **({"envs": dict(draft.job.environment)} if draft.job.environment else {}),
        "setup": "pip install -c scripts/constraints.txt .\n",
        "run": _run(draft),
    }


def _run(draft: Draft) -> str:
    command = shell_line(machine_words(draft))
    if draft.nodes == 1:
        return f"{command}\n"
    place = " ".join(rendezvous(draft, '"$SKYPILOT_NODE_RANK"', '"$HOST"', str(PORT)))
    return f"HOST=${{SKYPILOT_NODE_IPS%%$'\\n'*}}  # the first one's address\n{command} {place}\n"


def _card(draft: Draft) -> str:
    return CARDS.get(draft.plan.estimate.hardware.name, CARD)
