"""Follows the heartbeats of each rank of a run, and names the rank that the others wait for.

One stopped rank stops all, since ranks wait for each other at every collective."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PULSE_SECONDS = 1.0
"""Seconds between two heartbeats of a rank. Each takes about 50 us of an otherwise sleeping thread."""

MUTE_SECONDS = 120.0
"""If a rank sends no heartbeat for this long while others do, it counts as stopped. The sending thread needs the GIL
for microseconds; transformers and TRL never hold it for minutes, since they release it to read files or await CUDA."""

SILENT_SECONDS = 1800.0
"""The default of ``--ddp_timeout`` (``transformers/training_args.py: ddp_timeout``, and
``torch/distributed/constants.py: default_pg_timeout``). After this time, torch aborts the collective."""

ASLEEP_SECONDS = 10.0
"""If this process itself was suspended for this long, all waits start over: heartbeats may be waiting unread."""


@dataclass(slots=True)
class _Rank:
    heard_at: float
    """The time of the last message, by this process's clock."""
    has_pulse: bool = False
    moves: int = 0
    place: str = ""


class Pulses:
    """Records when each rank of a run last sent something, and when any rank last made progress. ``silent_seconds``:
    the time without any progress after which the run counts as hung (``--ddp_timeout``)."""

    def __init__(self, ranks: int, silent_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silent_seconds, self._clock = silent_seconds, clock
        self._mute_seconds = min(MUTE_SECONDS, silent_seconds)
        now = clock()
        self._ranks = [_Rank(heard_at=now) for _ in range(ranks)]
        self._moved_at = self._looked_at = now

    def see(self, rank: int, message: Mapping[str, Any]) -> None:
        """Handles a rank's message; any message shows that the process is alive."""
        now, this = self._clock(), self._ranks[rank]
        this.heard_at = now
        if message.get("event") != "pulse":
            self._moved_at = now
            return
        # A single process that moves on in the code works, even where no callback counts it (DPO precomputes scores).
        has_moved = len(self._ranks) == 1 and message["place"] != this.place
        self._moved_at = now if has_moved or message["moves"] != this.moves else self._moved_at
        this.has_pulse, this.moves, this.place = True, message["moves"], message["place"]

    def overdue(self) -> tuple[int, str] | None:
        """Returns the rank that the others wait for, and the evidence; None if nothing hangs."""
        now = self._clock()
        slept, self._looked_at = now - self._looked_at > ASLEEP_SECONDS, now
        if slept:
            self._moved_at = now
            for each in self._ranks:
                each.heard_at = now
        mute = self.mute(self._mute_seconds)
        if mute and len(mute) < len(self._ranks):  # if all are silent, the machine is the cause
            rank = min(mute)
            return rank, f"its process has given no sign of life for {now - self._ranks[rank].heard_at:.0f} s"
        if any(rank.moves for rank in self._ranks) and now - self._moved_at >= self._silent_seconds:
            rank, why = self.behind() or (0, f"it is {self._ranks[0].place}")
            return rank, f"no progress on any rank for {now - self._moved_at:.0f} s, and {why}"
        return None

    def behind(self) -> tuple[int, str] | None:
        """Returns the rank that has made the least progress, or is elsewhere in the code, and the evidence; None if
        there is no such rank."""
        numbers, places = Counter(rank.moves for rank in self._ranks), Counter(rank.place for rank in self._ranks)
        least, most = min(numbers), max(numbers)
        if least < most:
            rank = next(number for number, each in enumerate(self._ranks) if each.moves == least)
            return rank, f"its progress count is {most - least} behind, and it is {self._ranks[rank].place}"
        (common, _), *_ = places.most_common()
        odd = next((number for number, each in enumerate(self._ranks) if each.place != common), None)
        return None if odd is None else (odd, f"it is {self._ranks[odd].place}, while others are {common}")

    def mute(self, seconds: float) -> set[int]:
        """Returns the ranks that have sent nothing for this many seconds."""
        now = self._clock()
        return {number for number, rank in enumerate(self._ranks) if rank.has_pulse and now - rank.heard_at >= seconds}
