"""Rejects invalid requests before TRL is imported: device, files, output folder, checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotrain_mem.machine.choose import choose, several, training_device
from autotrain_mem.methods.interface import method_of
from autotrain_mem.methods.reward_functions import undefined_rewards
from autotrain_mem.methods.row_formats import check_first_rows
from autotrain_mem.planning.for_processes import check_processes
from autotrain_mem.planning.output_dir import RESUME, check_output, check_weights, output_dir, resumes_in_folder
from autotrain_mem.planning.run_request import RunRequest, check_launch, no_model
from autotrain_mem.planning.vllm_server import gpus_served_here
from autotrain_mem.search.levels import check_forbid
from autotrain_mem.settings.knobs import alone_too
from autotrain_mem.settings.trl_parser import kept_names, read_kept
from autotrain_mem.settings.words import MAX_LENGTH, words_of
from autotrain_mem.support import errors, sources
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.training.checkpoint_kinds import Resumer, check_form, why_not
from autotrain_mem.training.checkpoints import check_order, newest_first, why_torn
from autotrain_mem.types import Job, Plan, Topology
from autotrain_mem.types.findings import Finding, collect, settle
from autotrain_mem.types.methods_table import OTHER_MODEL_ARGUMENTS, TEXT_COLUMN

if TYPE_CHECKING:
    from autotrain_mem.worker.pool import Workers


_READ = (
    *("output_dir", RESUME, "dataset_name", "datasets", *OTHER_MODEL_ARGUMENTS, MAX_LENGTH, "chat_template_path"),
    *("trust_remote_code", "dataset_train_split", "dataset_test_split", "eval_strategy", "eval_on_start"),
    *("reward_funcs", "use_liger_kernel", "use_vllm", "report_to", "use_cpu", "model_revision", "dataset_text_field"),
)
"""TRL arguments that are needed before TRL's own parser runs."""


@contextmanager
def opened(
    request: RunRequest, *, to_train: bool, reads_data: bool = True, is_late: bool = False, count: int | None = None
) -> Iterator[Workers]:
    """Checks a request and yields its workers, which end with the block. Raises as :func:`refuse` does.

    Unless the cache can answer the request, the workers import TRL right away.

    Args:
        to_train: Whether training follows on this machine.
        reads_data: Whether the dataset will be read.
        is_late: Whether the caller calls :func:`refuse` later.
        count: The number of workers; None for as many as memory allows.
    """
    check_launch(is_placed=request.place is not None)
    check_forbid(request.autofit.forbid)
    refuse_flags(request)
    if request.autofit.prices is not None:
        from autotrain_mem.machine.prices import prices  # only the user's own file can be invalid

        prices(str(request.autofit.prices))
    if not is_late:
        refuse(request, to_train=to_train, reads_data=reads_data)
    from autotrain_mem.planning.kept_answers import is_parsed  # imported after the checks above, which are fast
    from autotrain_mem.worker.pool import Workers

    with Workers(count) as workers:
        # Only a plan that is followed, and not read yet, shows what is parsed.
        if not (request.autofit.plan or request.argument(RESUME) or is_parsed(Store(cache_folder()), request)):
            workers.start()
        try:
            yield workers
        except errors.UsageError:  # caches the flags, so that the next typo is reported at once
            with contextlib.suppress(errors.AutofitError):
                if kept_names(Store(cache_folder())) is None:
                    workers.first.flags()
            raise


def refuse_flags(request: RunRequest) -> None:
    """Checks names and values against the cached flags of the installed TRL. Without a cache a worker checks them.
    Raises UsageError for an unknown flag or key (with the nearest known one), or a value of the wrong type."""
    read_kept(Store(cache_folder()), request.method, request.argv, request.config, request.also_known)


