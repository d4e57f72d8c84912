"""Reads the event files of an output folder, and writes a line of text for each event."""

import contextlib
import errno
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotrain_mem.report import formatting
from autotrain_mem.settings.knobs import Knobs
from autotrain_mem.support import codec
from autotrain_mem.support.files import open_ordinary, parse_object
from autotrain_mem.support.units import MIB, counted, duration, format_bytes
from autotrain_mem.types import MemoryReading, Phase, PhasePeak, Plan, Probe
from autotrain_mem.types.experience import EVENTS_NAME, RECORD_NAME, RunHistory, RunMarker, StepReading

LARGEST_BYTES = 256 * MIB
"""The most bytes that one read takes from a file: about 380,000 lines of about 700 bytes, one for each logged step."""
_KINDS = {
    **{name: name for name in ("start", "checkpoint", "restart", "end")},
    "incident": "out of memory",
    **dict.fromkeys(("save_failed", "sign", "note", "not_finite"), "warning"),
}
"""Event -> the kind of its mark in a run's history; other events have no mark."""
_SOUND = (
    "the gradient is finite, so training continues. A micro-batch without a token to train on has no mean loss: look "
    "for rows whose completion --max_length cuts off."
)
_SPOILED = (
    "the weights are unusable from here on, whatever loss is logged (transformers leaves such values out, "
    "--logging_nan_inf_filter), and no checkpoint is written that would replace a good one. Lower "
    "--learning_rate, compute in bf16 rather than fp16, keep --max_grad_norm at 1, and look at the rows of that step "
    "and at the weights that it began with."
)
_Event = Mapping[str, Any]
_TYPES: Mapping[str, tuple[type, ...]] = {
    **{"event": (str,), "time": (int, float), "tokens_per_second": (int, float, type(None))},
    **dict.fromkeys(("step", "total_steps", "total_bytes"), (int, type(None))),
}
"""Key of an event -> the types of its value. :meth:`HistoryReader.read` checks other keys as it uses them."""
_FURTHEST = 1e15  # beyond any step, time or number of bytes


def read_history(folder: str | Path) -> RunHistory | None:
    """Reads the history of an output folder's run; None if it has no files. Raises OSError if a file cannot be read."""
    return HistoryReader(folder).read()


class HistoryReader:
    """Reads the history of a run repeatedly while it is written, each time only the new part of each file.

    Incomplete lines are skipped: the last one may still be written, and a kill may have cut another short.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._files: dict[Path, tuple[int, list[_Event]]] = {}
        """File -> the number of bytes read so far, and the events in them."""

    def read(self) -> RunHistory | None:
        """Returns the history so far; None before the first event. Raises OSError if a file cannot be read."""
        try:
            events = self._lines(self._folder / EVENTS_NAME)
            stem, suffix = RECORD_NAME.rsplit(".", 1)
            ranked = re.compile(rf"{re.escape(stem)}\.rank(\d+)\.{re.escape(suffix)}")
            names = [(int(match[1]), path) for path in self._folder.iterdir() if (match := ranked.fullmatch(path.name))]
            records = [self._lines(path) for path in (self._folder / RECORD_NAME, *(path for _, path in sorted(names)))]
            if not (times := [float(event["time"]) for each in (events, *records) for event in each]):
                return None
            began = min(times)
            first, *others = [[event for event in each if event["event"] == "sample"] for each in records]
            # how the last process ended; empty if another one has begun since
            ends = [event for event in events if event["event"] in ("start", "end")]
            starts = [event for each in (events, records[0]) for event in each if event["event"] == "start"]
            happenings = []
            for event in events:
                if (kind := _KINDS.get(event["event"])) is None:
                    continue
                step = int((event.get("incident") or event.get("restart") or event).get("step") or 0)
                text = event_line(event)
                if kind == "start":
                    text = f"training begins after step {step}" if step else "training begins"
                elif kind == "end":
                    text = str(event.get("why") or event.get("ending", "ended"))
                elif kind == "checkpoint":
                    text = f"checkpoint of step {step}"
                happenings.append(RunMarker(seconds=round(event["time"] - began, 3), step=step, kind=kind, text=text))
            return RunHistory(
                began=began,
                last=max(times),
                total_steps=_last(starts, "total_steps"),
                total_bytes=_last(starts, "total_bytes"),
                predicted_bytes=codec.from_json(dict[Phase, int], _last(starts, "predicted_bytes") or {}),
                phases=codec.from_json(dict[Phase, PhasePeak], _last(records[0], "phases") or {}),
                ranks=(_moments(first, events, began), *(_moments(each, [], began) for each in others)),
                happenings=tuple(happenings),
                ending=str(ends[-1].get("ending", "")) if ends else "",
            )
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise OSError(errno.EINVAL, f"its events were changed: {error}") from error

    def _lines(self, path: Path) -> list[_Event]:
        """Returns all events of a file; none if there is no file."""
        read_bytes, events = self._files.get(path, (0, []))
        try:
            with open_ordinary(path) as file:
                if file.seek(0, 2) < read_bytes:  # another run replaced the file
                    read_bytes, events = 0, []
                file.seek(read_bytes)
                new = file.read(LARGEST_BYTES)
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.decode("utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                event = parse_object(line)
                is_sound = {"event", "time"} <= event.keys() and all(_is_sound(*each) for each in event.items())
                events += [event] if is_sound else []
        self._files[path] = (read_bytes + len(whole), events)
        return events


def _is_sound(name: str, value: Any) -> bool:
    """Returns whether an event's value can be what was written."""
    is_far = isinstance(value, int | float) and not abs(value) < _FURTHEST
    return isinstance(value, _TYPES.get(name, object)) and not is_far


