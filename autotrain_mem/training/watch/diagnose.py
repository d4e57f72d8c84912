"""Diagnoses problems from a run's memory readings, before they end the run. Repeats a sign only if it gets worse."""

import itertools
import operator
import os
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autotrain_mem.allocator.settings import variable_that_counts
from autotrain_mem.support.units import counted, format_bytes
from autotrain_mem.types.report import MemoryReading

Kind = Literal["fragmentation", "full", "leak", "host"]

QUARTER = 8
"""Samples in a quarter of a window; the minimum of a quarter is its floor."""
WINDOW = 4 * QUARTER
SPIKES = 2
"""The samples of a quarter that may exceed the others by any amount: a long row, or leftovers of an evaluation."""
STEEP = 2.5
"""The least rise of the floors, as a multiple of the spread within a quarter. Of 200,000 windows each of uniform,
skewed and normal noise, 0, 0 and 2 count as climbs. If this were 1.5, 11 windows of uniform and 95 of normal noise
would (``random``, seed 1, 2026-11-21)."""
CLIMBED = 3 * QUARTER / (WINDOW - 1)
"""The share of a window between the floors of its first and its last quarter."""

LEAST_CLIMB = 0.01
"""The least climb, as a share of its start: at 1 % per window, memory takes 70 windows (2,200 logs) to double."""
SLACK = 0.25
"""Memory is fragmented if at least this share of the reserved memory holds nothing at the peak. The limit separates two
runs: a well packed GRPO step has 9 % (QLoRA of Qwen3-8B, 7.85 of 8.59 GiB on a GPU), and an 8B QLoRA that gains from
expandable segments has 34 % (torchtune#1185: 16.39 GiB before, 10.83 after)."""
IN_A_ROW = 2
"""The GPU is full if the allocator had to release its cache before each of this many successive logs. Composer then
shrinks its micro-batch (``composer/trainer/trainer.py: _adjust_device_train_microbatch_size``)."""
HOST_SECONDS = 6 * 3600
"""Warn this long before host memory runs out: long enough for a sleeping user."""
HOST_LEFT = 0.05
"""Warn if less than this share of host memory is available: half of earlyoom's limit for killing (10 %, its README)."""
AGAIN = 4.0
"""A sign is repeated when it is this many times as severe: a steady leak is reported some five times."""

SMALLER = "lower --per_device_train_batch_size and raise --gradient_accumulation_steps by the same factor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    step: int
    seconds: float
    """Seconds since the process began to train, by a monotonic clock."""
    device: MemoryReading | None = None
    """The reading after the step; None if it cannot be measured."""
    total_bytes: int | None = None
    """The GPU's memory."""
    rows: int | None = None
    tokens: int | None = None
    """Tokens per row, with padding, of the longest batch since the previous log. That batch has ``rows`` rows."""
    tokens_per_second: float | None = None
    """Tokens per second, with padding, since the previous log, excluding evaluation and saving."""
    host_available_bytes: int | None = None
    host_total_bytes: int | None = None

    @property
    def slack(self) -> float | None:
        """The share of peak reserved bytes that held nothing; None if it cannot be measured."""
        if self.device is None or not self.device.peak_reserved_bytes:
            return None
        return (self.device.peak_reserved_bytes - self.device.peak_allocated_bytes) / self.device.peak_reserved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """Describes one problem of a run.

    >>> from autotrain_mem import Sign
    >>> Sign(kind="full", step=7, seen="The card is full.", advice="Lower the batch.", severity=2).message
    'The card is full. Lower the batch.'
    """

    kind: Kind
    step: int
    seen: str
    """The observation, with numbers, in one sentence."""
    advice: str
    """The fix, with exact flags, in one sentence."""
    severity: float
    """Comparable only between signs of the same kind; higher is worse."""

    @property
    def message(self) -> str:
        return f"{self.seen} {self.advice}"