def refuse(request: RunRequest, *, to_train: bool, reads_data: bool = True) -> None:
    """Rejects an unknown or missing GPU, missing files, and an output folder or checkpoint that cannot be used. Raises
    the AutofitError of each fault's own kind."""
    if to_train and request.argument(RESUME):
        _check_checkpoint(request)
    elif to_train and (plan := _plan_of(request.autofit.plan)) is not None:
        given = {**plan.job.arguments, **request.config}
        if (job := _job(replace(request, model=request.model or plan.job.model, config=given))) is not None:
            _check_written(job, request)
    folder = request.argument("output_dir") if str(request.argument(RESUME)).lower() == "true" else None
    if folder and not any(Path(str(folder)).glob("checkpoint-*")):
        raise errors.UsageError(
            f"--{RESUME}: {folder} holds no checkpoint to resume from.",
            hint="Remove the flag to start from the beginning, or give it a checkpoint's folder.",
        )
    if request.autofit.plan is not None or request.argument(RESUME):
        return
    if request.simulate and request.autofit.gpu is None:  # TRL's parser reports it, with other contradictions
        return
    if (job := _job(request)) is None:
        raise no_model(request.argv)
    data = job.dataset or job.arguments.get("dataset_name")
    rows = str(data) if data and reads_data else ""

    def check_device(request: RunRequest) -> None:
        autofit, nodes = request.autofit, request.autofit.nodes or 1
        gpus = autofit.gpu_counts[0] if len(autofit.gpu_counts) == 1 else None
        if not request.argument("use_cpu") and not several(
            autofit.gpu or "", autofit.gpu_counts, nodes=nodes, link=autofit.link
        ):
            spared, shell = gpus_served_here(request.argument, nodes), request.environment
            card = choose(autofit.gpu, use_cpu=False, gpus=gpus, spared=spared, link=autofit.link, environment=shell)
            if to_train and nodes == 1:
                training_device(card, simulate=request.simulate, environment=shell)
        if gpus is not None and autofit.pins and autofit.accelerate_config is None:  # a config may set more
            check_processes(Topology(nodes=nodes, devices=gpus), autofit.pins)

    def check_model(request: RunRequest) -> None:
        config = _refuse_model(job.model, "--model", request.argument("model_revision")) or {}
        if "vision_config" in config and (to_train or job.images or rows):
            sources.check_image_packages(job.model, config["model_type"])

    def check_files(request: RunRequest) -> None:
        for name in filter(job.arguments.get, OTHER_MODEL_ARGUMENTS):
            _refuse_model(job.arguments[name], f"--{name}")
        for name in ("chat_template_path", "accelerator_config"):
            if (file := request.argument(name)) and os.path.exists(str(file)):
                sources.check_regular(str(file), f"--{name}")

    def check_data(request: RunRequest) -> None:
        if rows:
            sources.check_data_path(rows)
        if data and to_train:
            sources.check_kept_rows(str(data))

    found = collect((check_device, check_model, check_files, check_data), request)
    settle([*found, *map(Finding.of, _lacking(job, rows, to_train=to_train, simulate=request.simulate))])
    if to_train:
        _check_written(job, request)


def refuse_to_follow(request: RunRequest) -> None:
    """Checks a request on a machine that does not lead. Raises AutofitError like :func:`opened`."""
    check_launch(is_placed=True)
    refuse_flags(request)
    refuse(request, to_train=True)


def check_to_train(job: Job, request: RunRequest) -> None:
    """Checks what only training needs. Raises UsageError without data, ModelNotFoundError without weights, and
    OutputFolderError if the output folder cannot be used."""
    if not job.names_data:
        example = f"The example of TRL's documentation is --dataset {job.method_facts.example_dataset}."
        raise errors.UsageError(
            "No --dataset is given, and training needs one.",
            hint=f"Give --dataset a hub id, a folder or a file. {example}\n--plan_only plans without one.",
        )
    settle(map(Finding.of, _lacking(job, "", to_train=True, simulate=request.simulate)))
    _check_written(job, request)


