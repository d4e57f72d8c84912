"""Turns a user's wish into one job on one device: the one way in for the command, the verbs of Python and trainers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotrain_mem.engine.accelerate_config import launch_warnings, with_accelerate
from autotrain_mem.engine.output_dir import RESUME, default_dir
from autotrain_mem.engine.rehearsals import Rehearsals, for_processes
from autotrain_mem.errors import PlanFileError, UsageError
from autotrain_mem.machine.choose import choose
from autotrain_mem.spec import Job, Plan
from autotrain_mem.spec.autofit import AutoFit
from autotrain_mem.spec.job import PythonCall
from autotrain_mem.spec.plan_file import PLAN_NAME
from autotrain_mem.store import Store, cache_folder
from autotrain_mem.training.supervisor import RESTARTS
from autotrain_mem.worker.pool import Workers

_MODEL_NAMES = ("model", "model_name_or_path")
_DATASET_NAMES = ("dataset", "dataset_name", "datasets")
"""What names the same: ours, and TRL's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """A training as any face asks for it: flags and YAML, the verbs of Python, or a trainer's call.

    TRL's arguments are not read yet. A :class:`Job` is what comes of them: another thing, since it holds exactly the
    arguments that TRL's parser has accepted, goes to other processes, and is recorded in ``plan.json``.
    """

    method: str
    """One of ``methods.table.METHODS``."""
    model: str | None = None
    """A hub id or a folder; None where one of TRL's arguments names it."""
    dataset: str | None = None
    autofit: AutoFit = field(default_factory=AutoFit)
    argv: tuple[str, ...] = ()
    """Flags for TRL's parser."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name for TRL's parser, as JSON has them: YAML keys, or keywords of Python. Flags win over them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For the processes that load the model."""
    also_known: tuple[str, ...] = ()
    """Names of our own, for did-you-mean."""
    accelerate: Mapping[str, Any] | None = None
    """The content of the user's config of ``accelerate launch``, as :func:`with_accelerate` read it."""
    pins: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that it pins beside those that AutoFit holds."""
    simulate: bool = False
    """Train on the CPU, with a simulated card."""
    plan_only: bool = False
    max_restarts: int = RESTARTS
    """How often in a row another process may go on with a training, without a new checkpoint."""
    overwrite_output_dir: bool = False
    """Move another run's folder aside."""
    probe: bool = True
    """Try the plan before it trains."""
    plan: Plan | None = None
    """The plan that is followed, as :func:`with_plan` read it; None where one is to be made."""

    @property
    def own(self) -> dict[str, Any]:
        """Those of our own settings that may contradict one of TRL's, or each other."""
        names = ("gpu", "gpus", "nodes", "effective_batch_size", "prompt_length")
        same = {name: getattr(self.autofit, name) for name in names}
        ways = {"simulate": self.simulate, "plan_only": self.plan_only}
        return {**same, **ways, "forbid": sorted(self.autofit.forbid)}

    def argument(self, name: str) -> object:
        """The value that a flag or a key gives one of TRL's arguments; None where neither does.

        A flag without a value is ``true``.
        """
        for token, following in zip(self.argv, (*self.argv[1:], "--"), strict=False):
            flag, equals, text = token.partition("=")
            if flag == f"--{name}":
                value = text if equals else ("true" if following.startswith("--") else following)
                return None if value.lower() == "false" else value
        return self.config.get(name)

    def names(self, *names: str) -> bool:
        """Whether one of these is given, as a field, a flag or a key."""
        flags = {token.partition("=")[0].lstrip("-").replace("-", "_") for token in self.argv if token.startswith("--")}
        is_field = any(getattr(self, name, None) is not None for name in names)
        return is_field or not flags.isdisjoint(names) or not self.config.keys().isdisjoint(names)

    def job(self, arguments: Mapping[str, Any], python_call: PythonCall | None = None) -> Job:
        """The job that is asked for.

        Args:
            arguments: Exactly what the user gave of TRL's, as its parser has read it.
            python_call: What a script hands to a trainer beside its config.
        """
        autofit = self.autofit
        return Job(
            method=self.method,
            model=str(self.model),
            dataset=self.dataset,
            arguments=arguments,
            environment=self.environment,
            unrecorded=None if self.plan is None else self.plan.job.unrecorded,
            effective_batch_size=autofit.effective_batch_size,
            prompt_length=autofit.prompt_length,
            fit=autofit.fit,
            forbid=frozenset(autofit.forbid),
            max_slowdown=autofit.max_slowdown,
            accelerate=self.accelerate,
            python_call=python_call,
        )


