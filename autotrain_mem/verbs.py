"""Offers the command's actions in Python, as functions that take and return values.

The main ones take a method, a model, and TRL's own arguments by name. A given argument is never changed; a plan may set
any other. While a call plans or trains, a terminal or a notebook shows a line of progress, which then vanishes; a line
for each probe, restart or other incident of a training stays. Elsewhere nothing is printed. This process's environment
is unchanged, and no process outlives a call.
"""

import difflib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from autotrain_mem import api
from autotrain_mem.report.terminal import Console, LiveLine, SearchProgress, TrainingProgress, is_live
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import printable
from autotrain_mem.types import METHODS, Cards, Estimate, Hardware, Plan, Report
from autotrain_mem.types.autofit import AutoFit, as_autofit
from autotrain_mem.types.python_names import PythonErrors, as_json

Environment = Mapping[str, str]
Event = Mapping[str, Any]


def estimate(
    method: str,
    model: str | os.PathLike[str],
    *,
    dataset: str | os.PathLike[str] | None = None,
    autofit: AutoFit | None = None,
    environment: Environment | None = None,
    **arguments: Any,
) -> Estimate:
    """Predicts what one configuration needs, exactly as given, with TRL's defaults for the rest. It does not search.

    It takes seconds and needs no GPU and no weights: a folder with ``config.json`` is enough.

    >>> from autotrain_mem import AutoFit, estimate
    >>> found = estimate("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> found.knobs.per_device_train_batch_size, found.knobs.max_length
    (8, 512)
    >>> found.fits, found.required_bytes <= found.budget_bytes
    (True, True)

    Args:
        method: One of TRL's trainers, by name: ``sft``, ``reward``, ``dpo``, ``kto``, ``orpo``,
            ``cpo``, ``grpo``, ``rloo``, ``distillation``, ``online_dpo``, ``gkd`` or ``ppo``.
        model: A hub id or a folder.
        dataset: A hub id, a folder, or a ``.json``, ``.jsonl``, ``.parquet`` or ``.csv`` file; read only if a length
            must be counted (``max_length="auto"``, prompts). None: rows like those of TRL's example for the method.
        autofit: Mainly the device, ``AutoFit(gpu="rtx4090")``; None: this machine's GPU.
        environment: Variables for the processes that load the model, such as ``PYTORCH_ALLOC_CONF``.
        **arguments: TRL's own, by name, with values as in Python or as in flags: ``learning_rate=1e-4``,
            ``dtype="bfloat16"``, ``use_peft=True``, ``lora_target_modules=["q_proj"]``. ``max_length`` also takes
            ``"auto"`` (the longest row) and ``"p99"`` (the length that 99 % of the rows do not exceed). In ``plan``,
            ``fit`` and ``cards`` one of ``max_length``, ``per_device_train_batch_size``, ``lora_r``,
            ``num_generations`` and ``max_completion_length`` may be ``"max"``: the largest value that fits.

    Returns:
        Peaks in bytes by phase and by owner, the budget in bytes, seconds of one optimizer step.

    Raises:
        UsageError: an argument is unknown (the hint suggests the nearest), rejected by TRL, or cannot be rehearsed.
        NoGpuError, UnknownGpuError: this machine has no GPU and none is named, or no card has the given name.
        UnreadableGpuError: the GPU does not respond, or torch cannot use it; the hint gives the remedy.
        ModelError, DatasetError: model or data are not found, not readable, or not for this method.
        BatchSplitError, ContextLengthError: batch sizes do not divide evenly, or a length exceeds the model's context.
        RehearsalError: the installed trainer raised, died or hung while it was rehearsed.
    """
    with PythonErrors():
        request = _as_request("estimate", method, model, dataset, autofit, environment, arguments)
        _refuse_plan(request, "estimate predicts what arguments need; plan(...) and fit(...) follow a plan")
        with _begun(request, to_train=False, reads_data=False, count=1) as (rehearsals, _):
            return api.estimate(rehearsals)


