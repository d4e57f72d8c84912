"""Defines the plan: settings that fit, the changes that lead to them, and the attempts of the search."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from autotrain_mem.settings.knobs import Knobs, Lever
from autotrain_mem.support import codec
from autotrain_mem.support.codec import Form
from autotrain_mem.support.errors import PlanFileError
from autotrain_mem.support.files import write_json
from autotrain_mem.support.lazy_names import ShownInNotebooks
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import plan_file
from autotrain_mem.types.data import PERCENTILES, DataSummary
from autotrain_mem.types.estimate import Candidate, Estimate
from autotrain_mem.types.experience import Experience
from autotrain_mem.types.gpu_comparison import LargestValue
from autotrain_mem.types.hardware import Price
from autotrain_mem.types.job import Job
from autotrain_mem.types.methods_table import METHODS
from autotrain_mem.types.vllm import VllmServer

_SECRET_ARGUMENTS = ("hub_token", "push_to_hub_token")
RECORDED_VARIABLES = frozenset(
    {
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "MALLOC_ARENA_MAX"),
        *("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
        *("CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
        *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
        *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY"),
        *("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_TAGS", "WANDB_NOTES", "WANDB_MODE"),
        *("WANDB_DISABLED", "WANDB_LOG_MODEL", "WANDB_WATCH", "COMET_PROJECT_NAME", "MLFLOW_EXPERIMENT_NAME"),
    }
)
"""The variables that a plan's file may hold: for devices, allocators and threads, and the names of runs in trackers.

