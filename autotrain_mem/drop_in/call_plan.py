"""Makes the plan for a trainer that a script constructs, with the script's own objects."""

import pathlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotrain_mem import api
from autotrain_mem.checks.arguments import accept
from autotrain_mem.checks.model_objects import check_loading, check_model_object
from autotrain_mem.drop_in.call_digest import digest_of, identity_of
from autotrain_mem.drop_in.config_merge import given_arguments
from autotrain_mem.drop_in.device import device_of, why_fixed
from autotrain_mem.drop_in.launched import Launched, agreed, is_first, read_launched, smallest
from autotrain_mem.machine.prices import prices
from autotrain_mem.methods.interface import method_of
from autotrain_mem.planning.for_processes import for_processes
from autotrain_mem.planning.output_dir import check_saves_over_no_model
from autotrain_mem.planning.read_request import read_plan
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.planning.run_request import RunRequest
from autotrain_mem.report.first_screen import first_screen
from autotrain_mem.report.terminal import Console, SearchProgress, warn
from autotrain_mem.search.levels import check_forbid
from autotrain_mem.settings.knobs import ROWS, STEPS
from autotrain_mem.settings.levers import EXPANDABLE
from autotrain_mem.support.errors import DoesNotFitError, EmptyDatasetError, UsageError
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.trainers import script_call
from autotrain_mem.trainers.script_call import Call
from autotrain_mem.types import METHODS, AutoFit, Hardware, Plan, PythonCall
from autotrain_mem.worker.pool import Workers

_PREPARED = "_is_accelerate_prepared"
"""Attribute of a prepared model, which ``accelerate/accelerator.py: prepare_model`` does not prepare again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCall:
    """Describes a trainer's call and how to plan it."""

    method: str
    config_class: type
    call: Call
    autofit: AutoFit

    @property
    def models(self) -> tuple[Any, ...]:
        """Returns the model objects given to the trainer."""
        import torch

        return tuple(value for value in self.call.keywords.values() if isinstance(value, torch.nn.Module))


def make_plan(asked: PlannedCall) -> Plan:
    """Returns the plan that every process of this training uses.

    Raises:
        DoesNotFitError: no allowed configuration fits.
        UsageError: settings contradict each other, or the device cannot be rehearsed.
        UnsupportedModelError: a model object cannot be rehearsed.
        OutputFolderError: the trained model would overwrite a model.
        DatasetError, RehearsalError, BatchSplitError, ContextLengthError: see ``support.errors``.
    """
    config = asked.call.keywords["args"]
    launched = read_launched(config, asked.autofit)
    check_forbid(asked.autofit.forbid)
    if asked.autofit.peft_config is not None:
        raise UsageError(
            "AutoFit(peft_config=...) is for plan(...), fit(...) and the like; a trainer has the argument itself.",
            hint="Give it to the trainer: SFTTrainer(..., peft_config=LoraConfig(...)).",
        )
    for name in ("effective_batch_size", "prompt_length"):
        if (value := getattr(asked.autofit, name)) is not None and value < 1:
            raise UsageError(f"{name} {value} is not a whole number of at least 1.", hint="Give 1 or more.")
    _check_keywords(asked)
    # Each model by its hub id or by the folder that it was loaded from.
    named = [asked.call.model] if isinstance(asked.call.model, str) else []
    named += [str(getattr(model.config, "_name_or_path", "")) for model in asked.models]
    check_saves_over_no_model(str(config.output_dir), named)
    earlier = None
    if asked.autofit.plan is not None:
        earlier = read_plan(asked.autofit.plan, asked.method, f"Here, {_AGAIN}.")
        if earlier.estimate.grows and (why := why_fixed()):
            message = f"The plan cannot be followed in this process. {why}"
            raise UsageError(message, hint=f"Or {_AGAIN}, to plan again.")
    store = Store(cache_folder(), on_damage=warn)
    hardware = smallest(lambda: device_of(config, asked.autofit.gpu, asked.models), asked.autofit.link)
    plan = agreed(lambda: _planned(asked, launched, hardware, store, earlier))
    if asked.autofit.show and is_first():
        Console(stderr=True).print(first_screen(plan))
    return plan


def _planned(asked: PlannedCall, launched: Launched, hardware: Hardware, store: Store, earlier: Plan | None) -> Plan:
    asked.autofit.headroom_bytes(hardware.total_bytes)  # raises before anything is started
    with Workers() as workers, tempfile.TemporaryDirectory(dir=workers.scratch) as folder:
        rehearsals = _rehearsals(asked, launched, hardware, store, workers, pathlib.Path(folder))
        console = Console(stderr=True, quiet=not asked.autofit.show)
        with SearchProgress(console, rehearsals.job, rehearsals.defaults) as progress:
            reports = (progress.tried, progress.counting)
            try:
                plan = api.plan(rehearsals, *reports, to_train=True, earlier=earlier, again=_AGAIN)
            except DoesNotFitError as error:
                if not isinstance(asked.call.model, str) and method_of(asked.method).takes_model_name:
                    error.hint = "\n".join(filter(None, (error.hint, _BY_NAME)))
                raise
    warnings = [f"Not available in this process: {why}"] if (why := why_fixed()) else []
    if plan.data is not None and any(rows is asked.call.keywords["train_dataset"] for rows in _streams(asked.call)):
        warnings.append(
            f"train_dataset is a stream, of which the first {plan.data.rows:,} prompts were counted: the longest, of "
            f"{plan.data.longest:,} tokens, is assumed to be the longest of all. AutoFit(prompt_length=N) sets it."
        )
    if any(getattr(model, _PREPARED, False) for model in asked.models):
        warnings.append(
            "The model was trained in this process before: accelerate prepares a model once, and a second trainer may "
            "run it without mixed precision. Load it again."
        )
    return replace(plan, warnings=(*plan.warnings, *launched.warnings, *warnings))


