"""What to say to a run that did not fit after all: the smallest change that would, by what was measured."""

from __future__ import annotations

from dataclasses import replace

from autotrain_mem.engine.predict.predictions import Predictions
from autotrain_mem.engine.recover.replan import flags_of
from autotrain_mem.engine.rehearsals import Rehearsals
from autotrain_mem.errors import AutofitError
from autotrain_mem.planner.ladder import allowed
from autotrain_mem.planner.levers import EXPANDABLE, LEVERS
from autotrain_mem.planner.memo import Memo
from autotrain_mem.planner.nearest import confirmed, suggestion
from autotrain_mem.planner.search import find
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Estimate
from autotrain_mem.spec.shortage import Shortage


def smallest_change(rehearsals: Rehearsals, chosen: Estimate, shortage: Shortage) -> str | None:
    """Flags that lead from the settings that ran out to the nearest that would fit; None where nothing does.

    First what the user's words allow: the fastest of the least harm. Then, as when nothing can be planned, what would
    fit if pins and limits gave way. Predictions are held against a budget that is smaller by as much as the chosen
    settings took more than predicted.

    Example: planned 10.0 GiB of a budget of 11.0, and needed 11.8 when it ran out: what is looked for may be predicted
    to take 11.0 - 1.8 = 9.2 GiB.
    """
    narrower = _narrower(rehearsals, chosen, shortage)
    try:
        facts, lengths = narrower.describe(), narrower.lengths()
        return _flags(narrower.space(facts, lengths), Predictions(narrower, facts, lengths), chosen)
    except AutofitError:  # the error that is on its way matters more than one about a proposal
        return None


def lowered_budget_bytes(chosen: Estimate, shortage: Shortage) -> int:
    """What another plan may be predicted to take; always less than was predicted for the chosen one."""
    too_low = max(0, shortage.needed_bytes - chosen.required_bytes)
    there = min(chosen.budget_bytes, shortage.total_bytes - shortage.others_bytes)
    return max(0, min(there - too_low, chosen.required_bytes - 1))


def _narrower(rehearsals: Rehearsals, chosen: Estimate, shortage: Shortage) -> Rehearsals:
    budget_bytes = lowered_budget_bytes(chosen, shortage)
    return replace(rehearsals, headroom_bytes=max(0, rehearsals.hardware.free_bytes - budget_bytes))


def _flags(space: Space, predictions: Predictions, chosen: Estimate) -> str | None:
    found = find(space, predictions)
    if found is not None:
        return flags_of(chosen.knobs, found.estimate.knobs) or None
    near = confirmed(space, Memo(predictions, may_expand=allowed(LEVERS[EXPANDABLE], space)))
    return None if near is None else suggestion(space, near.knobs)