def _moments(samples: list[_Event], events: list[_Event], began: float) -> tuple[StepReading, ...]:
    """Joins the samples and logs of each step, in order of time; a step that was trained twice appears twice."""
    waiting: dict[Any, list[_Event]] = {}
    for event in events:
        if event["event"] == "log":
            waiting.setdefault(event.get("step"), []).append(event)
    moments = []
    for sample in samples:
        of_step = waiting.get(sample.get("step")) or [{}]
        moments.append(_moment(sample, of_step.pop(0), began))
    moments += [_moment({}, log, began) for left in waiting.values() for log in left if log]
    moments += [_moment({**event, "device": event["memory"]}, {}, began) for event in events if event.get("memory")]
    return tuple(sorted(moments, key=lambda moment: moment.seconds))


def _moment(sample: _Event, log: _Event, began: float) -> StepReading:
    either = sample or log
    device, logs = sample.get("device"), log.get("logs") or {}
    return StepReading(
        seconds=round(either["time"] - began, 3),
        step=int(either.get("step") or 0),
        device=None if device is None else codec.from_json(MemoryReading, device),
        tokens_per_second=sample.get("tokens_per_second"),
        logs={name: value for name, value in logs.items() if not name.startswith("memory/")},
    )


def _last(events: list[_Event], name: str) -> Any:
    return next((event[name] for event in reversed(events) if event.get(name) is not None), None)


def event_line(event: Mapping[str, Any]) -> str:
    """Describes an event of a run, such as a probe or an incident; empty for an event that needs no line.

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
            return f"probing {formatting.batch(knobs)}: two real steps on the longest rows, in a separate process"
        case "probe":
            probe = codec.from_json(Probe, event["probe"])
            line = f"probe: {outcome(probe, event['predicted_bytes'], event['budget_bytes'])}"
            others = []
            for other in probe.others:
                name = f"{other.name or 'process'} ({other.pid})" if other.pid else "others"
                others.append(f"{name} {format_bytes(other.used_bytes)}")
            return f"{line}\non the card beside this run: {', '.join(others)}" if others else line
        case "replanned":
            before_it, plan = codec.from_json(Knobs, event["before"]), codec.from_json(Plan, event["plan"])
            names = formatting.differing([before_it, plan.knobs])
            is_so, was_so = formatting.settings(plan.knobs, names), formatting.settings(before_it, names)
            change = f"changes to {is_so} (from {was_so})"
            if not (is_so and was_so):  # a switch that is off is not named
                change = f"now uses {is_so}" if is_so else f"no longer uses {was_so}"
            return f"the plan {change}: {formatting.needs(plan.estimate)}, corrected by the measurement"
        case "restart":
            restart = event["restart"]
            step, resumed_at = counted(restart["step"], "step"), restart["resumed_at"]
            start = f"continues from step {resumed_at}" if resumed_at else "starts over"
            change = f" with {restart['change']}" if restart["change"] else ""
            why = f"({restart['cause']}: {restart['why']})"
            return f"the training process ended after {step} {why}; a new one {start}{change}"
        case "incident":
            incident, phase = event["incident"], event["incident"]["phase"].replace("_", " ")
            return f"out of memory in {phase} after step {incident['step']}: {incident['remedy']}"
        case "save_failed":
            return f"checkpoint of step {event['step']} could not be written, training continues: {event['message']}"
        case "checkpoint" if "message" in event:
            whole = f"checkpoint of step {event['step']} is whole, but its manifest could not be written"
            return f"{whole}; this checkpoint and all older ones are kept: {event['message']}"
        case "worst_batch" if event["why_not"]:
            return f"the longest rows could not be run first: {event['why_not']}"
        case "worst_batch":
            rows = counted(event["rows"], "row")
            tokens = f"of up to {event['longest_tokens']} tokens"
            return f"the longest rows ran first: {rows} {tokens}, in {duration(event['seconds'])}"
        case "not_finite":
            what = f"warning: step {event['step']}: loss {event['loss']}, norm of the gradient {event['gradient']}"
            return f"{what}: {_SPOILED if event['spoils'] else _SOUND}"
        case "report":
            return f"report  {event['path']}: open it in a browser"
        case "sign" | "torn" | "note":
            return str(event["message"])
    return ""


def outcome(probe: Probe, predicted_bytes: int, budget_bytes: int) -> str:
    """Returns ``8 x 1 rows: needs 96.0 MiB of 99.8 MiB, predicted 98.0 MiB; 2 steps and a save in 3.1 s: fits``."""
    tokens = f" of {probe.row_tokens} tokens" if probe.row_tokens else ""
    if completion := probe.knobs.completion_length:
        tokens = f" of {completion} tokens{f' on prompts{tokens}' if tokens else ''}"
    rows = f"{formatting.rows(probe.knobs)}{tokens}"
    end = "fits" if probe.fits else "does not fit"
    where = "" if probe.refused_in is None else f" in the {formatting.PHASES[probe.refused_in]} phase"
    if probe.required_bytes is None:
        return f"{rows}: out of memory{where}: {end}"
    figures = f"{format_bytes(probe.required_bytes)} of {format_bytes(budget_bytes)}"
    figures += f", predicted {format_bytes(predicted_bytes)}"
    if probe.refused:
        return f"{rows}: held {figures}; out of memory{where}: {end}"
    times = 0 if probe.measured is None else probe.measured.num_alloc_retries
    freed = f"; the cache was freed {counted(times, 'time')} to continue" if times else ""
    return f"{rows}: needs {figures}; 2 steps and a save in {duration(probe.seconds)}{freed}: {end}"