_TRACKERS = "clearml codecarbon comet_ml dagshub dvclive mlflow neptune swanlab trackio wandb"
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    **{f"--report_to {name}": (name,) for name in _TRACKERS.split()},
    "--report_to flyte": ("flytekit",),
    "--report_to tensorboard": ("tensorboard", "tensorboardX"),
    **dict.fromkeys(("--reward_funcs accuracy_reward", "--reward_funcs reasoning_accuracy_reward"), ("math_verify",)),
    **{"--use_liger_kernel": ("liger_kernel",), "--use_vllm": ("vllm",)},
}
"""Flag -> the packages of which training needs one, but a rehearsal none (``integration_utils.py: is_*_available``).
The trackers of Azure and Kubeflow need more than a package."""


def _lacking(job: Job, data: str, *, to_train: bool, simulate: bool) -> Iterator[errors.AutofitError]:
    """Yields what planning or training will lack, as files and the names of installed packages show. ``job``: its
    arguments may be texts, as they are typed. ``data``: where the rows are; empty if they are not read."""
    arguments, folder = job.arguments, Path(job.model)
    if (error := method_of(job.method).missing(arguments.get, to_train=to_train)) is not None:
        yield error
    if data and (to_train or not job.pins_length) and sources.lacks_tokenizer(folder):
        yield sources.no_tokenizer(job.model)
    row: Mapping[str, Any] = {}
    try:
        row = check_first_rows(job.method, data, str(arguments.get("dataset_text_field") or TEXT_COLUMN))
    except errors.DatasetError as wrong_rows:
        yield wrong_rows
    read = next((columns for columns in job.method_facts.formats if row.keys() >= {*columns}), ())
    firsts = [value[0] for name in read if isinstance(value := row[name], list) and value]
    is_chat = "conversations" in read or any(isinstance(each, dict) and "role" in each for each in firsts)
    revision = arguments.get("model_revision")
    has_another = {"chat_template_path", "trust_remote_code"} & arguments.keys()
    if is_chat and not has_another and sources.lacks_template(job.model, revision and str(revision)):
        flags = (kept_names(Store(cache_folder())) or {}).get(job.method, ())
        yield sources.no_template(job.model, takes_path="chat_template_path" in flags)
    has, wanted = sources.splits_of(data) if data else (), [("train", arguments.get("dataset_train_split"))]
    if job.is_evaluated:
        wanted.append(("test", arguments.get("dataset_test_split") or "test"))
    for use, split in wanted:
        if has and split and split not in has:  # without --dataset_train_split, the rows' reader says what is wrong
            yield sources.no_split(data, use, str(split), has)
    rewards = words_of(arguments.get("reward_funcs"))
    yield from undefined_rewards(rewards)
    if not to_train:
        return
    judge = method_of(job.method).judge_of_text(arguments)
    if judge and sources.lacks_tokenizer(Path(str(judge))):
        yield errors.ModelNotFoundError(
            f"The reward model {judge} has no tokenizer, which it needs to read completions.",
            hint="Save the tokenizer that it was trained with in the same folder, as autofit reward does.",
        )
    of_gpus = [] if simulate or arguments.get("use_cpu") else ["use_liger_kernel", "use_vllm"]  # refused there anyway
    asked = [f"--{name}" for name in of_gpus if arguments.get(name)]
    asked += [f"--reward_funcs {name}" for name in rewards]
    asked += [f"--report_to {name}" for name in words_of(arguments.get("report_to"))]
    needed = {flag: _PACKAGES[flag] for flag in asked if flag in _PACKAGES}
    # A folder of a package's name, such as W&B's in the working folder, is no package: it has no origin.
    if absent := [flag for flag, names in needed.items() if not any(getattr(find_spec(n), "origin", 0) for n in names)]:
        yield errors.MissingExtraError(
            f"Not installed here, but needed to train: the packages for {', '.join(absent)}. A plan alone needs none.",
            hint=f"pip install {' '.join(dict.fromkeys(needed[flag][0] for flag in absent))}",
        )


