"""Makes a job from a request: applies its plan and configs, and has TRL's parser read its arguments in a worker."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from autotrain_mem.machine.choose import choose
from autotrain_mem.machine.prices import prices
from autotrain_mem.planning.accelerate_config import config_content, launch_warnings, refuse_all, with_accelerate
from autotrain_mem.planning.for_processes import arguments_over, autofit_of, for_processes, is_shared_otherwise
from autotrain_mem.planning.kept_answers import parsed
from autotrain_mem.planning.output_dir import RESUME
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.planning.run_request import RunRequest, check_launch, no_model
from autotrain_mem.planning.vllm_server import gpus_served_here
from autotrain_mem.settings import adapter_config
from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.settings.words import CHECKPOINTING, RECOMPUTES
from autotrain_mem.support.errors import PlanFileError, UsageError
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.types import PLAN_NAME, Plan
from autotrain_mem.worker.pool import Workers

_DATASET_NAMES = ("dataset", "dataset_name", "datasets")
"""The names of our argument for the dataset, and of TRL's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanHints:
    """Holds templates of hints for plans that do not apply. Fields: ``plan``, ``made_for``, ``model``, ``method``."""

    other_method: str
    objects: str


def resumed(
    request: RunRequest, warn: Callable[[str], None], on_folder: Callable[[str], None] = lambda folder: None
) -> RunRequest:
    """Makes a resumed run follow the plan in its output folder, unless the request names another plan."""
    folder = request.folder
    if request.autofit.plan is not None or not request.argument(RESUME) or not folder:
        return request
    try:
        Plan.load(folder)
    except PlanFileError as error:  # another version wrote it, or somebody changed it
        if Path(folder, PLAN_NAME).exists():
            warn(f"the run in {folder} continues with a new plan: {error.message}")
        return request
    on_folder(folder)
    return replace(request, autofit=replace(request.autofit, plan=folder))


def read_plan(given: Plan | str | Path, method: str, other_method: str) -> Plan:
    """Reads a plan to follow. Raises PlanFileError if there is none, and UsageError if it is for another method."""
    plan = given if isinstance(given, Plan) else Plan.load(given)
    if plan.method != method:
        advice = other_method.format(plan=given, made_for=plan.method, model=plan.model, method=method)
        raise UsageError(f"{_called(given)} is for {plan.method}, not for {method}.", hint=advice)
    return plan


def with_plan(request: RunRequest, hints: PlanHints, warn: Callable[[str], None], *, to_train: bool) -> RunRequest:
    """Returns the request with the plan that it names; the plan's settings fill what the request leaves open.
    ``to_train``: whether to use the devices of this machine instead of the plan's. Raises PlanFileError if the file
    holds no plan, and UsageError if the plan is for another method, or needs a script's objects that the request does
    not name."""
    if (given := request.autofit.plan) is None:
        return request
    plan = read_plan(given, request.method, hints.other_method)
    names_model, names_dataset = request.names("model", "model_name_or_path"), request.names(*_DATASET_NAMES)
    if plan.objects is not None and not (names_model and names_dataset):
        raise UsageError(
            f"{_called(given)} was made in Python, from data or a model that are in no file.",
            hint=hints.objects.format(plan=given),
        )
    job, given_here = plan.job, request.environment
    if job.arguments.get("trust_remote_code") and not request.names("trust_remote_code"):
        warn(f"the plan runs code that comes with {job.model} (trust_remote_code)")
    if taken := [f"{name}={value}" for name, value in job.environment.items() if name not in given_here]:
        warn(f"the plan sets {' '.join(taken)} for the processes that load the model")
    if missing := sorted({*(job.unrecorded or ())} - given_here.keys() - os.environ.keys()):
        warn(
            f"the plan was made with {', '.join(missing)}, which a plan does not store and which is not set here: "
            f"put {missing[0]}=... before the command, or in the env: block of a config"
        )
    autofit, arguments = request.autofit.over(plan, here=to_train and not request.simulate), dict(job.trl_arguments)
    if is_shared_otherwise(request.autofit, plan):
        autofit = autofit_of(request.autofit, autofit, plan)
        arguments = arguments_over(plan, autofit)
    return replace(
        request,
        plan=plan,
        autofit=autofit,
        model=request.model if names_model else job.model,
        dataset=request.dataset if names_dataset else job.dataset,
        config={**arguments, **request.config},
        accelerate=job.accelerate if request.accelerate is None else request.accelerate,
        environment={**job.environment, **request.environment},
    )


