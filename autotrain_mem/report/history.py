"""Reads the files that a run leaves in its output folder, also while it is still writing them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotrain_mem.report.events import event_line
from autotrain_mem.support.files import open_ordinary
from autotrain_mem.support.units import MIB
from autotrain_mem.types import Phase, PhasePeak, codec
from autotrain_mem.types.history import EVENTS_NAME, RECORD_NAME, Happening, Moment, RunHistory
from autotrain_mem.types.report import MemoryReading

LARGEST_BYTES = 256 * MIB
"""Of a file that is read: a line of some 700 bytes for each log makes 350,000 of them."""
_KINDS = {
    "start": "start",
    "checkpoint": "checkpoint",
    "incident": "out of memory",
    "restart": "restart",
    "save_failed": "warning",
    "sign": "warning",
    "note": "warning",
    "not_finite": "warning",
    "end": "end",
}
"""Events that are marked -> the kind of their marks."""
_Event = Mapping[str, Any]


def read_history(folder: str | Path) -> RunHistory | None:
    """Reads what the files of an output folder tell of its run; None where there are none.

    Raises:
        OSError: a file cannot be read.
    """
    return HistoryReader(folder).read()


class HistoryReader:
    """Reads the history of a run again and again while it is written: of each file only what is new.

    What is no whole line of JSON is passed over: the last one may be on its way, and a kill may have cut another short.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._files: dict[Path, _Tail] = {}

    def read(self) -> RunHistory | None:
        """Returns the history until now; None while there is nothing of it. Raises OSError."""
        events = self._lines(self._folder / EVENTS_NAME)
        records = [self._lines(path) for path in _record_files(self._folder)]
        times = [float(event["time"]) for each in (events, *records) for event in each]
        if not times:
            return None
        began = min(times)
        first, *others = [[event for event in each if event["event"] == "sample"] for each in records]
        starts = [event for each in (events, records[0]) for event in each if event["event"] == "start"]
        return RunHistory(
            began=began,
            last=max(times),
            total_steps=_last(starts, "total_steps"),
            total_bytes=_last(starts, "total_bytes"),
            predicted_bytes={Phase(phase): size for phase, size in (_last(starts, "predicted_bytes") or {}).items()},
            phases=_phases(records[0]),
            ranks=(_moments(first, events, began), *(_moments(each, [], began) for each in others)),
            happenings=tuple(_happenings(events, began)),
            ending=_ending(events),
        )

    def _lines(self, path: Path) -> list[_Event]:
        return self._files.setdefault(path, _Tail(path)).read()


class _Tail:
    """Keeps the events of a file, and how far it was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._events: list[_Event] = []

    def read(self) -> list[_Event]:
        """Returns all events, with those that were written since the last time; none where there is no file."""
        try:
            with open_ordinary(self._path) as file:
                if file.seek(0, 2) < self._read_bytes:  # another run's: it starts over
                    self._read_bytes, self._events = 0, []
                file.seek(self._read_bytes)
                new = file.read(LARGEST_BYTES)
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        lines = whole.decode("utf-8", errors="replace").splitlines()
        self._events += [event for line in lines if (event := _event(line)) is not None]
        return self._events


def _record_files(folder: Path) -> list[Path]:
    """Lists the records of all ranks, the first one's first."""
    stem, suffix = RECORD_NAME.rsplit(".", 1)
    ranked = re.compile(rf"{re.escape(stem)}\.rank(\d+)\.{re.escape(suffix)}")
    others = [(int(match[1]), path) for path in folder.iterdir() if (match := ranked.fullmatch(path.name))]
    return [folder / RECORD_NAME, *(path for _, path in sorted(others))]


def _event(line: str) -> _Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if isinstance(event, dict) and isinstance(event.get("event"), str) and isinstance(event.get("time"), int | float):
        return event
    return None


def _moments(samples: list[_Event], events: list[_Event], began: float) -> tuple[Moment, ...]:
    """Joins what was measured and what was logged at the same step; of a step that was trained twice the latter ones
    come later, as they did."""
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


def _moment(sample: _Event, log: _Event, began: float) -> Moment:
    either = sample or log
    device, logs = sample.get("device"), log.get("logs") or {}
    return Moment(
        seconds=round(either["time"] - began, 3),
        step=int(either.get("step") or 0),
        device=None if device is None else codec.from_json(MemoryReading, device),
        tokens_per_second=sample.get("tokens_per_second"),
        logs={name: value for name, value in logs.items() if not name.startswith("memory/")},
    )


def _happenings(events: list[_Event], began: float) -> Iterator[Happening]:
    for event in events:
        kind = _KINDS.get(event["event"])
        if kind is not None:
            step = _step(event)
            yield Happening(seconds=round(event["time"] - began, 3), step=step, kind=kind, text=_text(event, step))


def _step(event: _Event) -> int:
    inner = event.get("incident") or event.get("restart") or event
    return int(inner.get("step") or 0)


def _text(event: _Event, step: int) -> str:
    match event["event"]:
        case "start":
            return f"training begins after step {step}" if step else "training begins"
        case "end":
            return str(event.get("ending", "ended"))
        case "checkpoint":
            return f"checkpoint of step {step}"
        case _:
            return event_line(event)


def _ending(events: list[_Event]) -> str:
    """Says how the last process ended; empty where another one began since, or none has ended."""
    for event in reversed(events):
        if event["event"] == "end":
            return str(event.get("ending", ""))
        if event["event"] == "start":
            return ""
    return ""


def _phases(records: list[_Event]) -> dict[Phase, PhasePeak]:
    last = _last(records, "phases") or {}
    return {Phase(phase): codec.from_json(PhasePeak, peak) for phase, peak in last.items()}


def _last(events: list[_Event], name: str) -> Any:
    return next((event[name] for event in reversed(events) if event.get(name) is not None), None)
