"""Replans a run that ran out of memory or lost machines.

The new plan resumes the run's checkpoints and computes the same training. So only the division of a step's rows,
recomputation, offloading (``trainers.host_optimizer`` writes the same checkpoint) and expandable segments may change.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from autotrain_mem.machine.detect import as_now
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.search.memo import Memo
from autotrain_mem.search.nearest import confirmed, suggestion
from autotrain_mem.search.search import find
from autotrain_mem.settings.knobs import EVALUATED_ROWS, ROWS, STEPS, alone_too
from autotrain_mem.settings.levers import EXPANDABLE, OFFLOADING
from autotrain_mem.settings.own import SWITCHES_OF_OURS
from autotrain_mem.settings.words import CHECKPOINTING
from autotrain_mem.support.errors import AutofitError, TrainingError
from autotrain_mem.types import Estimate, Knobs, Plan, Shortage, Topology

MOVABLE = frozenset({ROWS, STEPS, EVALUATED_ROWS, EXPANDABLE, CHECKPOINTING, *OFFLOADING})

LESS_SHARE = 0.1
"""The share of the budget to leave free, since the prediction was too low by an unknown amount. Predictions of public
runs' reserved bytes are at most 1.7 % too low (docs/understand/accuracy.md)."""


def with_less_on_device(
    rehearsals: Rehearsals, chosen: Plan, peak_reserved_bytes: int | None, others_bytes: int = 0
) -> Plan | None:
    """Returns the fastest plan that is predicted to take clearly less memory than the current one, or None.
    ``peak_reserved_bytes``: the measured peak; None if it was not measured. ``others_bytes``: bytes that other
    processes held on the device when memory ran out."""
    card = rehearsals.hardware
    came_bytes = max(0, others_bytes - (card.total_bytes - card.free_bytes))
    left_bytes = max(0, rehearsals.budget_bytes - came_bytes)
    # Stay below the current plan by as much as its prediction was too low.
    predicted_bytes, now = chosen.estimate.required_bytes, replace(rehearsals, hardware=as_now(card))
    most_bytes = min(rehearsals.budget_bytes, predicted_bytes, now.budget_bytes)
    measured_bytes = (peak_reserved_bytes or 0) + rehearsals.outside_bytes(chosen.knobs)
    too_low = max(1.0, measured_bytes / predicted_bytes)
    limit_bytes = min(int((1 - LESS_SHARE) * most_bytes / too_low), left_bytes)
    return _searched(replace(rehearsals, headroom_bytes=max(0, card.free_bytes - limit_bytes)), chosen)


def with_less_on_host(rehearsals: Rehearsals, chosen: Plan) -> Plan | None:
    """Returns a plan without the offloading that the current plan added; None if it added none, or if nothing fits."""
    asked = rehearsals.job.arguments
    moved = [name for name in OFFLOADING if getattr(chosen.knobs, name) and not asked.get(name)]
    return _searched(rehearsals, chosen, moved) if moved else None


def on_machines(rehearsals: Rehearsals, chosen: Plan, topology: Topology) -> tuple[Rehearsals, Plan]:
    """Plans the same training on other machines, with the same rows in each step and the same kind of sharding.
    Raises TrainingError if their number of processes does not divide the rows, or a process's share does not fit."""
    knobs, processes = chosen.knobs, topology.processes
    each, rest = divmod(knobs.effective_batch_size * knobs.token_shards, processes)
    if rest:
        of_each = f", each shared by {knobs.token_shards} processes," if knobs.token_shards > 1 else ""
        why = f"a step's {knobs.effective_batch_size} rows{of_each} cannot be divided among them"
        raise _cannot_go_on(chosen, processes, why)
    sharding = "fsdp2" if knobs.sharding == "hsdp" and topology.nodes == 1 else knobs.sharding
    sharding = alone_too(sharding, processes)
    at_once = math.gcd(knobs.per_device_train_batch_size, each)
    base = replace(
        knobs,
        processes=processes,
        sharding=sharding,
        dp_replicate_size=topology.nodes if sharding == "hsdp" else None,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=each // at_once,
    )
    arguments = {name: value for name, value in rehearsals.job.arguments.items() if name != "sharding"}
    asked = {"sharding": sharding} if sharding and "sharding" in rehearsals.job.arguments else {}
    job = replace(rehearsals.job, arguments=arguments | asked)
    others = replace(rehearsals, job=job).on(replace(rehearsals.hardware, topology=topology))
    plan = _searched(others, replace(chosen, estimate=replace(chosen.estimate, knobs=base)), is_other=True)
    if plan is None:
        raise _cannot_go_on(chosen, processes, "it does not fit on their GPUs")
    return others, plan