def _called(given: Plan | str | Path) -> str:
    return "The plan" if isinstance(given, Plan) else f"The plan in {given}"


def rehearsals_for(workers: Workers, request: RunRequest, warn: Callable[[str], None]) -> Rehearsals:
    """Returns the requested job on its device.

    Raises:
        UsageError: an argument is unknown or refused by TRL, arguments contradict each other, the headroom leaves
            nothing, or torchrun started this process.
        NoGpuError, UnknownGpuError: there is no such device.
    """
    check_launch(is_placed=request.place is not None)
    request = with_accelerate(with_peft_config(request))
    for message in (*request.config_notes, *launch_warnings(request)):
        warn(message)
    autofit, store = request.autofit, Store(cache_folder(), on_damage=warn)
    given, defaults = parsed(store, workers, request)
    model = request.model or given.get("model_name_or_path")
    if not model:
        raise no_model(request.argv)
    counts, nodes = autofit.gpu_counts, autofit.nodes or 1
    if len(counts) > 1:
        raise UsageError(
            f"--gpus {','.join(map(str, counts))} asks for several plans.",
            hint="Only autofit plan METHOD --gpu NAME compares numbers of GPUs; give --gpus one number here.",
        )
    hardware = choose(
        autofit.gpu,
        use_cpu=bool(given.get("use_cpu")),
        gpus=counts[0] if counts else None,
        nodes=nodes,
        spared=gpus_served_here(given.get, nodes),
        link=autofit.link,
        environment=request.environment,
        warn=warn,
    )
    if request.simulate or hardware.origin == "cpu":
        defaults = replace(defaults, use_liger_kernel=None)  # its kernels run on no CPU
    return Rehearsals(
        workers=workers,
        job=replace(request, model=str(model)).job(given),
        defaults=for_processes(defaults, hardware.topology, given),
        hardware=hardware,
        headroom_bytes=autofit.headroom_bytes(hardware.total_bytes),
        store=store,
        prices=prices(None if autofit.prices is None else str(autofit.prices)),
    )


FLAG = f"--{adapter_config.PEFT_CONFIG}"
FILE = "adapter_config.json"
"""The file's name in PEFT (``peft/utils/constants.py: CONFIG_NAME``)."""
_WANTED = f"It takes the {FILE} that PEFT's save_pretrained writes, or the folder that holds it."


def with_peft_config(request: RunRequest) -> RunRequest:
    """Returns the request with the content of its PEFT config. Raises one UsageError for all problems of the config."""
    if (given := request.autofit.peft_config) is None:
        return request
    content = config_content(given, FLAG, hint=_WANTED, file_name=FILE)
    if not isinstance(content.get("peft_type"), str):
        raise UsageError(f"{FLAG} {given} has no peft_type, which every PEFT config needs.", hint=_WANTED)
    text, problems = adapter_config.canonical(content), []
    kind, why = adapter_config.kind_of(text), adapter_config.why_not_quantized(text)
    if function := adapter_config.needs_data_first(text):
        cure = "Call it in a script with a trainer of autotrain_mem, or remove init_lora_weights from the config."
        problems.append((f"{FLAG}: its init_lora_weights needs peft's {function}, which no trainer calls", cure))
    if request.names("use_peft") and not request.argument("use_peft"):
        problems.append((f"--use_peft false and {FLAG} contradict each other", "Remove one."))
    if twice := [name for name in adapter_config.SAID[1:] if request.names(name)]:
        flags = ", ".join(f"--{name}" for name in twice)
        cure = f"Remove {flags}, or write it into the config."
        problems.append((f"{flags} and {FLAG} both define the adapter", cure))
    quantized = [name for name in BASE_BITS if why and request.argument(name)]
    problems += [(f"--{name} does not work with {kind}: {why}", f"Remove --{name}, or use LoRA.") for name in quantized]
    if adapter_config.arguments_of(text).get(CHECKPOINTING) is False and any(map(request.argument, RECOMPUTES)):
        problem = f"--gradient_checkpointing does not work with {kind}: a recomputed layer has no prefix"
        problems.append((problem, "Remove --gradient_checkpointing."))
    refuse_all(problems)
    return replace(request, autofit=replace(request.autofit, peft_config=text))
