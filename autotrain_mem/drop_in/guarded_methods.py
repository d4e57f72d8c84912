"""Guards a drop-in trainer's methods: a run survives out-of-memory errors, and the longest rows run first.

The guard is detached after each call, so that a trainer is freed, copied and pickled like TRL's own.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from autotrain_mem.drop_in import launched
from autotrain_mem.drop_in.call_digest import OUR_LIBRARIES
from autotrain_mem.report.run_history import event_line
from autotrain_mem.support import codec
from autotrain_mem.support.errors import described
from autotrain_mem.training.run_folder import lock_folder
from autotrain_mem.types import Incident, LearnedLimits

RUNS = ("train", "evaluate", "predict")
"""A trainer's methods that need device memory."""

_GUARDED = "_autofit_guarded"
"""Attribute that is True if a trainer's next run is to be guarded."""

_STEPS = ("training_step", "prediction_step")
"""Methods that the guard calls with a batch that it has already prepared, unlike TRL."""

_LIBRARIES = OUR_LIBRARIES | {"torch", "accelerate", "datasets", "liger_kernel"}
"""Libraries whose code changes only state that ``longest_batch.untouched`` restores."""


def guard_methods(kind: type) -> None:
    """Wraps the methods of a drop-in class; they are guarded in trainers on which :func:`guard` was called."""
    for name in RUNS:
        setattr(kind, name, _guarded_method(kind, name))


def guard(trainer: Any) -> None:
    """Guards this trainer's runs from now on."""
    setattr(trainer, _GUARDED, True)


def _guarded_method(kind: type, name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(kind, name))
    def run(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        # No other run may write to the folder that this one writes its checkpoints to.
        writes = name == "train" and str(trainer.args.save_strategy.value) != "no" and launched.is_first()
        with lock_folder(trainer.args.output_dir) if writes else nullcontext():
            return guarded(trainer, *args, **kwargs)

    def guarded(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        trls = getattr(super(kind, trainer), name)
        if not vars(trainer).pop(_GUARDED, False):  # not to be guarded, or guarded already: training calls evaluate
            return trls(*args, **kwargs)
        try:
            with _guarded(trainer, name, trls) as method:
                return method(*args, **kwargs)
        finally:
            guard(trainer)

    return run


@contextmanager
def _guarded(trainer: Any, name: str, trls: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Attaches a guard to a trainer, and yields the guarded method of that name."""
    from autotrain_mem.training.guard.attach import attach_guard, why_no_guard

    names = (*_STEPS, "compute_loss", "_compute_loss")
    has_own_step = vars(trainer).keys() & names or any(_is_own(getattr(type(trainer), step)) for step in _STEPS)
    if why_no_guard(trainer) or has_own_step:
        yield trls
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    # The functions set on the objects whose methods a guard replaces.
    functions = [(owner, _functions(owner)) for owner in (trainer, trainer.accelerator, policy)]
    callbacks = [*trainer.callback_handler.callbacks]

    def report(incident: Incident, learned: LearnedLimits) -> None:
        _note(trainer, incident, learned)
        rank = f"rank {trainer.args.process_index}: " if launched.processes() > 1 else ""
        _warn(f"{rank}{event_line({'event': 'incident', 'incident': codec.to_json(incident)})} ({incident.message})")

    setattr(trainer, name, trls)  # the guard wraps this attribute
    attached = None
    try:
        attached = attach_guard(trainer, learned=trainer.plan.experience.learned, on_incident=report, on_notice=_warn)
        if name == "train":
            _run_longest_first(trainer)
        yield getattr(trainer, name)
    finally:
        if attached is not None:
            _note(trainer, learned=attached.leave())
        for each in [*trainer.callback_handler.callbacks]:  # the user's callbacks stay
            if type(each).__module__.startswith("autotrain_mem.training.") and each not in callbacks:
                trainer.callback_handler.callbacks.remove(each)
        if vars(trainer).get(name) == trls:
            delattr(trainer, name)
        for owner, before in functions:  # the user's functions stay
            own = vars(owner)
            for each, function in _functions(owner).items():
                code = getattr(function, "__func__", function)  # a wrapper has its own globals, but another's name
                if str(getattr(code, "__globals__", {}).get("__name__", "")).startswith("autotrain_mem."):
                    del own[each]
            own.update({each: function for each, function in before.items() if each not in own})


def _is_own(code: Any) -> bool:
    """Returns whether code, or the class of an object, is the user's own."""
    named = code if hasattr(code, "__module__") else type(code)
    return str(named.__module__).split(".")[0] not in _LIBRARIES


def _functions(owner: Any) -> dict[str, Any]:
    """Returns the functions set on an object itself, not its class's."""
    return {name: value for name, value in vars(owner).items() if inspect.isroutine(value)}


def _note(trainer: Any, incident: Incident | None = None, learned: LearnedLimits | None = None) -> None:
    """Adds an incident or learned limits to the trainer's plan."""
    plan = trainer.plan
    experience = plan.experience if incident is None else plan.experience.with_incident(incident)
    if learned is not None:
        experience = experience.with_learned(learned)
    if experience != plan.experience:
        trainer.plan = replace(plan, experience=experience)


def _warn(message: str) -> None:
    from transformers.utils import logging

    logging.get_logger("transformers.autofit").warning(f"autofit: {message}")


def _run_longest_first(trainer: Any) -> None:
    """Runs the longest rows before the first step, unless a step calls the user's own code."""
    from autotrain_mem.trainers.finish import keep_cache_in_evaluation
    from autotrain_mem.training.cuda_oom import is_out_of_memory
    from autotrain_mem.training.process.longest_batch import run_longest_batch

    if _runs_own_code(trainer):
        return
    keep_cache_in_evaluation(trainer)
    step = trainer.training_step

    def first_step(model: Any, *args: Any, **kwargs: Any) -> Any:
        trainer.training_step = step
        try:
            run_longest_batch(trainer, model, step)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _warn(f"the longest rows could not be run before the first step: {described(error)}")
        return step(model, *args, **kwargs)

    trainer.training_step = first_step


def _runs_own_code(trainer: Any) -> bool:
    """Returns whether a training step calls code outside ``_LIBRARIES``, other than reward functions."""
    parts = [trainer.data_collator, getattr(trainer, "compute_loss_func", None)]
    for module in trainer.model.modules():
        backward = (module._backward_pre_hooks, module._backward_hooks)
        for hooks in (module._forward_pre_hooks, module._forward_hooks, *backward):
            parts += hooks.values()
    is_transformed = getattr(trainer.train_dataset, "format", {}).get("type") == "custom"  # Dataset.set_transform
    kinds = type(trainer).__mro__
    own = [kind for kind in kinds if _is_own(kind)]
    names = {name for kind in own for name in vars(kind) if not name.startswith("__")}
    overrides = any(names & vars(kind).keys() for kind in kinds if kind not in own)
    return is_transformed or overrides or any(callable(part) and _is_own(part) for part in parts)