def _cannot_go_on(chosen: Plan, processes: int, why: str) -> TrainingError:
    count = f"{processes} process{'es' * (processes > 1)}"
    return TrainingError(
        f"The training cannot continue with {count} instead of {chosen.knobs.processes}: {why}.",
        hint="Start the lost machine's command again, and that of every other machine that stopped.",
    )


def flags_of(before: Knobs, after: Knobs) -> str:
    """Returns the settings that differ, as command-line flags.

    >>> from autotrain_mem import Knobs
    >>> one = dict(use_peft=False, dtype="float32", optim="adamw_torch", gradient_checkpointing=True)
    >>> before = Knobs(per_device_train_batch_size=4, gradient_accumulation_steps=1, **one)
    >>> flags_of(before, replace(before, per_device_train_batch_size=2, gradient_accumulation_steps=2))
    '--per_device_train_batch_size 2 --gradient_accumulation_steps 2'
    """
    flags = []
    for name in (each.name for each in fields(Knobs)):
        if (value := getattr(after, name)) != getattr(before, name):
            text = f" {str(value).lower() if isinstance(value, bool) else value}"
            flags.append(f"--{name}{'' if name in SWITCHES_OF_OURS and value is True else text}")
    return " ".join(flags)


def _searched(
    rehearsals: Rehearsals, chosen: Plan, without: Sequence[str] = (), *, is_other: bool = False
) -> Plan | None:
    """Searches around a plan's settings; None if nothing else fits. ``without``: levers that are released and
    forbidden. ``is_other``: whether the settings of ``chosen`` are new, so that they are a result too."""
    subject = rehearsals.subject()
    space = subject.space()
    released: dict[str, Any] = dict.fromkeys(without, False)
    # dataloader_drop_last drops incomplete micro-batches, so micro-batches of another size would make other steps.
    movable = MOVABLE - {ROWS, STEPS} if rehearsals.job.arguments.get("dataloader_drop_last") else MOVABLE
    fixed = frozenset(each.name for each in fields(Knobs)) - movable
    space = replace(
        space,
        base=replace(chosen.knobs, **released),
        pinned=space.pinned | fixed,
        effective_batch_size=chosen.knobs.effective_batch_size,
        forbid=space.forbid | frozenset(without),
    )
    best = find(space, Memo(space, Predictions(subject)))
    if best is None or (best.estimate.knobs == chosen.knobs and not is_other):
        return None
    # A lever that was used before keeps its original start; a released lever is removed.
    levers = {lever.name: lever for lever in chosen.levers}
    for lever in best.levers:
        if (start := levers.pop(lever.name, lever).before) != lever.after:
            levers[lever.name] = replace(lever, before=start)
    return replace(
        chosen,
        estimate=replace(best.estimate, budget_bytes=chosen.estimate.budget_bytes),
        levers=tuple(levers.values()),
        attempts=(*chosen.attempts, *best.attempts),
    )


def smallest_change(rehearsals: Rehearsals, chosen: Estimate, shortage: Shortage) -> str | None:
    """Returns the flags of the smallest change with which a run that ran out of memory would fit, or None.

    The user's pins and limits are dropped only if nothing fits within them. The error of the prediction is subtracted
    from the budget: if 10.0 GiB were predicted, 11.8 needed and 11.0 allowed, the new plan may take 11.0 - 1.8 = 9.2.
    """
    too_low = max(0, shortage.needed_bytes - chosen.required_bytes)
    there = min(chosen.budget_bytes, shortage.total_bytes - shortage.others_bytes)
    headroom_bytes = max(0, rehearsals.hardware.free_bytes - max(0, min(there - too_low, chosen.required_bytes - 1)))
    narrower = replace(rehearsals, headroom_bytes=headroom_bytes)
    try:
        subject = narrower.subject()
        space, predictions = subject.space(), Predictions(subject)
        if (best := find(space, Memo(space, predictions))) is not None:
            return flags_of(chosen.knobs, best.estimate.knobs) or None
        near = confirmed(space, Memo(space, predictions))
        return None if near is None else suggestion(space, near.knobs)
    except AutofitError:  # the user gets the original error, not this one
        return None
