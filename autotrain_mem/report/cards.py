"""One job on many cards, as a table."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.status import Status
from rich.text import Text

from autotrain_mem.report import wording
from autotrain_mem.report.layout import GOOD, QUIET, Block, add, table
from autotrain_mem.spec import Attempt, Hardware
from autotrain_mem.spec.cards import Cards, CardVerdict
from autotrain_mem.units import format_bytes

SMALLEST = "<- the smallest that changes nothing but speed"

_NOTE = """\
Batch is rows at once x accumulation, * without gradient checkpointing. Speeds are predicted, and rank cards better than
they tell seconds; - is not known. autofit plan ... --gpu NAME tells the rest, and rehearses the whole model."""


class CardsProgress:
    """A line on stderr that says which card is being planned for; nothing where nobody watches a terminal."""

    def __init__(self, console: Console, count: int) -> None:
        self._count = count
        self._seen: dict[str, int] = {}
        self._status: Status | None = console.status("") if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def tried(self, card: Hardware, attempt: Attempt) -> None:
        """A configuration was judged for a card."""
        number = self._seen.setdefault(card.name, len(self._seen) + 1)
        if self._status is not None:
            self._status.update(f"card {number} of {self._count}: {card.name}, {wording.batch(attempt.knobs)}")


def cards_view(cards: Cards) -> RenderableType:
    """A line for each card, smallest first."""
    made = table("card", "memory", "level", "batch", "length", "needs", "tokens/s", "", right=(1, 4, 5, 6))
    smallest = cards.smallest_lossless
    for verdict in cards.verdicts:
        add(made, *_cells(verdict), Text(SMALLEST if verdict is smallest else "", style=GOOD))
    return Block(Group(made, Text(), Text(_NOTE, style=QUIET)))


def _cells(verdict: CardVerdict) -> tuple[str, ...]:
    card, estimate = verdict.hardware, verdict.estimate
    memory = format_bytes(card.total_bytes)
    if estimate is None:
        return card.name, memory, verdict.refusal, "", "", "", ""
    knobs = estimate.knobs
    batch = f"{wording.batch(knobs)}{'' if knobs.gradient_checkpointing else ' *'}"
    length = str(knobs.completion_length or knobs.max_length or "-")
    speed = "-" if estimate.time.assumed else f"{estimate.tokens_per_second:,.0f}"
    return card.name, memory, verdict.level, batch, length, format_bytes(estimate.required_bytes), speed
