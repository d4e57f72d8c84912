"""The tools whose files can be written, by the names of ``--export``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from autotrain_mem.errors import UsageError
from autotrain_mem.exports import accelerate, axolotl, llamafactory, trl
from autotrain_mem.methods.table import METHODS
from autotrain_mem.spec import Job, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Exporter:
    """Writes one tool's file."""

    methods: Collection[str]
    """Those that the tool can train."""
    write: Callable[[Plan, Job], str]
    lacks: str
    """What is said of a method that it has not."""


EXPORTERS = {
    "trl": Exporter(methods=METHODS, write=trl.trl, lacks=""),
    "accelerate": Exporter(
        methods=[name for name, method in METHODS.items() if method.has_trl_command],
        write=accelerate.accelerate,
        lacks="accelerate launches TRL's scripts, and TRL has none for",
    ),
    "axolotl": Exporter(
        methods=[name for name, method in METHODS.items() if method.axolotl is not None],
        write=axolotl.axolotl,
        lacks="No file for Axolotl is written yet for",
    ),
    "llamafactory": Exporter(
        methods=[name for name, method in METHODS.items() if method.llamafactory is not None],
        write=llamafactory.llamafactory,
        lacks="No file for LLaMA-Factory is written yet for",
    ),
}


def check_method(name: str, method: str) -> None:
    """Ask before minutes of planning, not after.

    Args:
        name: One of :data:`EXPORTERS`.

    Raises:
        UsageError: the tool has no such method.
    """
    exporter = EXPORTERS[name]
    if method in exporter.methods:
        return
    raise UsageError(
        f"{exporter.lacks} {method.upper()}.",
        hint=f"--export {name} writes {', '.join(exporter.methods)}; --export trl writes {method} in TRL's own keys.",
    )


def export(name: str, plan: Plan, job: Job) -> str:
    """The text of the file for a tool.

    Example: ``export("axolotl", plan, job)`` begins with ``# Made by autofit for Axolotl: sft of Qwen/Qwen3-8B.``

    Args:
        name: One of :data:`EXPORTERS`.
        plan: Of the job.

    Raises:
        UsageError: the tool has no such method.
    """
    check_method(name, job.method)
    return EXPORTERS[name].write(plan, job)
