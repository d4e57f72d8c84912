"""Shows what a model object keeps a plan from doing: levers that would need it loaded again, and are never pulled."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autotrain_mem.methods.interface import method_of
from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.support.errors import AutofitError, DoesNotFitError
from autotrain_mem.support.units import format_bytes
from autotrain_mem.trainers import script_call
from autotrain_mem.trainers.script_call import Call
from autotrain_mem.types import Job, Plan
from autotrain_mem.types.estimate import candidate

RELOADING = ("dtype", *BASE_BITS)
"""Knobs that are decided as the model is loaded."""

LOSSLESS = "lossless"
"""The level (``search.levels``) on which nothing is given up that loading anew could give back."""

PlanJob = Callable[[Job], Plan]


def with_reloaded(plan_job: PlanJob, job: Job, call: Call, folder: pathlib.Path) -> Plan:
    """The plan for a model object; where it gives something up, beside what the model loaded anew would allow.

    Args:
        plan_job: Plans a job.
        folder: A scratch folder.

    Raises:
        DoesNotFitError: the object's own; its hint says whether the model would fit when it is loaded again.
    """
    try:
        plan = plan_job(job)
    except DoesNotFitError as error:
        other = _reloaded(plan_job, job, call, folder)
        if other is None:
            raise
        name = call.model.config._name_or_path or "NAME"
        how = f"in {other.knobs.base_bits} bits" if other.knobs.base_bits else other.knobs.dtype
        needed = format_bytes(other.estimate.required_bytes)
        advice = f'given by its name, model="{name}", it would be loaded {how} and fit ({needed})'
        raise DoesNotFitError(error.message, hint="\n".join(filter(None, (error.hint, advice)))) from error
    if plan.level == LOSSLESS:
        return plan
    other = _reloaded(plan_job, job, call, folder)
    if other is None:
        return plan
    reloaded = candidate(other.estimate, beside=plan.estimate, level=f"{other.level}, model given by its name")
    return replace(plan, alternatives=(*plan.alternatives, reloaded))


def _reloaded(plan_job: PlanJob, job: Job, call: Call, folder: pathlib.Path) -> Plan | None:
    """The plan of the same job with the model given by name; None where that would load another model."""
    model = call.model
    takes_name = method_of(job.method).takes_model_name
    if job.python_call is None or isinstance(model, str) or not takes_name or not _is_stock(model):
        return None
    path = folder / "reloaded"
    model.config.save_pretrained(path)
    written = script_call.write(call.replacing(model, str(path)), path)
    arguments = {name: value for name, value in job.arguments.items() if name not in RELOADING}
    arguments |= {} if job.arguments["dtype"] == "float32" else {"dtype": job.arguments["dtype"]}
    named = replace(
        job,
        model=str(path),
        arguments=arguments,
        python_call=replace(job.python_call, path=written, holds_model=False, digest=""),
    )
    try:
        other = plan_job(named)
    except AutofitError:
        return None
    reloads = other.knobs.base_bits is not None or other.knobs.dtype != job.arguments["dtype"]
    return other if reloads else None


def _is_stock(model: Any) -> bool:
    """A model of transformers' own, as its config builds it: neither adapted, nor quantized, nor with other modules."""
    from transformers import PreTrainedModel

    libraries = {type(module).__module__.split(".")[0] for module in model.modules()}
    plain = isinstance(model, PreTrainedModel) and libraries <= {"torch", "transformers"}
    return plain and getattr(model, "hf_quantizer", None) is None
