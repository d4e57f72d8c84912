"""The story on one page: what a configuration needs, which one fits, and the run itself.

``estimate`` rehearses one configuration; ``plan`` searches for the best that fits; ``fit`` plans and trains. A
:class:`Rehearsals` holds what the three share: the job, the device, and the worker that rehearses.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.alternatives import with_alternatives
from autotrain_mem.errors import DoesNotFitError, InterruptedByUser, ModelNotFoundError, NoGpuError, UsageError
from autotrain_mem.estimator.memory import estimate_memory
from autotrain_mem.estimator.replay import Room
from autotrain_mem.estimator.snapshot import make_snapshot
from autotrain_mem.estimator.vllm_share import vllm_share_bytes
from autotrain_mem.machine.catalog import catalog
from autotrain_mem.machine.choose import choose
from autotrain_mem.machine.detect import detect
from autotrain_mem.planner.ladder import check_forbid
from autotrain_mem.planner.search import search
from autotrain_mem.planner.space import Space, make_space
from autotrain_mem.rehearsal.client import Worker
from autotrain_mem.report.record import write_run
from autotrain_mem.report.snapshot import write_snapshot
from autotrain_mem.spec import Attempt, DataProfile, Estimate, Hardware, Job, Knobs, Plan, Report, Trace
from autotrain_mem.spec.hardware import ASSUMED_CAPABILITY
from autotrain_mem.spec.job import EXAMPLE_DATASETS
from autotrain_mem.spec.report import MemoryReading
from autotrain_mem.training import launch
from autotrain_mem.training.environment import environment_setting, environment_settings, process_environment

__all__ = [
    "Rehearsals",
    "Worker",
    "check_can_train",
    "choose",
    "estimate",
    "example_dataset",
    "fit",
    "gpus",
    "output_dir",
    "plan",
    "reads_dataset",
    "trl_defaults_plan",
]

Told = Callable[[Attempt], None]
LONGEST_UNKNOWN = 1024
"""Tokens of a rehearsed row when neither the user, the data nor the model's config limits it: TRL's own max_length."""
REWARD_MODELS = ("reward_model_path", "reward_model_name_or_path")
"""What PPO, and what GRPO and RLOO, call the reward model."""
PROMPT_UNKNOWN = 512
"""Tokens of a rehearsed prompt when neither the user nor the data say: TRL's own max_prompt_length, as long as it had
one (trl/trainer/grpo_config.py up to 0.24)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsals:
    """One job on one device, and the worker that can rehearse it."""

    worker: Worker
    job: Job
    defaults: Knobs
    """What the installed TRL takes when nothing is given."""
    hardware: Hardware
    headroom_bytes: int | None = None
    """What is left free on the device; None for the default."""

    @property
    def budget_bytes(self) -> int:
        """What a run may take of the device; less where the environment lets the allocator have only a fraction."""
        allowed = int(self.settings.per_process_memory_fraction * self.hardware.total_bytes)
        return min(self.hardware.budget_bytes(self.headroom_bytes), allowed + self.outside_bytes)

    @property
    def outside_bytes(self) -> int:
        """What the run holds outside the trainer's own allocator."""
        return self.hardware.non_torch_bytes + vllm_share_bytes(self.job, self.hardware)

    @property
    def compute_capability(self) -> tuple[int, int]:
        """The card's, by which its kernels differ."""
        return self.hardware.compute_capability or ASSUMED_CAPABILITY

    def with_output_dir(self, output_dir: str) -> Rehearsals:
        """The same job, written elsewhere."""
        job = replace(self.job, arguments={**self.job.arguments, "output_dir": output_dir})
        return replace(self, job=job)

    def predict(self, knobs: Knobs, longest: int | None) -> Estimate:
        """Rehearse one configuration whose longest row has ``longest`` tokens (None: rows fill max_length)."""
        return self.judge(knobs, self.rehearse(knobs, longest))

    def judge(self, knobs: Knobs, trace: Trace) -> Estimate:
        """What a configuration needs that has been rehearsed."""
        return Estimate(
            knobs=knobs,
            hardware=self.hardware,
            memory=estimate_memory(trace, self.room),
            budget_bytes=self.budget_bytes,
            vllm_share_bytes=vllm_share_bytes(self.job, self.hardware),
        )

    def rehearse(self, knobs: Knobs, longest: int | None) -> Trace:
        """Everything that one configuration allocates and frees, in order."""
        return self.worker.rehearse(self.job, knobs, row_length(self.job, knobs, longest), self.compute_capability)

    @property
    def settings(self) -> AllocatorSettings:
        """What the user's environment sets of the allocator; raises UsageError for what torch would refuse."""
        return environment_settings(self.job.environment)

    def within_environment(self, space: Space) -> Space:
        """The same space with the knobs pinned that the environment sets: these are words of the user's too."""
        if "expandable_segments" not in environment_setting(self.job.environment):
            return space
        expands = space.base.expandable_segments or self.settings.expandable_segments
        base = replace(space.base, expandable_segments=expands)
        return replace(space, base=base, pinned=space.pinned | {"expandable_segments"})

    @property
    def room(self) -> Room:
        """What the trainer's allocator can have of the budget."""
        return Room(
            capacity_bytes=max(0, self.budget_bytes - self.outside_bytes),
            total_bytes=self.hardware.total_bytes,
            settings=self.settings,
            caches=self.hardware.origin != "cpu",
        )


