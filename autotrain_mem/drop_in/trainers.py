"""Provides TRL's trainers with planning: ``from autotrain_mem import SFTTrainer`` replaces ``from trl import ...``.

Each takes the arguments of TRL's class, and also ``autofit=AutoFit(...)``. ``trainer.plan`` holds the plan.
"""

import inspect
import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import trl

from autotrain_mem.drop_in.call_plan import PlannedCall, make_plan
from autotrain_mem.drop_in.config_merge import default_config, planned_config
from autotrain_mem.drop_in.device import grow_segments
from autotrain_mem.drop_in.guarded_methods import guard, guard_methods
from autotrain_mem.methods.configs import with_knobs
from autotrain_mem.methods.interface import method_of
from autotrain_mem.support import codec
from autotrain_mem.support.errors import RehearsalError, UsageError
from autotrain_mem.trainers.finish import finished
from autotrain_mem.trainers.model_support import quantized_to_host
from autotrain_mem.trainers.pretrained import load_processor, revision_of
from autotrain_mem.trainers.script_call import Call, Keywords, substitution
from autotrain_mem.types import METHODS, Plan
from autotrain_mem.types.autofit import AutoFit, as_autofit
from autotrain_mem.types.python_names import PythonErrors
from autotrain_mem.worker.client import PREFIX

_CALL = "_autofit_call"


class _Signature:
    """Provides a class's ``__signature__`` with the parameters of the constructor, not of ``__new__``."""

    def __get__(self, trainer: Any, kind: type) -> inspect.Signature:
        ours = next(base for base in kind.__mro__ if "__signature__" in vars(base))
        if kind.__init__ is not ours.__init__:  # type: ignore[misc]
            _, *own = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
            return inspect.Signature(own)
        trl_class = kind.__mro__[kind.__mro__.index(ours) + 1]
        _, *trls = inspect.signature(trl_class.__init__).parameters.values()  # type: ignore[misc]
        autofit = inspect.Parameter("autofit", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=AutoFit | None)
        return inspect.Signature([*trls, autofit])


