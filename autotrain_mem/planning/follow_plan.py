"""Follows an earlier plan: unchanged if nothing that it depends on has changed, else after one rehearsal.

Nothing is searched: the settings are the plan's, and a flag that contradicts one of them is rejected.
"""

import time
from collections.abc import Iterator
from dataclasses import fields, replace

from autotrain_mem.allocator.settings import environment_setting
from autotrain_mem.machine.catalog import recognise
from autotrain_mem.machine.detect import CHOOSE_CARDS
from autotrain_mem.planning.for_processes import changes, ways_to_share
from autotrain_mem.planning.kept_answers import UNSEEN
from autotrain_mem.planning.plan import make_plan
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Subject
from autotrain_mem.search.levels import FURTHEST, check_forbid, lever_name
from autotrain_mem.search.memo import OnAttempt, candidate
from autotrain_mem.search.nearest import budget_line, needs_line
from autotrain_mem.search.search import SearchResult
from autotrain_mem.search.space import Space, precise_for
from autotrain_mem.settings.knobs import COMPLETION_KNOBS, NOT_REHEARSED, ROWS, STEPS
from autotrain_mem.settings.levers import LEVERS, LIGER
from autotrain_mem.settings.words import MAX_LENGTH, MAXIMIZED, is_maximized
from autotrain_mem.support.errors import DoesNotFitError, UsageError
from autotrain_mem.support.units import format_bytes
from autotrain_mem.support.versions import versions_key
from autotrain_mem.types import Hardware, Harm, Job, Knobs, LearnedLimits, ModelFacts, Plan
from autotrain_mem.types.planned import as_recorded

GIVEN_AGAIN = (MAX_LENGTH, *COMPLETION_KNOBS, "lora_r", "lora_alpha", "lora_target_modules")
"""Knobs that the user may set to other values than the plan's, if they were also set when the plan was made."""

_COMPARED_BY_EFFECT = frozenset({"model_name_or_path", *(field.name for field in fields(Knobs))})
"""Arguments that are compared by their effect: the model by its digest, knobs by the plan's values."""


