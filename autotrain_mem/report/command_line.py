"""Writes commands of ours as one types them in a shell."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from autotrain_mem.types import Plan
from autotrain_mem.types.adapter_config import without_said
from autotrain_mem.types.flag_words import flag_words
from autotrain_mem.types.job import MAX_SLOWDOWN


def command_line(words: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Writes a command with its flags, quoted for a shell.

    >>> command_line(["plan", "sft"], {"model": "my model", "optimizer_offload": True, "report_to": ["none"]})
    "autofit plan sft --model 'my model' --optimizer_offload --report_to none"
    """
    return shlex.join(["autofit", *words, *flag_words(settings)])


def command_of(plan: Plan, *, trains: bool) -> str:
    """Writes the command that makes a plan again, or that trains with the same words."""
    job, topology = plan.job, plan.estimate.hardware.topology
    ours = {
        "model": job.model,
        "dataset": job.dataset,
        "gpu": plan.estimate.hardware.name if plan.estimate.hardware.origin in ("named", "imagined") else None,
        "gpus": topology.devices if topology.devices > 1 else None,
        "nodes": topology.nodes if topology.nodes > 1 else None,
        "effective_batch_size": job.effective_batch_size,
        "prompt_length": job.prompt_length,
        "fit": None if job.fit == "all" else job.fit,
        "forbid": ",".join(sorted(job.forbid)) or None,
        "max_slowdown": None if job.max_slowdown == MAX_SLOWDOWN else job.max_slowdown,
    }
    given = {name: value for name, value in ours.items() if value is not None}
    trls = {name: value for name, value in without_said(job.arguments).items() if name != "model_name_or_path"}
    return command_line([job.method] if trains else ["plan", job.method], given | trls)