def estimate(rehearsals: Rehearsals, snapshot: pathlib.Path | None = None) -> Estimate:
    """One configuration exactly as given, TRL's defaults for the rest; no search.

    Args:
        snapshot: A file for the predicted history, as ``torch.cuda.memory._dump_snapshot`` would write it.

    Raises:
        ModelError, RehearsalError, BatchSplitError, ContextLengthError.
        OutputFolderError: the snapshot cannot be written.
    """
    job = rehearsals.job
    if snapshot is not None and not rehearsals.room.caches:
        raise UsageError(
            "--snapshot shows the allocator of a GPU, and the CPU has none.",
            hint="Name a card, such as --gpu a100-80gb, or leave --snapshot away.",
        )
    longest = _profile_longest(rehearsals) if _counts_for_estimate(job) else job.prompt_length
    facts = rehearsals.worker.describe(job, rehearsals.compute_capability)
    space = rehearsals.within_environment(make_space(rehearsals.defaults, job, facts, longest=longest))
    trace = rehearsals.rehearse(space.base, longest or (None if job.is_online else facts.context_length))
    found = rehearsals.judge(space.base, trace)
    if snapshot is not None:
        expandable = found.knobs.expandable_segments
        setting = environment_setting(job.environment, expandable_segments=space.base.expandable_segments)
        write_snapshot(snapshot, make_snapshot(trace, rehearsals.room, expandable_segments=expandable, setting=setting))
    return found


def plan(rehearsals: Rehearsals, told: Told = lambda attempt: None, *, to_train: bool = False) -> Plan:
    """The best configuration that fits the budget, by the ladder of least harm.

    Args:
        told: Hears of every configuration as it has been rehearsed.
        to_train: The data will be needed, so they are read even where the plan could do without.

    Raises:
        DoesNotFitError: nothing that the user allows fits; the message holds the nearest that would.
        ModelError, DatasetError, RehearsalError, BatchSplitError, ContextLengthError.
    """
    started = time.perf_counter()
    job = rehearsals.job
    check_forbid(job.forbid)
    facts = rehearsals.worker.describe(job, rehearsals.compute_capability)
    profile = _profile(rehearsals) if reads_dataset(job, to_train=to_train) else None
    longest = job.prompt_length if profile is None else max(profile.longest, profile.longest_evaluated)
    shortest = None if profile is None else profile.shortest
    space = make_space(rehearsals.defaults, job, facts, longest=longest, shortest=shortest)
    space = rehearsals.within_environment(space)

    def predict(knobs: Knobs) -> Estimate:
        return rehearsals.predict(knobs, longest)

    def predict_other(other: Job, knobs: Knobs) -> Estimate:
        return replace(rehearsals, job=other).predict(knobs, longest)

    try:
        found = search(space, predict, told)
    except DoesNotFitError as error:
        raise with_alternatives(error, job, space, predict_other) from error
    max_length = found.estimate.knobs.max_length
    return Plan(
        method=job.method,
        estimate=found.estimate,
        levers=found.levers,
        attempts=found.attempts,
        truncated_tokens_fraction=None if profile is None else profile.truncated_tokens_fraction(max_length),
        truncated_rows_fraction=None if profile is None else profile.truncated_rows_fraction(max_length),
        seconds=time.perf_counter() - started,
        prompt_length=row_length(job, found.estimate.knobs, longest) if job.is_online else None,
    )