def follow_plan(subject: Subject, plan: Plan, on_attempt: OnAttempt, *, again: str) -> Plan:
    """Returns the plan, adapted to this job, card and installed versions.

    Example: a plan from another trl version is rehearsed once and returned with the new prediction and a warning.
    ``again``: how to plan again, for hints: a command or a Python call. Raises UsageError if the request contradicts
    the plan's settings, or ``forbid`` has a name that no lever has, and DoesNotFitError if the plan does not fit here.
    """
    started = time.perf_counter()
    before = plan.estimate
    if subject.headroom_bytes is None and _card_name(before.hardware) == _card_name(subject.hardware):
        subject = replace(subject, headroom_bytes=before.hardware.free_bytes - before.budget_bytes)
    space = subject.space()
    ways = list(ways_to_share(plan, space, again))
    differing = tuple(changes(plan.knobs, ways[0]))
    plan = replace(plan, estimate=replace(before, knobs=ways[0]))
    if wrong := [*_contradictions(plan, space, subject.job)]:
        raise UsageError(
            f"The plan has other values: {'; '.join(wrong)}.",
            hint=f"Remove what differs to train with the plan, or plan again: {again}",
        )
    renewed = [*(name for name in GIVEN_AGAIN if _may_be_given(name, plan, space)), *({NOT_REHEARSED} & space.pinned)]
    renewed += [LIGER] if space.base.use_liger_kernel is None else []  # not installed here, or a simulated card
    given = {name: getattr(space.base, name) for name in renewed}
    knobs = precise_for(replace(plan.knobs, **given), subject.job.arguments, subject.hardware.capability)
    reasons = (*differing, *_changed(plan, knobs, subject))
    if not reasons and any(probe.fits and probe.knobs == plan.knobs for probe in plan.experience.probes):
        # A probe fitted with the plan's figures for memory outside torch; the new ones are measured without the job.
        as_measured = {name: getattr(before.hardware, name) for name in ("non_torch_bytes", "communicator_bytes")}
        subject = replace(subject, hardware=replace(subject.hardware, **as_measured))
    estimate = replace(  # the plan's bytes, against the memory that is free here
        before,
        knobs=knobs,
        hardware=subject.hardware,
        budget_bytes=subject.budget_bytes,
        vllm_share_bytes=before.vllm_share_bytes if before.vllm_sleep else subject.vllm_share_bytes,
    )
    attempts, alternatives, experience = list(plan.attempts), plan.alternatives, plan.experience
    warnings: tuple[str, ...] = ()
    is_rehearsed = bool(reasons) or not estimate.fits
    if is_rehearsed:
        less = (
            ("budget", before.budget_bytes, estimate.budget_bytes),
            ("memory outside torch", before.outside_bytes, estimate.outside_bytes),
        )
        less_room = [f"{name} {format_bytes(old)} -> {format_bytes(new)}" for name, old, new in less if old != new]
        changed = ", ".join(reasons or less_room)
        predictions, attempts = Predictions(subject), []
        for way in ways:  # one, unless GPUs or sharding differ from the plan's
            split = {name: getattr(way, name) for name in (ROWS, STEPS)}
            (estimate,) = predictions.rehearse([replace(knobs, **split)], whole=True)
            estimate = predictions.over_steps(estimate) if estimate.fits else estimate
            attempts.append(candidate(estimate))
            on_attempt(attempts[-1])
            if estimate.fits:
                break
        if not estimate.fits:
            planned = f"{format_bytes(before.required_bytes)} of {format_bytes(before.budget_bytes)}"
            lines = (
                f"{plan.model} with the settings of its plan does not fit {estimate.hardware.name}.",
                needs_line(estimate),
                budget_line(estimate),
                f"  planned {planned}{before.segments} on {before.hardware.name}; since then: {changed}",
            )
            raise DoesNotFitError("\n".join(lines), hint=f"Plan again: {again}")
        warnings = (f"The earlier plan was rehearsed again, since this has changed: {changed}.",)
        # These were measured in another setup.
        alternatives, experience = (), replace(experience, learned=LearnedLimits(), probes=())
    left = {"fp16", *renewed} & {"fp16", LIGER}  # make_plan adds fp16 if this card needs it
    levers = tuple(lever for lever in plan.levers if lever.name not in left)
    result = SearchResult(
        level=plan.level, estimate=estimate, attempts=tuple(attempts), levers=levers, alternatives=(), most=plan.most
    )
    seconds = time.perf_counter() - started if is_rehearsed else plan.seconds
    followed = make_plan(subject, result, seconds=seconds)
    warnings = (*followed.warnings, *warnings)
    return replace(followed, alternatives=alternatives, experience=experience, warnings=warnings)


def _may_be_given(name: str, plan: Plan, space: Space) -> bool:
    before = plan.job.arguments.get(name)
    return name in space.pinned and name in plan.job.arguments and not is_maximized(before)


def check_subject(plan: Plan, job: Job, facts: ModelFacts, again: str) -> None:
    """Raises UsageError if the plan is for another method or model; the same model may be in another folder."""
    is_other_model = plan.model != job.model and plan.model_digest != facts.digest
    if plan.method != job.method or is_other_model:
        made_for, asked = (plan.model, job.model) if plan.method == job.method else (plan.method, job.method)
        ways = f"Train {plan.model} with {plan.method} to follow it, or plan again: {again}"
        raise UsageError(f"The plan is for {made_for}, not for {asked}.", hint=ways)


def _contradictions(plan: Plan, space: Space, job: Job) -> Iterator[str]:
    """Yields each contradiction to the plan; a limit of the search counts only if the plan's settings break it."""
    for name in sorted(space.pinned - {NOT_REHEARSED}):
        given, planned = getattr(space.base, name), getattr(plan.knobs, name)
        if given != planned and not (name in GIVEN_AGAIN and _may_be_given(name, plan, space)):
            yield f"{name} is {given}, and {planned} in the plan"
    for name in MAXIMIZED:
        request = job.arguments.get(name)
        if is_maximized(request) and request != plan.job.arguments.get(name):
            yield f"{name} is {request}, and {getattr(plan.knobs, name)} in the plan"
    rows = plan.knobs.effective_batch_size
    if job.effective_batch_size not in (None, rows):
        yield f"effective_batch_size is {job.effective_batch_size}, and {rows} in the plan"
    lowered = (min(lever.harm, Harm.ROUNDING) if lever.name == "dtype" else lever.harm for lever in plan.levers)
    given_up = max(lowered, default=Harm.NONE)  # bfloat16 weights are allowed even if they lose updates
    if job.fit != plan.job.fit and given_up > FURTHEST[job.fit]:
        yield f"fit is {job.fit}, and the plan's level is {plan.level}"
    harms = {lever.name: lever.harm for lever in plan.levers}  # a released lever has less harm than ``row.harm``
    newly = {name: LEVERS[name] for name in sorted(check_forbid(job.forbid) - plan.job.forbid)}
    if pulled := [name for name, row in newly.items() if harms.get(lever_name(row), Harm.NONE - 1) >= row.harm]:
        yield f"forbid has {', '.join(pulled)}, and the plan needs {'it' if len(pulled) == 1 else 'them'}"