class SignDetector:
    """Takes one sample per log, and keeps the last ``WINDOW`` of them. ``grows``: whether the allocator already has
    expandable segments; if not, they are advised."""

    def __init__(self, grows: bool = False) -> None:
        self._grows = grows
        self._samples: deque[Sample] = deque(maxlen=WINDOW)
        self._leaks_from: float | None = None
        self._said: dict[Kind, float] = {}

    def see(self, sample: Sample) -> tuple[Sign, ...]:
        """Adds a sample; returns the signs to report now."""
        self._samples.append(sample)
        news = []
        for sign in (self._retries(), self._leak(), self._host()):
            if sign is not None and sign.severity >= AGAIN * self._said.get(sign.kind, 0.0):
                self._said[sign.kind] = sign.severity
                news.append(sign)
        return tuple(news)

    def _retries(self) -> Sign | None:
        """Detects fragmentation if much of the reserved memory holds nothing; else a full GPU."""
        sample, latest = self._samples[-1], [*self._samples][-1 - IN_A_ROW :]
        lately = [each.device.num_alloc_retries for each in latest if each.device is not None]
        if sample.device is None or sample.slack is None or len(lately) < 2 or lately[-1] <= lately[-2]:
            return None
        kind: Kind = "fragmentation" if sample.slack >= SLACK else "full"
        if kind == "full" and (len(lately) <= IN_A_ROW or any(map(operator.ge, lately, lately[1:]))):
            return None
        seen = f"The allocator had to release its cache {counted(lately[-1], 'time')}"
        reserved = format_bytes(sample.device.peak_reserved_bytes)
        if kind == "full":
            seen += f", with {reserved} reserved and hardly any of it free. Each release stalls the GPU."
            advice = f"To free memory, {SMALLER}."
        else:
            seen += f", while {sample.slack:.0%} of the {reserved} reserved held nothing at the peak."
            advice = f"{SMALLER[0].upper()}{SMALLER[1:]}."
            if not self._grows:
                advice = f"Set {variable_that_counts(os.environ)}=expandable_segments:True; or {SMALLER}."
        return Sign(kind=kind, step=sample.step, seen=seen, advice=advice, severity=float(lately[-1]))

    def _leak(self) -> Sign | None:
        """Detects that the memory held after each step keeps growing, although the rows do not grow longer."""
        devices = [sample.device for sample in self._samples if sample.device is not None]
        if len(devices) < WINDOW:
            return None
        climb = climb_of([device.allocated_bytes for device in devices])
        tokens = [sample.tokens for sample in self._samples if sample.tokens is not None]
        if climb is None or climb.rise < LEAST_CLIMB * climb.start or (len(tokens) == WINDOW and floors_rise(tokens)):
            return None
        if self._leaks_from is None:
            self._leaks_from = climb.start
        first, sample, left = self._samples[0], self._samples[-1], ""
        if sample.total_bytes is not None:
            per_step = climb.rise / (CLIMBED * (sample.step - first.step))
            steps = max(0, sample.total_bytes - devices[-1].peak_allocated_bytes) / per_step
            left = f"; at this rate the GPU runs out of memory in about {float(f'{steps:.1e}'):,.0f} steps"
        return Sign(
            kind="leak",
            step=sample.step,
            seen=f"Memory held after a step rose from {format_bytes(int(climb.start))} to "
            f"{format_bytes(int(climb.end))} within {sample.step - first.step} steps, though the rows did "
            f"not grow longer{left}.",
            advice="Some code keeps tensors: accumulate losses and metrics with .item() or .detach(), clear lists of "
            "outputs and growing caches, and check your compute_loss, reward functions and callbacks.",
            severity=climb.end - self._leaks_from,
        )

    def _host(self) -> Sign | None:
        sample = self._samples[-1]
        available, total = sample.host_available_bytes, sample.host_total_bytes
        if available is None or not total:
            return None
        left = [each.host_available_bytes for each in self._samples if each.host_available_bytes is not None]
        climb = climb_of([-size_bytes for size_bytes in left]) if len(left) == WINDOW else None
        seconds = None
        if climb is not None and climb.rise >= LEAST_CLIMB * total:
            seconds = available * CLIMBED * (sample.seconds - self._samples[0].seconds) / climb.rise
        if available > HOST_LEFT * total and (seconds is None or seconds > HOST_SECONDS):
            return None
        pace = ""
        if seconds is not None:
            span = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{max(1, round(seconds / 60))} minutes"
            pace = f"; at this rate it runs out in about {span}"
        return Sign(
            kind="host",
            step=sample.step,
            seen=f"Host memory is running out: {format_bytes(available)} of {format_bytes(total)} is left{pace}.",
            advice="Lower --dataloader_num_workers, leave --dataloader_persistent_workers off, set "
            "--dataloader_pin_memory False, and avoid features that keep GPU tensors on the host "
            "(--activation_offloading, an optimizer on the host).",
            severity=total / max(1, available),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Climb:
    start: float
    end: float

    @property
    def rise(self) -> float:
        return self.end - self.start


def climb_of(values: Sequence[float]) -> Climb | None:
    """Returns the steady rise of ``WINDOW`` noisy values; None if there is none.

    The minima of all quarters must rise: a long row or a cache does not raise a minimum. The last rise must not be much
    smaller than the others (a warm-up slows down), and the total must exceed the spread of a quarter.
    """
    if not floors_rise(values):
        return None
    quarters = _quarters(values)
    start, third, end = min(quarters[0]), min(quarters[2]), min(quarters[3])
    rise = end - start
    apart = statistics.median(sorted(quarter)[-1 - SPIKES] - min(quarter) for quarter in quarters)
    slows_down = end - third < rise / 4  # each of three equal rises is rise / 3
    return None if slows_down or rise < STEEP * apart else Climb(start=start, end=end)


def floors_rise(values: Sequence[float]) -> bool:
    """Returns whether the minima of the quarters rise."""
    return all(before < after for before, after in itertools.pairwise(map(min, _quarters(values))))


def _quarters(values: Sequence[float]) -> list[Sequence[float]]:
    return [values[start : start + QUARTER] for start in range(0, WINDOW, QUARTER)]