def plan(
    method: str,
    model: str | os.PathLike[str],
    *,
    dataset: str | os.PathLike[str] | None = None,
    autofit: AutoFit | None = None,
    environment: Environment | None = None,
    **arguments: Any,
) -> Plan:
    """Returns the fastest settings that fit, at the least harmful level at which any fit; no weights are loaded.

    It takes seconds to minutes and needs no GPU and no weights. ``AutoFit(plan=...)`` follows that plan instead of
    searching; the plan supplies the arguments that the call omits.

    >>> from autotrain_mem import AutoFit, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> chosen.level, chosen.knobs.effective_batch_size, chosen.estimate.fits
    ('lossless', 8, True)

    Args:
        method, model, environment, **arguments: As for :func:`estimate`.
        dataset: As for :func:`estimate`, but always read if given. Without it, TRL's example is read unless
            ``max_length`` (for prompts ``AutoFit(prompt_length=...)``) is a number.
        autofit: How to plan: the device, the effective batch, which levels of harm are allowed.

    Returns:
        The settings, their prediction, what was tried, and the alternatives; ``save(path)`` writes the plan to a file.

    Raises:
        DoesNotFitError: no allowed configuration fits; the message gives the nearest that would.
        PlanFileError: ``AutoFit(plan=...)`` names a file that is not a plan.
        UsageError, HardwareError, ModelError, DatasetError, BatchSplitError, RehearsalError: as :func:`estimate`.
    """
    with PythonErrors():
        request = _as_request("plan", method, model, dataset, autofit, environment, arguments)
        request = api.with_plan(request, _HINTS, _warn, to_train=False)
        with _begun(request, to_train=False) as (rehearsals, progress):
            return api.plan(rehearsals, progress.tried, progress.counting, earlier=request.plan)


def fit(
    method: str,
    model: str | os.PathLike[str],
    *,
    dataset: str | os.PathLike[str] | None = None,
    autofit: AutoFit | None = None,
    environment: Environment | None = None,
    simulate: bool = False,
    max_restarts: int = api.RESTARTS,
    overwrite_output_dir: bool = False,
    probe: bool = True,
    on_event: Callable[[Event], None] = lambda event: None,
    **arguments: Any,
) -> Report:
    """Plans, or follows ``AutoFit(plan=...)``, and trains with the plan in a separate process.

    The output folder then holds the model, ``plan.json`` (``Plan.load(report.output_dir)``), ``run.json`` and
    ``train.log``. If the process dies, a new one resumes from the last complete checkpoint; after an out-of-memory
    error, it trains with settings that need less. Ctrl-C ends the training after the current step.
    ``resume_from_checkpoint=True`` uses the plan in the output folder.

    >>> from autotrain_mem import AutoFit, fit
    >>> events = []
    >>> report = fit(
    ...     "sft",
    ...     "Qwen/Qwen2.5-0.5B",
    ...     dataset="data.jsonl",
    ...     autofit=AutoFit(gpu="rtx3060", fit="lossless"),
    ...     simulate=True,
    ...     on_event=events.append,
    ...     per_device_train_batch_size=2,
    ...     max_length=64,
    ...     max_steps=2,
    ...     output_dir="first-run",
    ... )
    >>> report.steps, report.measured.peak_reserved_bytes <= 12 * 2**30
    (2, True)
    >>> [event["step"] for event in events if event["event"] == "step"]
    [1, 2]

    Args:
        method, model, dataset, autofit, environment, **arguments: As for :func:`plan`; data are required, and read.
        simulate: Whether to train on the CPU with a simulated card, named by ``AutoFit(gpu=...)``, which counts memory
            and runs out of it as that card would.
        max_restarts: The most restarts in a row without a new checkpoint in between; 0 for none.
        overwrite_output_dir: Whether to rename another run in ``output_dir`` to ``NAME.previous-1``.
        probe: Whether to try the plan first, with two real steps on the longest rows in a separate process. The plan
            changes if they need more memory than predicted, or far less. Reward functions are called.
        on_event: Called with each event, a mapping. Its ``event`` is, among others, ``start`` (with ``total_steps``),
            ``step`` (``step``, and ``memory`` in bytes or None), ``log`` (``logs``, as TRL logs them), ``checkpoint``
            and ``save_failed`` (``step``, ``path``), ``restart`` (as :class:`Restart` writes it), ``moved_aside``
            (``path`` of another run), ``note`` (``message``) or ``interrupted``.

    Returns:
        Steps, loss, seconds, and the peaks predicted and measured in bytes.

    Raises:
        OutputFolderError: ``output_dir`` cannot be written; it holds another run, weights, or other files that this run
            would overwrite; another live run uses it; or it is, contains or is inside a model's or dataset's folder.
        GpuOutOfMemoryError: the card, real or simulated, was out of memory.
        TrainingError, RewardFunctionError: the trainer or a reward function raised.
        InterruptedByUser, KeyboardInterrupt: Ctrl-C was pressed during training (all files stay complete), or earlier.
        DoesNotFitError and the others of :func:`plan`.
    """
    with PythonErrors():
        request = _as_request("fit", method, model, dataset, autofit, environment, arguments)
        request = replace(request, simulate=simulate, max_restarts=max_restarts, probe=probe)
        request = api.resumed(replace(request, overwrite_output_dir=overwrite_output_dir), _warn)
        request = api.with_plan(request, _HINTS, _warn, to_train=True)
        with _begun(request, to_train=True) as (rehearsals, progress):
            reports = (progress.tried, progress.counting)
            chosen = api.plan(rehearsals, *reports, to_train=True, simulate=simulate, earlier=request.plan)
        with TrainingProgress(_console(request), budget_bytes=chosen.estimate.reservable_bytes) as training:

            def see(event: Event) -> None:
                training.on_event(event)
                on_event(event)

            return api.train(rehearsals, chosen, request, see)