def fit(
    rehearsals: Rehearsals,
    chosen: Plan,
    *,
    simulate: bool,
    on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
) -> Report:
    """Train with a plan in a process of its own; returns predicted against measured.

    The output folder then holds the model, ``plan.json``, ``run.json`` and ``train.log``.

    Args:
        simulate: Train on the CPU while a simulated card of that name keeps account.
        on_event: Hears of every step: ``start``, ``step`` and ``log`` events of ``training.callback``.

    Raises:
        OutputFolderError: the folder cannot be written or holds another run.
        GpuOutOfMemoryError, TrainingError, DatasetError, ModelError.
        InterruptedByUser: Ctrl-C; what was written is whole.
    """
    job = rehearsals.job
    device = _training_device(rehearsals.hardware, simulate=simulate)
    folder = launch.prepare_folder(output_dir(job), resuming=_resumes(job))
    write_run(folder, plan_json=chosen.to_json())
    arguments = {name: value for name, value in job.arguments.items() if value != "auto"}
    end = launch.train(
        {
            "job": replace(job, arguments=arguments).to_json(),
            "knobs": chosen.knobs.to_json(),
            "hardware": device.to_json(),
            "simulate": simulate,
            "output_dir": str(folder),
        },
        process_environment(device, chosen.knobs, job.environment, simulate=simulate),
        folder / launch.LOG_NAME,
        on_event,
    )
    report = _report(chosen, str(folder), end)
    write_run(folder, report_json=report.to_json() | {"job": job.to_json()})
    if end["interrupted"]:
        raise InterruptedByUser(
            f"Interrupted after step {report.steps}; what was written is whole.", hint=_how_to_go_on(folder)
        )
    return report


def check_can_train(rehearsals: Rehearsals, *, simulate: bool) -> None:
    """Fail before minutes of planning, not after: is there a device, are there weights, and a folder to write to?

    Raises:
        NoGpuError, ModelNotFoundError, OutputFolderError.
        UsageError: what the method needs beside these is not given, such as a reward.
    """
    _training_device(rehearsals.hardware, simulate=simulate)
    job = rehearsals.job
    rehearsals.worker.check_can_train(job)
    for name in (job.model, *(job.arguments.get(argument) for argument in REWARD_MODELS)):
        if name:
            _check_weights(pathlib.Path(name))
    launch.check_folder(output_dir(job), resuming=_resumes(job))


def gpus() -> tuple[Hardware, ...]:
    """The cards that are known by name."""
    return catalog()


def example_dataset(job: Job) -> str | None:
    """TRL's own example, when the job names no data and so takes it."""
    named = job.dataset is not None or {"dataset_name", "datasets"} & set(job.arguments)
    return None if named else EXAMPLE_DATASETS[job.method]


def reads_dataset(job: Job, *, to_train: bool) -> bool:
    """Whether planning counts tokens: not when the length is given, no data are named, and none will be trained on."""
    return to_train or not job.pins_length or example_dataset(job) is None