# -- a plan that was made before -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanHints:
    """Holds what one face advises where a plan cannot be followed: texts for ``str.format``.

    They may name ``plan``, its file; ``made_for`` and ``model``, its method and model; ``method``, the one asked for.
    """

    other_method: str
    objects: str


def resumed(wish: Wish, warn: Callable[[str], None], on_folder: Callable[[str], None] = lambda folder: None) -> Wish:
    """A run that is resumed follows its own plan, ``plan.json`` in its output folder, unless the wish names another.

    Args:
        warn: Hears why the plan that is there is not followed.
        on_folder: Hears of the folder whose plan is followed.
    """
    if wish.autofit.plan is not None or not wish.argument(RESUME):
        return wish
    model = wish.model or wish.argument("model_name_or_path")
    folder = wish.argument("output_dir") or (model and default_dir(wish.method, str(model)))
    if not folder:
        return wish
    try:
        Plan.load(str(folder))
    except PlanFileError as error:  # another version wrote it, or somebody changed it
        if Path(str(folder), PLAN_NAME).exists():
            warn(f"the run in {folder} is gone on with, and another plan made for it: {error.message}")
        return wish
    on_folder(str(folder))
    return replace(wish, autofit=replace(wish.autofit, plan=str(folder)))


def read_plan(given: Plan | str | Path, method: str, other_method: str) -> Plan:
    """A plan to follow, read from its file, with the hint (see :class:`PlanHints`) for one of another method.

    Raises:
        PlanFileError: there is none in that file.
        UsageError: it is another method's.
    """
    plan = given if isinstance(given, Plan) else Plan.load(given)
    if plan.method != method:
        advice = other_method.format(plan=given, made_for=plan.method, model=plan.model, method=method)
        raise UsageError(f"{_called(given)} is for {plan.method}, not for {method}.", hint=advice)
    return plan


def with_plan(wish: Wish, hints: PlanHints, warn: Callable[[str], None], *, to_train: bool) -> Wish:
    """The wish with the plan that it names, whose own words stand where the wish leaves something open.

    Args:
        warn: Hears which variables the plan sets, before any process has them, and which it does not have.
        to_train: On the device that is here; else on the plan's, unless the wish names another.

    Raises:
        PlanFileError: there is none in that file.
        UsageError: it is another method's, or was made of a script's objects and these are not named.
    """
    given = wish.autofit.plan
    if given is None:
        return wish
    plan = read_plan(given, wish.method, hints.other_method)
    names_model, names_dataset = wish.names(*_MODEL_NAMES), wish.names(*_DATASET_NAMES)
    if plan.objects is not None and not (names_model and names_dataset):
        raise UsageError(
            f"{_called(given)} was made in Python, from data or a model that no file holds.",
            hint=hints.objects.format(plan=given),
        )
    job = plan.job
    for message in _taken(job, wish):
        warn(message)
    return replace(
        wish,
        plan=plan,
        autofit=wish.autofit.over(plan, here=to_train and not wish.simulate),
        model=wish.model if names_model else job.model,
        dataset=wish.dataset if names_dataset else job.dataset,
        config={**job.trl_arguments, **wish.config},
        accelerate=job.accelerate if wish.accelerate is None else wish.accelerate,
        environment={**job.environment, **wish.environment},
    )


def _taken(planned: Job, wish: Wish) -> Iterator[str]:
    """Yields what to know of a plan's variables, and of code that it runs, where the user does not say the same."""
    given = wish.environment
    if planned.arguments.get("trust_remote_code") and not wish.names("trust_remote_code"):
        yield f"the plan runs code that comes with {planned.model} (trust_remote_code)"
    if taken := [f"{name}={value}" for name, value in planned.environment.items() if name not in given]:
        yield f"the plan sets {' '.join(taken)} for the processes that load the model"
    if missing := sorted({*(planned.unrecorded or ())} - given.keys() - os.environ.keys()):
        yield (
            f"the plan was made with {', '.join(missing)}, whose value no plan holds, and which is not set here: "
            f"{missing[0]}=... before the command sets it, or the env: block of a config"
        )