def _check_written(job: Job, request: RunRequest) -> None:
    for name in filter(None, (job.model, *map(job.arguments.get, OTHER_MODEL_ARGUMENTS))):
        check_weights(Path(name))
    if request.place is None or not request.place.rank:  # only the first machine locks the shared folder
        check_output(job, overwrite=request.overwrite_output_dir)
        from autotrain_mem.training.run_folder import check_folder  # a plan alone needs no folder

        check_folder(output_dir(job), resuming=resumes_in_folder(job), overwrite=request.overwrite_output_dir)


def _refuse_model(name: str, flag: str, revision: object = None) -> dict[str, Any] | None:
    if (config := sources.check_model_folder(name, flag)) is None:
        sources.check_cached(name, None if revision is None else str(revision))
    return config


def _plan_of(given: Plan | str | Path | None) -> Plan | None:
    """Returns a plan, read from its file if necessary; None if that fails, since a later reader reports why."""
    if given is None or isinstance(given, Plan):
        return given
    with contextlib.suppress(errors.PlanFileError):
        return Plan.load(given)
    return None


def _job(request: RunRequest) -> Job | None:
    """Returns the job that the flags and config keys describe; None without a model."""
    model = request.model or request.argument("model_name_or_path")
    given = {name: value for name in _READ if (value := request.argument(name)) is not None}
    return replace(request, model=str(model)).job(given) if model else None


def _check_checkpoint(request: RunRequest) -> None:
    """Checks the checkpoint to resume from against flags and the earlier plan. ``run.supervised`` checks it again,
    against the new plan."""
    plan = _plan_of(request.plan or request.autofit.plan or request.folder)
    card = None if plan is None else plan.estimate.hardware
    if card is not None and card.origin != "cpu" and not (request.simulate or request.argument("use_cpu")):
        try:
            choose(request.autofit.gpu, use_cpu=False, environment=request.environment)
        except errors.NoGpuError as error:
            if card.origin != "detected":
                error.message = f"The run to resume used the simulated card {card.name}. {error.message}"
                error.hint = f"Add --simulate, which continues it on that card.\n{error.hint}"
            raise
    counts, topology = request.autofit.gpu_counts, None if plan is None else plan.estimate.hardware.topology
    devices = counts[0] if len(counts) == 1 else None if topology is None else topology.devices
    nodes = request.autofit.nodes or (1 if topology is None else topology.nodes)
    processes = None if devices is None else devices * nodes
    rows = 0 if plan is None else plan.knobs.effective_batch_size
    if processes is not None and rows % processes:
        fitting = [count for count in range(1, rows + 1) if rows % count == 0]
        nearest = sorted(fitting, key=lambda count: abs(count - processes))[:2]
        raise errors.UsageError(
            f"{processes} GPUs do not divide the run's effective batch of {rows} rows, which cannot change.",
            hint=f"Resume with --gpus {' or '.join(map(str, sorted(nearest)))}.",
        )
    # Candidates, newest first; they may include checkpoints of other runs.
    if (named := request.argument(RESUME)) not in (True, "true", "True"):
        checkpoints = [Path(str(named))] if Path(str(named)).is_dir() else []
    else:
        found = [] if request.folder is None else newest_first(Path(request.folder))
        checkpoints = [each.path for each in found if not why_torn(each.path)]
    if not checkpoints:
        return
    if not request.argument("ignore_data_skip"):  # the training compares the rows, which are not loaded yet
        seeds = {f"--{name}": request.argument(name) for name in ("seed", "data_seed")}
        check_order(checkpoints[0], {name: str(value) for name, value in seeds.items() if value is not None})
    if processes is None or request.autofit.accelerate_config is not None:
        return
    planned = None if plan is None else Resumer.of(plan.knobs)
    sharding = request.autofit.sharding or (None if plan is None else alone_too(plan.knobs.sharding, processes))
    if sharding is None and processes > 1:
        if planned is None:
            return
        sharding = "ddp"
    resumer = replace(planned or Resumer(sharding=None, processes=1), sharding=sharding, processes=processes)
    if all(why_not(checkpoint, resumer) for checkpoint in checkpoints):
        check_form(checkpoints[0], resumer)