def output_dir(job: Job) -> str:
    """Where the run goes: as given, or named after the model and the method as TRL names it."""
    name = job.model.rstrip("/").split("/")[-1]
    return str(job.arguments.get("output_dir") or f"{name}-{job.method.upper()}")


def trl_defaults_plan(method: str, predicted: Estimate) -> Plan:
    """TRL's defaults as a plan of their own, for those who want to see them run out of memory."""
    return Plan(
        method=method,
        estimate=predicted,
        levers=(),
        attempts=(),
        truncated_tokens_fraction=None,
        truncated_rows_fraction=None,
        seconds=predicted.memory.rehearsal_seconds,
    )


def _resumes(job: Job) -> bool:
    return bool(job.arguments.get("resume_from_checkpoint"))


def _check_weights(model: pathlib.Path) -> None:
    """A folder is planned for by its config alone, but trained with its weights; a hub id is not looked up here."""
    if model.is_dir() and not any(next(model.glob(kind), None) for kind in ("*.safetensors", "*.bin")):
        raise ModelNotFoundError(
            f"{model} holds no weights (*.safetensors or *.bin), so there is nothing to train.",
            hint="--plan_only plans with the config alone. To train, give a folder made by save_pretrained.",
        )


def _profile(rehearsals: Rehearsals) -> DataProfile | None:
    """Token lengths of the data; None when the length is pinned and there is no tokenizer to count with."""
    try:
        return rehearsals.worker.profile(rehearsals.job)
    except ModelNotFoundError:
        if rehearsals.job.pins_length:
            return None
        raise


def _counts_for_estimate(job: Job) -> bool:
    """An estimate counts tokens where it is asked to, and for prompts, whose length nothing else says."""
    if job.is_online:
        return job.prompt_length is None and example_dataset(job) is None
    return bool(job.arguments.get("max_length") == "auto")


def _profile_longest(rehearsals: Rehearsals) -> int:
    profile = rehearsals.worker.profile(rehearsals.job)
    return max(profile.longest, profile.longest_evaluated)


def row_length(job: Job, knobs: Knobs, longest: int | None) -> int:
    """Tokens of the longest row that a batch can hold: packed blocks are always full, rows only as long as they are.

    For online methods that is the longest prompt, which nothing truncates.
    """
    if job.is_online:
        return longest or PROMPT_UNKNOWN
    limits = [knobs.max_length] if knobs.packing else [knobs.max_length, longest]
    return min((limit for limit in limits if limit is not None), default=LONGEST_UNKNOWN)


def _training_device(named: Hardware, *, simulate: bool) -> Hardware:
    """What the training runs on: the planned device itself, or a detected card that holds a plan for a named one."""
    if simulate or named.origin in ("cpu", "detected"):
        return named
    for card in detect():
        if card.total_bytes >= named.total_bytes:
            return card
    raise NoGpuError(
        f"The plan is for {named.name}, but no such GPU is here to train on.",
        hint="--plan_only     plan for that card and stop\n"
        "--simulate      train on the CPU while a simulated card of that name keeps account",
    )


def _how_to_go_on(folder: pathlib.Path) -> str:
    if any(folder.glob("checkpoint-*")):
        return f"Its checkpoint is in {folder}; go on with --resume_from_checkpoint true."
    return "There is no checkpoint to go on from: --save_steps says how often one is written."


def _report(chosen: Plan, folder: str, end: Mapping[str, Any]) -> Report:
    losses, rewards = end["losses"], end["rewards"]
    return Report(
        output_dir=folder,
        steps=end["steps"],
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        first_reward=rewards[0] if rewards else None,
        last_reward=rewards[-1] if rewards else None,
        predicted_peak_bytes=chosen.estimate.reserved.peak_allocated_bytes,
        predicted_peak_reserved_bytes=chosen.estimate.reserved.peak_reserved_bytes,
        measured=None if end["memory"] is None else MemoryReading.from_json(end["memory"]),
        seconds=end["seconds"],
    )
