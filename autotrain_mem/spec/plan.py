"""The decision: settings that fit, what was changed to get there, and what was tried."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autotrain_mem.spec.data_summary import DataSummary
from autotrain_mem.spec.estimate import Estimate
from autotrain_mem.spec.experience import Experience
from autotrain_mem.spec.job import Job
from autotrain_mem.spec.knobs import Knobs, Lever

PLAN_SCHEMA = "autofit.plan/4"
"""``plan.schema.json`` in this package describes it."""
PLAN_NAME = "plan.json"
"""Of the plan in an output folder."""

_SECRET_ARGUMENTS = ("hub_token", "push_to_hub_token")
_SECRET_VARIABLE = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD)(_|$)", re.IGNORECASE)
"""Of the environment, as services name what lets somebody in: HF_TOKEN, WANDB_API_KEY. A plan is made to be passed on,
so it holds none of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One point that the search rehearsed.

    >>> from autotrain_mem import AutoFit, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> any(attempt.fits for attempt in chosen.attempts)
    True
    """

    knobs: Knobs
    required_bytes: int
    budget_bytes: int
    tokens_per_second: float | None = None
    """None on a device whose speed is not known."""
    rehearsed_layers: int | None = None
    """How many layers the rehearsed copies had at most; None where the whole model was rehearsed."""

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "knobs": self.knobs.to_json(),
            "required_bytes": self.required_bytes,
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "tokens_per_second": self.tokens_per_second,
            "rehearsed_layers": self.rehearsed_layers,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Attempt:
        """Read what :meth:`to_json` wrote."""
        kept = {name: value for name, value in values.items() if name != "fits"}
        return cls(**{**kept, "knobs": Knobs.from_json(values["knobs"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """What another level of harm has to offer on this device: its best plan, or the least that it would need.

    >>> from autotrain_mem import AutoFit, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> [other.level for other in chosen.alternatives if other.fits]
    ['rounding']
    """

    level: str
    knobs: Knobs
    required_bytes: int
    budget_bytes: int
    tokens_per_second: float | None
    ratio: float | None
    """Its tokens per second over the plan's; None where it does not fit."""
    would_fit: tuple[str, ...] = ()
    """Where it would: the next larger cards, or more of these, each in a few words; empty where it fits here."""

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "knobs": self.knobs.to_json(),
            "required_bytes": self.required_bytes,
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "tokens_per_second": self.tokens_per_second,
            "ratio": self.ratio,
            "would_fit": list(self.would_fit),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Alternative:
        """Read what :meth:`to_json` wrote."""
        kept = {name: value for name, value in values.items() if name != "fits"}
        return cls(**{**kept, "knobs": Knobs.from_json(values["knobs"]), "would_fit": tuple(values["would_fit"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """What would pay and a plan may not do by itself, since it changes the batches or their order.

    >>> from autotrain_mem import Proposal
    >>> Proposal(flags="--packing", why="41 % of what a micro-batch computes is padding").flags
    '--packing'
    """

    flags: str
    """As they would be added to the command: ``--packing``."""
    why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Settings that fit the budget, with the way they were found, and all that they were found for.

    ``plan.schema.json`` in this package describes the file that it can be written to.

    >>> from autotrain_mem import AutoFit, Plan, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> chosen.save("plan.json")
    >>> Plan.load("plan.json").knobs == chosen.knobs
    True
    """

    job: Job
    """What the user asked for, without secrets and without what only a running script has."""
    level: str
    """Name of the level of harm that the settings are of (``planner.levels``): ``lossless``, ``rounding``, ``LoRA``."""
    estimate: Estimate
    """Of these settings, on the card that the plan is for."""
    defaults: Knobs
    """What the installed TRL takes where nothing is given."""
    levers: tuple[Lever, ...]
    """What differs from the settings asked for, in the ladder's order; empty when these fit as they are."""
    attempts: tuple[Attempt, ...]
    alternatives: tuple[Alternative, ...] = ()
    """Of the levels around, least harm first."""
    data: DataSummary | None = None
    """What the rows say under the plan's ``max_length``; None when the dataset was not read."""
    proposals: tuple[Proposal, ...] = ()
    warnings: tuple[str, ...] = ()
    """What was found before planning that does not end the run, each with its cure; and why a plan that was made
    elsewhere was rehearsed again."""
    optimizer_steps: int | None = None
    """Of the whole run; None when neither the data nor ``max_steps`` say."""
    seconds: float
    row_tokens: int
    """Tokens of the longest row that was rehearsed; of the longest prompt where completions are sampled."""
    versions: Mapping[str, str | None]
    """What was installed (``versions.versions_key``); None for a package that was not."""
    model_digest: str
    """Of the configs of all models of the job, by which it is told whether another folder holds the same."""
    allocator: str = ""
    """What the environment said to torch's allocator, as PYTORCH_ALLOC_CONF has it."""
    objects: str | None = None
    """Digest of what a Python script handed over beside rows and config, which no file holds: a model, an adapter's
    config, a loss; empty where that could not be told. None for a job in flags."""
    experience: Experience = field(default_factory=Experience)
    """What probes and runs with these settings taught so far; empty for a plan that nothing has tried."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "job", as_recorded(self.job))

    @property
    def method(self) -> str:
        """The TRL trainer: one of ``methods.table.METHODS``."""
        return self.job.method

    @property
    def model(self) -> str:
        return self.job.model

    @property
    def knobs(self) -> Knobs:
        return self.estimate.knobs

    @property
    def prompt_length(self) -> int | None:
        """Tokens of the longest prompt planned for; None for methods whose rows are whole texts."""
        return self.row_tokens if self.job.is_online else None

    @property
    def run_seconds(self) -> float | None:
        """How long the training will take; None where steps or speed are not known."""
        if self.optimizer_steps is None or self.estimate.time.assumed:
            return None
        return self.optimizer_steps * self.estimate.time.step_seconds

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan of a file, or of the ``plan.json`` in an output folder.

        Raises:
            PlanFileError: it is not there, is no ordinary file, was cut short or changed, or was made by another
                version of this schema.
        """
        from autotrain_mem.spec.plan_file import load_plan  # which reads plans, and so imports this module

        return load_plan(path)

    def save(self, path: str | Path) -> None:
        """Write it, as ``plan.json`` where the path is a folder; a plan that is there is replaced in one step.

        Raises:
            PlanFileError: a file that is no plan is there.
            OutputFolderError: the file cannot be written; what was there still is.
        """
        from autotrain_mem.spec.plan_file import save_plan

        save_plan(path, self)

    def to_json(self) -> dict[str, Any]:
        time = self.estimate.time.to_json()
        return {
            "schema": PLAN_SCHEMA,
            "method": self.method,
            "model": self.model,
            "level": self.level,
            "knobs": self.knobs.to_json(),
            "effective_batch_size": self.knobs.effective_batch_size,
            "step_seconds": time["step_seconds"],
            "tokens_per_second": time["tokens_per_second"],
            "optimizer_steps": self.optimizer_steps,
            "run_seconds": self.run_seconds,
            "levers": [lever.to_json() for lever in self.levers],
            "estimate": self.estimate.to_json(),
            "defaults": self.defaults.to_json(),
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "alternatives": [alternative.to_json() for alternative in self.alternatives],
            "data": None if self.data is None else self.data.to_json(),
            "proposals": [proposal.to_json() for proposal in self.proposals],
            "warnings": list(self.warnings),
            "row_tokens": self.row_tokens,
            "prompt_length": self.prompt_length,
            "seconds": round(self.seconds, 3),
            "job": {name: value for name, value in self.job.to_json().items() if name != "handed"},
            "model_digest": self.model_digest,
            "versions": dict(self.versions),
            "allocator": self.allocator,
            "objects": self.objects,
            "experience": self.experience.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """Read what :meth:`to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        if values["schema"] != PLAN_SCHEMA:
            raise ValueError(f"schema {values['schema']!r}, not {PLAN_SCHEMA!r}")
        same = ("level", "optimizer_steps", "seconds", "row_tokens", "versions", "model_digest", "allocator")
        return cls(
            **{name: values[name] for name in (*same, "objects")},
            job=Job.from_json({**values["job"], "handed": None}),
            estimate=Estimate.from_json(values["estimate"]),
            defaults=Knobs.from_json(values["defaults"]),
            levers=tuple(map(Lever.from_json, values["levers"])),
            attempts=tuple(map(Attempt.from_json, values["attempts"])),
            alternatives=tuple(map(Alternative.from_json, values["alternatives"])),
            data=None if values["data"] is None else DataSummary.from_json(values["data"]),
            proposals=tuple(Proposal(**proposal) for proposal in values["proposals"]),
            warnings=tuple(values["warnings"]),
            experience=Experience.from_json(values["experience"]),
        )


def as_recorded(job: Job) -> Job:
    """The job as a file may hold it, for others to read: no token or key of the user's, no object of a script's."""
    arguments = {name: value for name, value in job.arguments.items() if name not in _SECRET_ARGUMENTS}
    public = {name: value for name, value in job.environment.items() if not _SECRET_VARIABLE.search(name)}
    return replace(job, arguments=arguments, environment=public, handed=None)