class Planned:
    """Adds planning to a TRL trainer:
    ``class SFTTrainer(Planned, trl.SFTTrainer, method="sft", config_class=trl.SFTConfig)``."""

    plan: Plan | None
    """The plan in use; None if there are no rows to train on."""

    __signature__ = _Signature()

    _autofit_method: str
    _autofit_config_class: type

    def __init_subclass__(cls, *, method: str | None = None, config_class: type | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if method is not None and config_class is not None:  # one of our classes, from which users' classes derive
            cls._autofit_method, cls._autofit_config_class = method, config_class
            guard_methods(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        trainer = super().__new__(cls)
        setattr(trainer, _CALL, (args, kwargs))  # the arguments of the outermost class, perhaps a user's subclass
        return trainer

    def __init__(self, *args: Any, autofit: AutoFit | None = None, **kwargs: Any) -> None:
        """Plans, and constructs the trainer with the plan; TRL itself raises for arguments that it rejects.

        Args:
            autofit: How to plan; None uses the defaults of :class:`AutoFit`.
        """
        from datasets import Dataset, IterableDataset
        from transformers import TrainingArguments, set_seed

        construct, method, config_class = super().__init__, self._autofit_method, self._autofit_config_class
        outer_args, outer_kwargs = vars(self).pop(_CALL, ((), {}))
        try:
            keywords: Keywords = dict(inspect.signature(construct).bind(*args, **kwargs).arguments)
        except TypeError:  # TRL's constructor raises its own error
            construct(*args, **kwargs)
            return
        if (substitute := substitution.get()) is not None:
            construct(**substitute(keywords))
            return
        ours = as_autofit(autofit)
        kind = TrainingArguments if method_of(method).takes_transformers_arguments else config_class
        is_config = isinstance(keywords.get("args"), kind | None)
        if not is_config or not isinstance(keywords.get("train_dataset"), Dataset | IterableDataset):
            construct(**keywords)  # TRL may raise its own error
            if (rows := keywords.get("train_dataset")) is not None:
                raise UsageError(
                    f"No plan can be made for a train_dataset of type {type(rows).__name__}: its rows cannot be "
                    "counted.",
                    hint="Give a datasets.Dataset: datasets.Dataset.from_list(rows) makes one.",
                )
            self.plan = None
            return
        if (config := keywords.get("args")) is None:
            config = default_config(config_class, keywords, METHODS[method].title)
        elif not isinstance(config, config_class):  # transformers' class, converted as TRL does
            config = config_class(**{**config.to_dict(), "hub_token": config.hub_token})
        keywords["args"] = config
        call = Call(trainer=type(self), args=outer_args, kwargs=outer_kwargs, keywords=keywords)
        asked = PlannedCall(method=method, config_class=config_class, call=call, autofit=ours)
        try:
            with PythonErrors(config_class.__name__):
                plan = make_plan(asked)
        except RehearsalError as error:  # raises the error that TRL raised in the rehearsal
            shown: BaseException = error
            inner = error.__cause__
            if inner is not None and inner.__cause__ is not None:  # else only the place of the error is known
                shown, inner, inner.__cause__ = inner, inner.__cause__, None
            error.__cause__ = None  # a worker's traceback has a hundred lines, so it goes to a file
            if isinstance(inner, RuntimeError):
                prefix = f"{PREFIX}rehearsal-"
                with NamedTemporaryFile("w", prefix=prefix, suffix=".log", delete=False, encoding="utf-8") as log:
                    log.write(str(inner))
                with suppress(OSError):  # another process may delete the same files; the five newest stay
                    for old in sorted(Path(log.name).parent.glob(f"{prefix}*.log"), key=os.path.getmtime)[:-5]:
                        old.unlink()
                shown.add_note(f"The rehearsal's traceback is in {log.name}.")
            raise shown from None
        if plan.estimate.grows:
            grow_segments(keywords["args"].device)
        config = planned_config(keywords["args"], plan.knobs, loads=isinstance(keywords["model"], str))
        planned = with_knobs(keywords, plan.method, {**plan.job.arguments, **codec.to_json(plan.knobs)})
        set_seed(config.seed)  # TRL initializes adapters and reward heads before transformers' Trainer sets the seed
        if plan.data is not None and plan.data.images is not None:  # at the plan's image size
            revision = revision_of(plan.job)
            planned["processing_class"] = load_processor(plan.job.model, plan.knobs.max_pixels, **revision)
        with quantized_to_host():
            construct(**{**planned, "args": config})
        finished(self, plan.knobs)
        self.plan = plan
        if ours.guard and plan.estimate.hardware.origin != "cpu":  # out of host memory, the kernel kills the process
            guard(self)


class SFTTrainer(Planned, trl.SFTTrainer, method="sft", config_class=trl.SFTConfig):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's SFTTrainer with settings that fit the device.

    ``SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rows).train()`` plans before the model is loaded.

    Args:
        autofit: How to plan; all other arguments are TRL's.

    Raises:
        DoesNotFitError: no allowed configuration fits; the message gives the nearest that would.
        AutofitError: see ``autotrain_mem.support.errors``. Arguments that TRL rejects raise TRL's own errors.
    """


class RewardTrainer(Planned, trl.RewardTrainer, method="reward", config_class=trl.RewardConfig):  # type: ignore[misc]
    """TRL's RewardTrainer with settings that fit the device; see :class:`SFTTrainer`."""


class DPOTrainer(Planned, trl.DPOTrainer, method="dpo", config_class=trl.DPOConfig):  # type: ignore[misc]
    """TRL's DPOTrainer with settings that fit the device; see :class:`SFTTrainer`."""


class KTOTrainer(Planned, trl.KTOTrainer, method="kto", config_class=trl.KTOConfig):  # type: ignore[misc]
    """TRL's KTOTrainer with settings that fit the device; see :class:`SFTTrainer`."""


class GRPOTrainer(Planned, trl.GRPOTrainer, method="grpo", config_class=trl.GRPOConfig):  # type: ignore[misc]
    """TRL's GRPOTrainer with settings that fit the device; see :class:`SFTTrainer`."""


class RLOOTrainer(Planned, trl.RLOOTrainer, method="rloo", config_class=trl.RLOOConfig):  # type: ignore[misc]
    """TRL's RLOOTrainer with settings that fit the device; see :class:`SFTTrainer`."""


class DistillationTrainer(
    Planned,
    trl.DistillationTrainer,  # type: ignore[misc]
    method="distillation",
    config_class=trl.DistillationConfig,
):
    """TRL's DistillationTrainer with settings that fit the device; see :class:`SFTTrainer`."""
