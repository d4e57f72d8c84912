"""Puts into words what a probe measured and what befalls a run while it trains, a line for each event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotrain_mem.report import formatting
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import OtherProcess, Plan, Probe, codec
from autotrain_mem.types.knobs import Knobs


def event_line(event: Mapping[str, Any]) -> str:
    """Tells of a probe and of what may befall a run, the longest rows that it starts with included.

    An event that needs no line, such as a step, gives an empty text.

    >>> event_line({"event": "save_failed", "step": 20, "path": "run/checkpoint-20", "message": "disk full"})
    'checkpoint of step 20 could not be written, training continues: disk full'
    """
    match event["event"]:
        case "room":
            before, now = event["before_bytes"], event["now_bytes"]
            change = f"{format_bytes(abs(now - before))} of the card were {'taken' if now < before else 'given back'}"
            return f"{change} since the plan was made: {format_bytes(now)} are free"
        case "probing":
            knobs = codec.from_json(Knobs, event["knobs"])
            return f"probing {formatting.batch(knobs)}: two real steps on the longest rows, in a process of their own"
        case "probe":
            probe = codec.from_json(Probe, event["probe"])
            line = f"probe: {outcome(probe, event['predicted_bytes'], event['budget_bytes'])}"
            others = ", ".join(f"{_who(other)} {format_bytes(other.used_bytes)}" for other in probe.others)
            return f"{line}\non the card beside this run: {others}" if others else line
        case "replanned":
            return _moved(codec.from_json(Knobs, event["before"]), codec.from_json(Plan, event["plan"]))
        case "restart":
            restart = event["restart"]
            step, resumed_at = formatting.counted(restart["step"], "step"), restart["resumed_at"]
            start = f"continues from step {resumed_at}" if resumed_at else "starts over"
            change = f" with {restart['change']}" if restart["change"] else ""
            why = f"({restart['cause']}: {restart['why']})"
            return f"the training process ended after {step} {why}; another {start}{change}"
        case "incident":
            incident, phase = event["incident"], event["incident"]["phase"].replace("_", " ")
            return f"out of memory in {phase} after step {incident['step']}: {incident['remedy']}"
        case "save_failed":
            return f"checkpoint of step {event['step']} could not be written, training continues: {event['message']}"
        case "checkpoint" if "message" in event:
            whole = f"checkpoint of step {event['step']} is whole, but its manifest could not be written"
            return f"{whole}; it is kept, as are all older ones: {event['message']}"
        case "worst_batch" if event["why_not"]:
            return f"the longest rows could not be run first: {event['why_not']}"
        case "worst_batch":
            rows = formatting.counted(event["rows"], "row")
            tokens = f"of up to {event['longest_tokens']} tokens"
            return f"the longest rows went through first: {rows} {tokens}, in {formatting.duration(event['seconds'])}"
        case "not_finite":
            return _not_finite(event)
        case "report":
            return f"report  {event['path']}: open it in a browser"
        case "sign" | "torn" | "note":
            return str(event["message"])
    return ""


def _not_finite(event: Mapping[str, Any]) -> str:
    """Say at which step a number was none, what that means, and what to look at."""
    figures = f"warning: step {event['step']}: loss {event['loss']}, norm of the gradient {event['gradient']}"
    if not event["spoils"]:
        return (
            f"{figures}: the gradient is sound, and training continues. A micro-batch in which no token counts has no "
            "mean: look for rows whose completion --max_length cuts off."
        )
    return (
        f"{figures}: the weights are unusable from here on, whatever loss is logged (transformers leaves such values "
        "out, --logging_nan_inf_filter), and no checkpoint is written that would take a sound one's place. Lower "
        "--learning_rate, compute in bf16 rather than fp16, keep --max_grad_norm at 1, and look at the rows of that "
        "step and at the weights that it began with."
    )


def outcome(probe: Probe, predicted_bytes: int, budget_bytes: int) -> str:
    """``8 x 1 rows of 1197 tokens: needs 96.0 MiB of 99.8 MiB, predicted 98.0 MiB; 2 steps in 3.1 s: fits``."""
    rows = f"{formatting.rows(probe.knobs)}{_lengths(probe)}"
    end = "fits" if probe.fits else "does not fit"
    where = "" if probe.refused_in is None else f" in the {formatting.PHASES[probe.refused_in]} phase"
    if probe.required_bytes is None:
        return f"{rows}: out of memory{where}: {end}"
    needed = "needs" if not probe.refused else "held"
    figures = f"{needed} {format_bytes(probe.required_bytes)} of {format_bytes(budget_bytes)}"
    parts = [f"{figures}, predicted {format_bytes(predicted_bytes)}"]
    times = 0 if probe.measured is None else probe.measured.num_alloc_retries
    if probe.refused:
        parts.append(f"out of memory{where}")
    else:
        parts.append(f"2 steps and a save in {formatting.duration(probe.seconds)}")
    if times and not probe.refused:
        parts.append(f"the cache was freed {formatting.counted(times, 'time')} to continue")
    return f"{rows}: {'; '.join(parts)}: {end}"


def _moved(before: Knobs, plan: Plan) -> str:
    """``the plan moves: 2 x 4 rows in place of 4 x 2, predicted with what was measured: 60.1 of 99.8 MiB``."""
    names = formatting.differing([before, plan.knobs])
    now, then = formatting.settings(plan.knobs, names), formatting.settings(before, names)
    change = f"moves to {now} (from {then})"
    if not (now and then):  # a switch has no words where it is off
        change = f"takes {now}" if now else f"goes without {then}"
    needs = formatting.needs(plan.estimate.required_bytes, plan.estimate.budget_bytes)
    return f"the plan {change}: {needs}, by what was measured"


def _who(other: OtherProcess) -> str:
    return f"{other.name or 'process'} ({other.pid})" if other.pid else "others"


def _lengths(probe: Probe) -> str:
    if probe.knobs.completion_length:
        prompts = f" on prompts of {probe.row_tokens} tokens" if probe.row_tokens else ""
        return f" of {probe.knobs.completion_length} tokens{prompts}"
    return f" of {probe.row_tokens} tokens" if probe.row_tokens else ""