Users exchange plans. Any other variable could hold a credential (HF_TOKEN, DATABASE_URL, a proxy with its password),
name another server (HF_ENDPOINT), or run code (PYTHONPATH, LD_PRELOAD). So no other variable is written to a plan or
taken from it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Proposes a change that only the user may make, with its flags and its reason."""

    flags: str
    """The flags to add to the command, such as ``--packing``."""
    why: str
    """The reason, in a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(ShownInNotebooks):
    """Holds settings that fit the budget, how they were found, and their job, data and versions.

    The JSON schema of its file, in the documentation, is generated from these dataclasses.

    >>> from autotrain_mem import AutoFit, Plan, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> chosen.save("plan.json")
    >>> Plan.load("plan.json").knobs == chosen.knobs
    True
    """

    json_form: ClassVar = Form(
        schema=plan_file.PLAN_SCHEMA,
        derived={
            "method": "method",
            "model": "model",
            "knobs": "knobs",
            "effective_batch_size": "knobs.effective_batch_size",
            "step_seconds": "estimate.time.known_step_seconds",
            "tokens_per_second": "estimate.time.known_tokens_per_second",
            "run_seconds": "run_seconds",
            "prompt_length": "prompt_length",
            "lr_scheduler_type": "schedule",
        },
        optional=("most", "price", "vllm_server"),
    )

    job: Job
    """The user's job, without secrets and without the objects of a running script."""
    level: str
    """The settings' level of harm (``search.levels``), such as ``lossless``, ``rounding`` or ``LoRA``."""
    estimate: Estimate
    """The estimate of these settings on the plan's GPU."""
    defaults: Knobs
    """The settings that the installed TRL has by default."""
    levers: tuple[Lever, ...]
    """The changes to the requested settings, the least harmful first; empty if the requested settings fit."""
    attempts: tuple[Candidate, ...]
    """The configurations that the search rehearsed, in order."""
    alternatives: tuple[Candidate, ...] = ()
    """The best or least demanding plans of other levels of harm, the least harmful first."""
    data: DataSummary | None = None
    """A summary of the rows under the plan's ``max_length``; None if the dataset was not read."""
    proposals: tuple[Proposal, ...] = ()
    """Changes to batches or their order that would pay off, such as packing."""
    questions: tuple[Proposal, ...] = ()
    """Levels of harm that are much faster but do more harm, with the flags that choose them."""
    advice: tuple[Proposal, ...] = ()
    """Improvements that would override the user's settings."""
    warnings: tuple[str, ...] = ()
    """The findings that do not stop a run, each with its cure, and why a followed plan was rehearsed again."""
    optimizer_steps: int | None = None
    """The optimizer steps of the whole run; None if neither the data nor the arguments determine them."""
    seconds: float
    """The time that planning took."""
    row_tokens: int
    """The tokens of the longest rehearsed row, or of the longest prompt if completions are sampled."""
    versions: Mapping[str, str | None]
    """The installed version of each package (``versions.versions_key``); None for a missing package."""
    model_digest: str
    """A digest of the configs of all models of the job, by which the same models in another folder are recognized."""
    allocator: str = ""
    """The allocator settings of the environment, in the form of PYTORCH_ALLOC_CONF."""
    objects: str | None = None
    """A digest of a script's objects (model, adapter config, loss); empty if unknown, None for a job in flags."""
    most: LargestValue | None = None
    """The largest value that fits and what limits it; None unless an argument was ``max``."""
    price: Price | None = None
    """The rental price of one such GPU; None without a budget for the cost."""
    vllm_server: VllmServer | None = None
    """The vLLM server that generates on its own GPUs; None without one."""
    experience: Experience = field(default_factory=Experience)
    """The results of probes and runs with these settings so far."""

    @staticmethod
    def unfolded(values: Any) -> Any:
        """Returns the JSON of a plan with its estimate unfolded. Raises CodecError if the estimate is malformed."""
        return {**values, "estimate": Estimate.unfolded(values.get("estimate"))}

    def __post_init__(self) -> None:
        object.__setattr__(self, "job", as_recorded(self.job))

    def __repr__(self) -> str:
        estimate = self.estimate
        needs = f"{format_bytes(estimate.required_bytes)} of {format_bytes(estimate.budget_bytes)}{estimate.segments}"
        fits = "fits" if estimate.fits else "does not fit"
        return f"<Plan of {self.method}, {self.model}: {fits} {estimate.hardware.name}, {needs}, {self.level}>"

    @property
    def method(self) -> str:
        """Returns the training method: a key of ``methods_table.METHODS``."""
        return self.job.method

    @property
    def model(self) -> str:
        return self.job.model

    @property
    def knobs(self) -> Knobs:
        return self.estimate.knobs

    @property
    def prompt_length(self) -> int | None:
        """Returns the tokens of the longest prompt that was planned for; None for methods that do not sample."""
        return self.row_tokens if self.job.is_online else None

    @property
    def schedule(self) -> str:
        """Returns the learning rate's schedule, or transformers' default (``training_args.py: lr_scheduler_type``)."""
        given = self.job.arguments.get("lr_scheduler_type", "linear")
        return str(getattr(given, "value", given)).lower()

    @property
    def run_seconds(self) -> float | None:
        """Computes the duration of the training in seconds, or the most if tokens were not counted; None if steps or
        speed are unknown."""
        if self.optimizer_steps is None or self.estimate.time.assumed:
            return None
        return self.estimate.time.of_run(self.optimizer_steps)

    @property
    def cost(self) -> float | None:
        """Computes the cost of the training, in the price's currency; None if price, steps or speed are unknown."""
        if self.price is None or self.run_seconds is None:
            return None
        return self.price.cost(self.run_seconds, cards=self.estimate.hardware.topology.processes)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a plan's file, or the ``plan.json`` in an output folder.

        Raises:
            PlanFileError: the file does not exist, is not an ordinary file, is damaged, or is of another version.
        """
        return read_plan(*plan_file.read_content(path))

    def save(self, path: str | Path) -> None:
        """Writes the plan, as ``plan.json`` if the path is a folder. An existing plan is replaced atomically.

        Raises:
            PlanFileError: the path names a file that is not a plan.
            OutputFolderError: the file cannot be written. An existing file stays unchanged.
        """
        save_plan(path, self)


def as_recorded(job: Job) -> Job:
    """Returns the job without the user's access tokens and a script's objects, so that a file may show it.

    For variables outside :data:`RECORDED_VARIABLES`, it holds the names but no values.
    """
    arguments = {name: value for name, value in job.arguments.items() if name not in _SECRET_ARGUMENTS}
    public = {name: value for name, value in job.environment.items() if name in RECORDED_VARIABLES}
    unrecorded = sorted({*(job.unrecorded or ()), *job.environment} - public.keys())
    recorded = replace(job, arguments=arguments, environment=public, python_call=None)
    return replace(recorded, unrecorded=tuple(unrecorded) or None)


def save_plan(path: str | Path, plan: Plan, *, place: str = plan_file.PYTHON) -> Path:
    """Writes a plan atomically, as ``plan.json`` if the path is a folder, and returns the file. Replaces only a plan or
    an empty file; raises as ``plan_file.check_place`` does, and leaves an existing file unchanged then. ``place``: the
    words in a hint that tell the user how to name another place."""
    plan_file.check_place(path, place)
    file = plan_file.file_of(path)
    write_json(file, codec.to_json(plan), place=place)
    return file


def read_plan(content: bytes, name: str) -> Plan:
    """Reads a plan from a file's content. Arguments and errors are those of ``plan_file.plan_values``."""
    values = plan_file.plan_values(content, name)
    job = values.get("job")
    environment = job.get("environment") if isinstance(job, dict) else None
    if isinstance(environment, dict):
        # Variables that no plan may hold are rejected, unless the user sets them too: then the user's value counts.
        for variable in environment.keys() - RECORDED_VARIABLES & os.environ.keys():
            del environment[variable]
        if others := sorted(environment.keys() - RECORDED_VARIABLES):
            why = "it could run code, or send data elsewhere"
            message = f"{name} sets {', '.join(others)}, which a plan must not set for the training process: {why}."
            own = f"To set one anyway, set it yourself: {others[0]}=... autofit ..."
            raise PlanFileError(message, hint=f"Remove every such variable from the plan's environment. {own}")
    try:
        plan = codec.from_json(Plan, values)
    except codec.CodecError as error:
        raise plan_file.damaged(name, str(error), values) from error
    if plan.method not in METHODS:
        raise plan_file.damaged(name, f"job.method is {plan.method!r}", values)
    if wrong := plan_file.differing(values, codec.to_json(plan)) or _wrong_sums(plan):
        raise plan_file.damaged(name, wrong, values)
    return plan


def _wrong_sums(plan: Plan) -> str:
    """Describes the first figure that contradicts another one; empty if none does."""
    estimate, memory = plan.estimate, plan.estimate.memory
    if sum(memory.owners_at_peak.values()) != memory.peak_allocated_bytes:
        return "estimate.owners_at_peak do not sum to peak_allocated_bytes"
    if estimate.reserved.peak_reserved_bytes < memory.peak_allocated_bytes:
        return "estimate.reserved.peak_reserved_bytes is less than peak_allocated_bytes"
    if plan.data is not None and len(plan.data.percentiles) != len(PERCENTILES):
        return "data.percentiles does not have one value for each percentile"
    return ""