def _changed(plan: Plan, knobs: Knobs, subject: Subject) -> tuple[str, ...]:
    """Lists the changes that can affect a rehearsal, as ``before -> after`` where both are known."""
    job, before, now = subject.job, plan.estimate.hardware, subject.hardware
    changes = []
    versions = (plan.versions, versions_key())
    # Builds of one version for another kind of device, such as ``2.13.0+cpu``, rehearse the same.
    public = [{name: version and version.partition("+")[0] for name, version in each.items()} for each in versions]
    differing = {
        name: [each.get(name) for each in public]
        for name in sorted({*public[0], *public[1]})
        if public[0].get(name) != public[1].get(name)
    }
    for name, (old, new) in differing.items():
        package = name.removesuffix(" files")  # this suffix marks the digest of a package's files
        if name == "autotrain_mem":
            changes.append("autofit's own code")
        elif package == name:
            changes.append(f"{name} {old or 'not installed'} -> {new or 'not installed'}")
        elif package not in differing:
            changes.append(f"{package}'s files")
    if _card_name(before) != _card_name(now) or before.capability != now.capability:
        changes.append(f"card {before.name} -> {now.name}")
    changes += _changed_arguments(plan, job, knobs)
    tokens = subject.row_length(knobs)
    if tokens > plan.row_tokens:  # shorter rows need no more than longer ones
        changes.append(f"longest {'prompt' if plan.job.is_online else 'row'} {plan.row_tokens} -> {tokens} tokens")
    digest = None if job.python_call is None else job.python_call.digest
    if digest != plan.objects or digest == "":  # an empty digest: the objects are unknown
        changes.append("the script's objects")
    if subject.facts.digest != plan.model_digest:
        changes.append(f"the config of {job.model}")
    if job.arguments.get("trust_remote_code"):
        changes.append("perhaps the model's own code")
    if (setting := environment_setting(job.environment)) != plan.allocator:
        changes.append(f"PYTORCH_ALLOC_CONF {plan.allocator or 'not set'} -> {setting or 'not set'}")
    return tuple(changes)


def _card_name(hardware: Hardware) -> str:
    """Returns the card's name in the catalog, so that ``rtx3060`` equals NVML's ``NVIDIA GeForce RTX 3060``."""
    known = recognise(hardware.name, hardware.total_bytes)
    return hardware.name if known is None else known.name


def _changed_arguments(plan: Plan, job: Job, knobs: Knobs) -> Iterator[str]:
    before, now = plan.job, as_recorded(job)
    if before.dataset != now.dataset:
        yield f"dataset {before.dataset or 'not given'} -> {now.dataset or 'not given'}"
    for name in (*GIVEN_AGAIN, LIGER):
        if getattr(knobs, name) != getattr(plan.knobs, name):
            yield f"{name} {getattr(plan.knobs, name)} -> {getattr(knobs, name)}"
    for name in sorted((before.arguments.keys() | now.arguments.keys()) - UNSEEN - _COMPARED_BY_EFFECT):
        if before.arguments.get(name) != now.arguments.get(name):
            yield f"{name} {before.arguments.get(name, 'not given')} -> {now.arguments.get(name, 'not given')}"
    if before.accelerate != now.accelerate:
        yield "the config of accelerate launch"
    for name in sorted((before.environment.keys() | now.environment.keys()) - {*CHOOSE_CARDS}):  # cards are compared
        if before.environment.get(name) != now.environment.get(name):
            yield f"the variable {name}"
