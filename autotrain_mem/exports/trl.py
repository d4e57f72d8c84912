"""TRL's own YAML: what ``trl METHOD --config FILE`` reads, and ``autofit METHOD --config FILE`` as well.

Keys are the fields of four dataclasses, and ``env`` (``trl/scripts/utils.py: TrlParser.parse_args_and_config``, which
sets it before the model is loaded).
"""

from __future__ import annotations

from autotrain_mem.exports.accelerate import ACCELERATE_FILE, launch_note, torchrun
from autotrain_mem.exports.case import Case, case_of
from autotrain_mem.exports.part import Part, Tool, document, host_optimizer
from autotrain_mem.parallel.config import sharding_arguments
from autotrain_mem.parallel.launch_environment import launch_environment
from autotrain_mem.settings.own import SHARE_TOKENS
from autotrain_mem.types import Job, Plan

DATA_NAMES = ("dataset_name", "datasets")


def trl(plan: Plan, job: Job) -> str:
    """The file for ``trl METHOD --config FILE``."""
    case = case_of(plan, job)
    tool = Tool(
        name="TRL",
        command=_started(case),
        trains_with_trl=True,
    )
    settings = case.settings  # everything as it is: nothing but optimizer offload is ours alone
    first = {"model_name_or_path": job.model, **_data(case), **sharding_arguments(case.knobs)}
    rest = {name: value for name, value in settings.items() if name not in (*DATA_NAMES, "model_name_or_path")}
    variables = {**case.environment, **_shared_sequence(case)}
    environment = {"env": variables} if variables else {}
    offload = host_optimizer(case, "autofit METHOD --config FILE --optimizer_offload has it")
    launched = launch_note(case) if job.method_facts.has_trl_command else Part()
    config, command = f"{job.method_facts.title}Config", _command(case)
    no_script = f"TRL has {config} and no script for it: {command} reads this file, trl does not have the command"
    whole = Part(
        keys={**first, **rest, **environment},
        answered=frozenset({*settings, *DATA_NAMES}),
        notes=(
            *launched.notes,
            *offload.notes,
            *([_OWN_ADAPTER] if case.knobs.peft_config else []),
            *case.no_data(),
            *(() if job.method_facts.has_trl_command else (no_script,)),
        ),
    )
    return document(case, tool, [whole], {})


_OWN_ADAPTER = "peft_config: TRL has no key for it, and would train LoRA: autofit METHOD --peft_config FILE has it"


def _shared_sequence(case: Case) -> dict[str, str]:
    """Lists what tells accelerate who shares rows in DeepSpeed's way: nothing else does, where torchrun starts
    (``accelerate/parallelism_config.py: __post_init__``)."""
    if case.knobs.sp_size == 1:
        return {}
    return {name: value for name, value in launch_environment(case.launch).items() if "PARALLELISM_CONFIG" in name}


def _command(case: Case) -> str:
    return f"{'trl' if case.method_facts.has_trl_command else 'autofit'} {case.job.method}"


def _started(case: Case) -> str:
    if case.knobs.zero_stage and case.method_facts.has_trl_command:
        return f"{' '.join(torchrun(case))} -m trl.scripts.{case.job.method} --config FILE"
    return f"{_command(case)} --config FILE{_launch(case)}"


def _launch(case: Case) -> str:
    """TRL's command takes the file of ``accelerate launch`` (``trl/cli/accelerate_config.py``), ours flags."""
    knobs = case.knobs
    if not knobs.has_group:
        return ""
    if case.method_facts.has_trl_command:
        return f" --accelerate_config {ACCELERATE_FILE}"
    tokens = "".join(f" --{name} {size}" for name in SHARE_TOKENS if (size := getattr(knobs, name)) > 1)
    return f" --gpus {knobs.processes // case.nodes} --sharding {knobs.sharding}{tokens}"


def _data(case: Case) -> dict[str, object]:
    """A file is one dataset of a mixture (``trl/scripts/utils.py: DatasetConfig``): a name would be looked up."""
    data = case.data
    if data is None:
        return {"datasets": case.settings["datasets"]} if case.job.names_data else {}
    if data.kind is None:
        return {"dataset_name": data.path}
    return {"datasets": [{"path": data.kind, "data_files": data.path}]}