def cards(
    method: str,
    model: str | os.PathLike[str],
    *,
    dataset: str | os.PathLike[str] | None = None,
    autofit: AutoFit | None = None,
    environment: Environment | None = None,
    **arguments: Any,
) -> Cards:
    """Plans a job for each of several cards, to decide which one to rent or buy. This machine needs none of them.

    >>> from autotrain_mem import AutoFit, cards
    >>> compared = cards("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx4090,rtx3060"), max_length=512)
    >>> [(each.hardware.name, each.level) for each in compared.verdicts]
    [('rtx3060', 'lossless'), ('rtx4090', 'lossless')]

    Args:
        method, model, dataset, environment, **arguments: As for :func:`plan`.
        autofit: ``AutoFit(gpu="rtx3060,l4")`` names the cards; by default all of the catalog, which takes minutes.

    Returns:
        A verdict for each card, smallest first, with its best settings, their bytes and their speed.

    Raises:
        UsageError, UnknownGpuError, ModelError, DatasetError, BatchSplitError, RehearsalError: as :func:`plan`. A card
            on which nothing fits gets a verdict and raises no error.
    """
    with PythonErrors():
        request = _as_request("cards", method, model, dataset, autofit, environment, arguments)
        _refuse_plan(request, "a plan is for one card, and cards(...) makes one for each")
        request = replace(request, autofit=replace(request.autofit, gpu=request.autofit.gpu or "all"))
        (count,) = request.autofit.gpu_counts[:1] or (1,)
        devices = api.compared(request.autofit) or (api.choose(request.autofit.gpu, use_cpu=False, gpus=count),)
        first = replace(
            request, autofit=replace(request.autofit, gpu=devices[0].name, gpus=devices[0].topology.devices)
        )
        with _begun(first, to_train=False) as (rehearsals, progress):
            return api.cards(rehearsals, devices, lambda card, attempt: progress.tried(attempt), progress.counting)


def gpus() -> tuple[Hardware, ...]:
    """Returns the cards that ``AutoFit(gpu=...)`` takes by name, in the order of their names.

    >>> from autotrain_mem import gpus
    >>> [card.total_bytes // 2**20 for card in gpus() if card.name == "rtx4090"]
    [24081]

    Returns:
        For each card its memory in bytes, as torch reports it, and its speeds in bytes or FLOP per second.
    """
    return api.catalog()


_HINTS = api.PlanHints(
    other_method='Give "{made_for}" as the method, or make a new plan: leave out plan=...',
    objects="Follow it with the trainer that it was made for, or name dataset=... here.",
)