_AGAIN = "remove plan="
"""The remedy in hints of errors about an earlier plan."""
_BY_NAME = 'model="NAME"  instead of an object: a plan may then also choose its dtype, and a base in 4 or 8 bits.'
"""The remedy if a model object does not fit: a plan never loads it again."""


def _rehearsals(
    asked: PlannedCall, launched: Launched, hardware: Hardware, store: Store, workers: Workers, folder: pathlib.Path
) -> Rehearsals:
    keywords, autofit, model = asked.call.keywords, asked.autofit, asked.call.keywords["model"]
    if autofit.effective_batch_size is None and {ROWS, STEPS} & {*autofit.tune}:
        # The script's effective batch stays the same.
        config = keywords["args"]
        effective = config.per_device_train_batch_size * config.gradient_accumulation_steps * launched.processes
        autofit = replace(autofit, effective_batch_size=effective)
    arguments = {**given_arguments(dict(keywords), asked.config_class, autofit), **launched.pins}
    streams = _streams(asked.call)
    call, sampled = asked.call, METHODS[asked.method].is_online and autofit.prompt_length is None
    for stream in streams:  # a rehearsal uses its own rows, and a stream cannot leave its process
        parts = {name: _first_prompts(rows) for name, rows in stream.items()} if isinstance(stream, Mapping) else None
        call = call.replacing(stream, (parts or _first_prompts(stream)) if sampled else None)
    python_call = PythonCall(
        path=script_call.write(call, folder),
        holds_model=not isinstance(model, str),
        holds_rows=sampled or not streams,
        digest=digest_of(asked.call),
        identity=identity_of(asked.call),
    )
    arguments |= {"use_cpu": True} if hardware.origin == "cpu" else {}
    if why_fixed() and EXPANDABLE not in arguments:
        arguments[EXPANDABLE] = False
    name = model if isinstance(model, str) else str(model.config._name_or_path or type(model).__name__)
    request = RunRequest(method=asked.method, model=name, autofit=autofit, config=arguments, accelerate=launched.config)
    # A launcher may start several processes on the CPU too.
    own = request.own | ({} if hardware.origin == "cpu" else {"gpus": launched.processes})
    defaults = accept(asked.method, arguments, own)
    return Rehearsals(
        workers=workers,
        defaults=for_processes(defaults, hardware.topology, arguments),
        job=request.job(arguments, python_call),
        hardware=hardware,
        headroom_bytes=autofit.headroom_bytes(hardware.total_bytes),
        store=store,
        prices=prices(None if autofit.prices is None else str(autofit.prices)),
    )


SAMPLED_PROMPTS = 1_000
"""The prompts of a stream that are counted, if the script does not give the length of the longest."""


def _first_prompts(stream: Any) -> Any:
    """Returns the first prompts of a datasets.IterableDataset, which itself still starts with them."""
    from datasets import Dataset

    return Dataset.from_list([*stream.take(SAMPLED_PROMPTS)], features=stream.features)


def _streams(call: Call) -> list[Any]:
    """Returns the streamed datasets of training and evaluation."""
    from datasets import Dataset

    evaluated = call.keywords.get("eval_dataset")
    parts = evaluated.values() if isinstance(evaluated, Mapping) else [evaluated]
    uncounted = [rows for rows in parts if rows is not None and not isinstance(rows, Dataset)]
    trained = call.keywords["train_dataset"]
    return [*([] if isinstance(trained, Dataset) else [trained]), *([evaluated] if uncounted else [])]


_UNREHEARSED = {
    "tools": "after a tool call TRL generates again from prompt, completion and result, so the KV cache may be longer "
    "by a whole completion",
    "rollout_func": "the script's own code generates completions, so its memory and their lengths are unknown",
    "environment_factory": "TRL adds the environment's first message to each prompt, so no prompt's length can be "
    "counted",
}
"""Keywords of GRPO's trainer -> why no plan can be made with them (``trl/trainer/grpo_trainer.py: _tool_call_loop,
_generate, _generate_and_score_completions``). RLOO's trainer takes none of them."""


def _check_keywords(asked: PlannedCall) -> None:
    import torch

    keywords = asked.call.keywords
    if hasattr(rows := keywords["train_dataset"], "__len__") and not len(rows):
        raise EmptyDatasetError("train_dataset has no rows.", hint="Give it at least one; was a filter too strict?")
    if isinstance(keywords.get("model"), str) and not method_of(asked.method).takes_model_name:
        title = METHODS[asked.method].title
        raise UsageError(
            f"{title}'s trainer takes no dtype or quantization for a model given by name, so a plan cannot set them.",
            hint="Load the model, and give it as an object: model=AutoModelForCausalLM.from_pretrained(NAME).",
        )
    why = {name: reason for name, reason in _UNREHEARSED.items() if keywords.get(name)}
    if METHODS[asked.method].builds_early and any(keywords.get("optimizers") or ()):
        title = METHODS[asked.method].title
        why["optimizers"] = f"{title}'s optimizer trains two models, and only the config's optimizer is rehearsed"
    if why:
        raise UsageError(
            f"{', '.join(why)} {'is' if len(why) == 1 else 'are'} not supported yet.",
            hint="\n".join(f"{name}: {reason}; remove it, or use trl's own class" for name, reason in why.items()),
        )
    check_loading(getattr(keywords.get("args"), "model_init_kwargs", None))
    adapts = keywords.get("peft_config") is not None
    for name, value in keywords.items():
        if isinstance(value, torch.nn.Module):
            check_model_object(value, gets_adapter=adapts or name not in ("model", "value_model"))
