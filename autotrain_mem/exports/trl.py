"""Writes TRL's own YAML, for ``trl METHOD --config FILE`` and also ``autofit METHOD --config FILE``.

Keys are the fields of TRL's four dataclasses, and ``env``: variables that TRL sets before it loads the model
(``trl/scripts/utils.py: TrlParser.parse_args_and_config``).
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from autotrain_mem.exports.accelerate import ACCELERATE_FILE, TRL_FILE, note_launch, script, torchrun
from autotrain_mem.exports.draft import Tool, document, draft_of, note_host_optimizer
from autotrain_mem.parallel.config import sharding_arguments
from autotrain_mem.parallel.launch_environment import launch_environment
from autotrain_mem.settings.own import SHARE_TOKENS
from autotrain_mem.support.codec import Form
from autotrain_mem.support.units import one_line
from autotrain_mem.types import Job, Plan

DATA_NAMES = ("dataset_name", "datasets")


def trl(plan: Plan, job: Job) -> str:
    """Returns the file for ``trl METHOD --config FILE``."""
    draft = draft_of(plan, job)
    knobs, data, method, has_script = draft.knobs, draft.data, job.method, job.method_facts.has_trl_command
    if not has_script:
        tokens = "".join(f" --{name} {size}" for name in SHARE_TOKENS if (size := getattr(knobs, name)) > 1)
        launch = f" --gpus {draft.devices} --sharding {knobs.sharding}{tokens}" if knobs.has_group else ""
        command = f"autofit {method} --config FILE{launch}"
    elif knobs.zero_stage:
        command = f"{' '.join(torchrun(draft))} -m trl.scripts.{method} --config FILE"
    else:  # TRL's command takes the file of ``accelerate launch`` (``trl/cli/accelerate_config.py``)
        command = f"trl {method} --config FILE{knobs.has_group * f' --accelerate_config {ACCELERATE_FILE}'}"
    tool = Tool(name="TRL", command=command, trains_with_trl=True)
    named: dict[str, object] = {}
    if data is None:
        named = {"datasets": draft.settings["datasets"]} if job.names_data else {}
    elif data.kind is None:
        named = {"dataset_name": data.path}
    else:  # a file is one dataset of a mixture (``trl/scripts/utils.py: DatasetConfig``): a name would be looked up
        named = {"datasets": [{"path": data.kind, "data_files": data.path}]}
    settings = draft.settings  # TRL has a key for each
    draft.answered.update(settings)
    first = {"model_name_or_path": job.model, **named, **sharding_arguments(knobs)}
    rest = {name: value for name, value in settings.items() if name not in (*DATA_NAMES, "model_name_or_path")}
    variables = draft.environment
    if knobs.sp_size > 1:
        # With torchrun, only these tell accelerate which ranks share rows in DeepSpeed's way
        # (``accelerate/parallelism_config.py: __post_init__``).
        launched = launch_environment(draft.launch)
        variables |= {name: value for name, value in launched.items() if "PARALLELISM_CONFIG" in name}
    draft.keys |= {**first, **rest, **({"env": variables} if variables else {})}
    if has_script:
        note_launch(draft)
    note_host_optimizer(draft, "autofit METHOD --config FILE --optimizer_offload keeps them there")
    if knobs.peft_config:
        draft.notes.append(
            "peft_config: TRL has no key for it, and would train LoRA: autofit METHOD --peft_config FILE applies it"
        )
    draft.note_data()
    if not has_script:
        why = f"autofit {method} reads this file, but trl has no such command"
        draft.notes.append(f"TRL has {job.method_facts.title}Config, but no script for it: {why}")
    return document(draft, tool, {})


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """Describes what a run would start."""

    json_form: ClassVar = Form(schema="autofit.dry_run/1", derived={"config": "settings"}, hidden=("config",))

    config: str
    """TRL's YAML, with comments."""
    command: tuple[str, ...] | None
    """The command for the same training with TRL alone; None if TRL has no script for the method."""
    environment: Mapping[str, str]
    """The variables that autofit would set for the training process."""

    @property
    def settings(self) -> Any:
        """Returns the YAML's content."""
        import yaml

        return yaml.safe_load(self.config)

    def to_text(self) -> str:
        """Returns one YAML file that TRL can read; all but the config is in comments."""
        lines = ["No command: TRL has no script for this method, and autofit trains with a trainer of its own."]
        if self.command is not None:
            lines = [f"The command, with this text saved as {TRL_FILE}:", f"  {one_line(shlex.join(self.command))}"]
        lines.append(f"The environment that autofit would set for the process:{'' if self.environment else ' nothing'}")
        lines += [f"  {one_line(f'{name}={shlex.quote(value)}')}" for name, value in self.environment.items()]
        return self.config + "".join(f"# {line}\n" for line in lines)


def dry_run(plan: Plan, job: Job, environment: Mapping[str, str]) -> DryRun:
    """Describes what ``autofit METHOD`` would start with this plan. ``environment``: variables that it would set for
    the training process."""
    draft = draft_of(plan, job)
    single = ("--num_processes", "1", "--num_machines", "1", "--mixed_precision", draft.precision)
    several = draft.knobs.processes > 1
    launch = ["accelerate", "launch", *(("--config_file", ACCELERATE_FILE) if several else single)]
    words = (*(torchrun(draft) if draft.knobs.zero_stage else launch), *shlex.split(script(job.method)))
    command = words if job.method_facts.has_trl_command else None
    return DryRun(config=trl(plan, job), command=command, environment=environment)