def write_report(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Writes the report of a plan or a run as one HTML file that opens without a network.

    >>> from autotrain_mem import AutoFit, plan, write_report
    >>> plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512).save("plan.json")
    >>> write_report("plan.json").name
    'report.html'

    Args:
        path: A plan's file (``Plan.save``), or the output folder of a run.
        out: The file to write, which may replace only an earlier report; None to write beside the plan:
            ``report.html`` for ``plan.json`` or a folder, ``NAME.report.html`` for another ``NAME.json``.

    Returns:
        The file.

    Raises:
        PlanFileError: there is no plan, or it cannot be read.
        OutputFolderError: the file cannot be written, or is not a report.
    """
    place = "write_report() an out="
    file = api.report_path(Path(path)) if out is None else Path(out)
    api.check_report_place(file, place)
    api.write_report(file, api.report_page(Path(path)), place)
    return file


def _as_request(
    verb: str,
    method: str,
    model: str | os.PathLike[str],
    dataset: str | os.PathLike[str] | None,
    autofit: AutoFit | None,
    environment: Environment | None,
    arguments: Mapping[str, Any],
) -> api.RunRequest:
    """Returns the call as a request. Raises the errors that can be found without TRL, before any process starts."""
    ours = as_autofit(autofit)
    if given := [name for name in ("pin", "tune") if getattr(ours, name)]:
        raise UsageError(
            f"AutoFit({given[0]}=...) is only for trainers. {verb}(...) keeps each argument that it is given.",
            hint="Give an argument to keep its value, or leave it out to have it tuned.",
        )
    if method not in METHODS:
        near = difflib.get_close_matches(str(method), list(METHODS), n=1)
        meant = f'Did you mean "{near[0]}"? ' if near else ""
        raise UsageError(f"Unknown method {method!r}.", hint=f"{meant}Known: {', '.join(METHODS)}.")
    if misplaced := [name for name in arguments if name in _OURS]:
        written = ", ".join(f"{name}={arguments[name]!r}" for name in misplaced)
        raise UsageError(
            f"{', '.join(misplaced)}: TRL has no such argument{'' if len(misplaced) == 1 else 's'}, but AutoFit does.",
            hint=f"Write autofit=AutoFit({written}).",
        )
    if "model_name_or_path" in arguments:
        raise UsageError("The model is given twice, as model and as model_name_or_path.", hint="Remove one.")

    def refuse(name: str, value: Any) -> NoReturn:
        raise UsageError(
            f"{name} takes a {type(value).__name__} only in a trainer: here, arguments are sent to another process.",
            hint="Give it by name, as a flag would, or use the trainer: from autotrain_mem import SFTTrainer.",
        )

    request = api.RunRequest(
        method=method,
        model=_path("model", model, "model=..., train_dataset=..."),
        dataset=None if dataset is None else _path("dataset", dataset, "train_dataset=..."),
        autofit=ours,
        config={name: as_json(each, functools.partial(refuse, name)) for name, each in arguments.items()},
        environment=environment or {},
        also_known=_KEYWORDS,
    )
    return api.with_accelerate(request)


def _console(request: api.RunRequest) -> Console:
    """Makes a console that prints only where a line can be redrawn."""
    console = Console(stderr=True)
    console.quiet = not (request.autofit.show and (is_live(console) or console.is_jupyter))
    return console


@contextmanager
def _begun(
    request: api.RunRequest, *, to_train: bool, **options: Any
) -> Iterator[tuple[api.Rehearsals, SearchProgress]]:
    """Reads the requested job, and yields its rehearsals and a line of progress.
    ``options``: of :func:`api.opened`."""
    console = _console(request)
    with api.opened(request, to_train=to_train, **options) as workers:
        with LiveLine(console, "importing TRL, looking at the model"):
            rehearsals = api.begin(workers, request, _warn, to_train=to_train)
        with SearchProgress(console, rehearsals.job, rehearsals.defaults) as progress:
            yield rehearsals, progress


def _refuse_plan(request: api.RunRequest, why: str) -> None:
    if request.autofit.plan is not None:
        raise UsageError(f"AutoFit(plan=...) is not accepted here: {why}.", hint="Remove plan.")


_OURS = tuple(each.name for each in fields(AutoFit))
_KEYWORDS = ("dataset", "environment", "simulate", "max_restarts", "overwrite_output_dir", *_OURS)
"""Arguments that are not TRL's, for did-you-mean hints."""


def _path(name: str, value: object, keywords: str) -> str:
    if not isinstance(value, str | os.PathLike):
        raise UsageError(
            f"{name} takes a hub id or a path, not a {type(value).__name__}.",
            hint=f"Pass objects to a trainer: from autotrain_mem import SFTTrainer; SFTTrainer({keywords}).",
        )
    return os.fsdecode(value)


def _warn(message: str) -> None:
    warnings.warn(printable(message), stacklevel=2)
