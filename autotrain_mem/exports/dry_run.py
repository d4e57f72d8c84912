"""Shows what would run: TRL's config, the command that starts it, and the environment of the process."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from autotrain_mem.exports.accelerate import ACCELERATE_FILE, TRL_FILE, script, torchrun
from autotrain_mem.exports.draft import draft_of
from autotrain_mem.exports.trl import trl
from autotrain_mem.support.codec import Form
from autotrain_mem.support.units import one_line
from autotrain_mem.types import Job, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """A run that does not take place."""

    json_form: ClassVar = Form(
        schema="autofit.dry_run/1", derived={"config": "settings"}, hidden=("config", "short_command")
    )

    config: str
    """TRL's YAML, with comments."""
    command: tuple[str, ...] | None
    """The same training with TRL alone; None where TRL has no script for the method."""
    short_command: str
    environment: Mapping[str, str]
    """What autofit would set for the training process."""

    @property
    def settings(self) -> Any:
        """Says what the YAML holds."""
        import yaml

        return yaml.safe_load(self.config)

    def to_text(self) -> str:
        """All of it as one YAML file, which TRL reads: what is no config is a comment."""
        lines = ["No command: TRL has no script for this method, and autofit trains with a trainer of its own."]
        if self.command is not None:
            lines = [f"The command, with this text as {TRL_FILE} (TRL's short form of it: {self.short_command}):"]
            lines.append(f"  {one_line(shlex.join(self.command))}")
        lines.append(f"The environment that autofit would set for the process:{'' if self.environment else ' nothing'}")
        lines += [f"  {one_line(f'{name}={shlex.quote(value)}')}" for name, value in self.environment.items()]
        return self.config + "".join(f"# {line}\n" for line in lines)


def dry_run(plan: Plan, job: Job, environment: Mapping[str, str]) -> DryRun:
    """Says what ``autofit METHOD`` would start with this plan.

    Args:
        environment: What it would set for the training process.
    """
    draft = draft_of(plan, job)
    single = ("--num_processes", "1", "--num_machines", "1", "--mixed_precision", draft.precision)
    several = draft.knobs.processes > 1
    launch = ("accelerate", "launch", *(("--config_file", ACCELERATE_FILE) if several else single))
    short = f"trl {job.method} --config {TRL_FILE}{several * f' --accelerate_config {ACCELERATE_FILE}'}"
    if draft.knobs.zero_stage:
        launch = tuple(torchrun(draft))
        short = shlex.join((*launch, *shlex.split(script(job.method))))
    has_script = job.method_facts.has_trl_command
    return DryRun(
        config=trl(plan, job),
        command=(*launch, *shlex.split(script(job.method))) if has_script else None,
        short_command=short,
        environment=environment,
    )