def _called(given: Plan | str | Path) -> str:
    return "The plan" if isinstance(given, Plan) else f"The plan in {given}"


# -- who started this process ------------------------------------------------------------------------------------------

_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""What torchrun and MPI say to the processes that they start (``accelerate/utils/environment.py:
get_cpu_distributed_information``)."""


_SHARDS = (
    *("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"),
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
"""What accelerate says to the processes that it starts (``accelerate/utils/launch.py``)."""


def check_launch() -> None:
    """Refuse to be one of several processes: each would begin a run of its own, whose training waits for the others.

    ``LOCAL_RANK`` alone has accelerate wait for them (``accelerate/state.py: PartialState.__init__``).

    Raises:
        UsageError: torchrun, accelerate or MPI started this process, or it has what they say.
    """
    sizes = [os.environ.get(name, "") for name in _WORLD_SIZES]
    if "LOCAL_RANK" in os.environ or any(size.isdigit() and int(size) > 1 for size in sizes):
        raise UsageError(
            "autofit was started by torchrun, accelerate launch or mpirun: it starts a process for each GPU itself.",
            hint="Start it without them: --gpus N and --sharding, or --accelerate_config FILE, say how many and how.\n"
            "They launch a script with a trainer of autotrain_mem: from autotrain_mem import SFTTrainer.",
        )
    if on := [name for name in _SHARDS if os.environ.get(name, "").lower() == "true"]:
        raise UsageError(
            f"{on[0]} is set in this shell: every process would shard, whatever is planned.",
            hint=f"unset {on[0]}; --sharding, or --accelerate_config FILE, says how processes share the model.",
        )


# -- a job on a device -----------------------------------------------------------------------------------------------


def rehearsals_for(workers: Workers, wish: Wish, warn: Callable[[str], None]) -> Rehearsals:
    """The job that is asked for, on its device.

    Args:
        warn: Hears when the cache on disk was damaged or cannot be written, and of GPUs that do not answer.

    Raises:
        UsageError: an argument that TRL does not know (with the nearest) or refuses; all that contradicts itself; a
            headroom that leaves nothing; torchrun started this process.
        NoGpuError, UnknownGpuError: there is no such device.
    """
    check_launch()
    wish = with_accelerate(wish)
    for message in launch_warnings(wish):
        warn(message)
    autofit, pins = wish.autofit, {**wish.autofit.pins, **wish.pins}
    given, defaults = workers.first.parse(
        wish.method, wish.argv, wish.config, wish.environment, wish.also_known, pins, wish.own
    )
    model = wish.model or given.get("model_name_or_path")
    if not model:
        raise UsageError(
            "No model is given.", hint="Give --model MODEL, a hub id such as Qwen/Qwen2.5-0.5B or a folder."
        )
    store = Store(cache_folder(), on_damage=warn)
    hardware = choose(
        autofit.gpu,
        use_cpu=bool(given.get("use_cpu")),
        gpus=_one(autofit),
        nodes=autofit.nodes or 1,
        link=autofit.link,
        store=store,
        environment=wish.environment,
        warn=warn,
    )
    return Rehearsals(
        workers=workers,
        job=replace(wish, model=str(model)).job(given),
        defaults=for_processes(defaults, hardware.topology, given),
        hardware=hardware,
        headroom_bytes=autofit.headroom_bytes(hardware.total_bytes),
        store=store,
    )


def _one(autofit: AutoFit) -> int | None:
    counts = autofit.gpu_counts
    if len(counts) > 1:
        raise UsageError(
            f"--gpus {','.join(map(str, counts))} asks for several plans.",
            hint="Only autofit plan METHOD --gpu NAME compares numbers of GPUs; give --gpus one here.",
        )
    return counts[0] if counts else None
