"""What befalls a run while it trains, a line for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotrain_mem.report import formatting


def event_line(event: Mapping[str, Any]) -> str:
    """Of what may befall a run, and of the longest rows that it starts with; empty for all other events.

    >>> event_line({"event": "save_failed", "step": 20, "path": "run/checkpoint-20", "message": "disk full"})
    'checkpoint of step 20 could not be written, training goes on: disk full'
    """
    match event["event"]:
        case "restart":
            return _restart(event["restart"])
        case "incident":
            incident = event["incident"]
            return f"out of memory in {incident['phase']} after step {incident['step']}: {incident['remedy']}"
        case "save_failed":
            return f"checkpoint of step {event['step']} could not be written, training goes on: {event['message']}"
        case "worst_batch" if event["why_not"]:
            return f"the longest rows could not be run first: {event['why_not']}"
        case "worst_batch":
            rows = formatting.counted(event["rows"], "row")
            tokens = f"of up to {event['longest_tokens']} tokens"
            return f"the longest rows went through first: {rows} {tokens}, in {formatting.duration(event['seconds'])}"
        case "sign":
            return str(event["message"])
        case "torn":
            return str(event["message"])
    return ""


def _restart(restart: Mapping[str, Any]) -> str:
    """``the training process ended after 40 steps (killed: signal 9); another goes on from step 30``."""
    step, resumed_at = formatting.counted(restart["step"], "step"), restart["resumed_at"]
    start = f"goes on from step {resumed_at}" if resumed_at else "begins anew"
    change = f" with {restart['change']}" if restart["change"] else ""
    return f"the training process ended after {step} ({restart['cause']}: {restart['why']}); another {start}{change}"
