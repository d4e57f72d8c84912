"""A page holds what the HTML report shows: figures and tables in which everything is decided but how it looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from autotrain_mem.support.codec import Form
from autotrain_mem.types.data import DataProfile
from autotrain_mem.types.experience import RunHistory
from autotrain_mem.types.hardware import Hardware, Price
from autotrain_mem.types.planned import Plan
from autotrain_mem.types.report import Report
from autotrain_mem.types.trace import Owner
from autotrain_mem.types.work import Phase


class Holder(NamedTuple):
    """Describes what one module holds for one owner at one moment; its JSON is a list of its values."""

    module: int
    """Index into ``Timeline.modules``."""
    owner: int
    """Index into the owners of the timeline, in their order."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Holds the memory of one rehearsed process, event by event, thinned to what a screen can show.

    Of every stretch of events that becomes one place on the screen the lowest and the highest moment are kept, in their
    order, so that no peak is lost. All columns are equally long; ``sum(each[i] for each in owners.values())`` is what
    is allocated at point ``i``.
    """

    name: str
    """``rehearsed step``, or which rank's where several processes share the work."""
    events: int
    """How many events the rehearsal has, before it was thinned."""
    event: tuple[int, ...]
    """Index of the event behind which each point is, ascending."""
    owners: Mapping[Owner, tuple[int, ...]]
    """Allocated bytes of each owner at each point, in the order in which they are stacked from below."""
    reserved_bytes: tuple[int, ...]
    modules: tuple[str, ...]
    holders: tuple[tuple[Holder, ...], ...]
    """At each point what modules hold most, each for one owner, largest first; at most five."""
    phases: tuple[tuple[Phase, int], ...]
    """Phase, and the index of its first event, in their order; a phase may come again."""
    peak: int
    """Index of the point with the most allocated bytes."""
    budget_bytes: int
    """What the run may take of the device, less what lies outside torch's allocator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Holds a table of text; or a figure, and the table that says the same."""

    key: str
    """Names it in links and in file names: ``loss``."""
    title: str
    note: str
    """A sentence above a table, or below a figure; empty for none."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    """Columns with numbers, which stand at the right."""
    strong: tuple[int, ...] = ()
    """Rows that stand out: what was chosen."""
    figure: Mapping[str, Any] | None = None
    """``kind``, and what the script of that name in ``report/page/static`` draws."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Holds a whole report of a plan, or of a run, for ``report.page``.

    Figures come first; what is not known is not there. All texts are plain: what shows them escapes them.
    """

    json_form: ClassVar = Form(schema="autofit.page/2")

    title: str
    """``Qwen/Qwen2.5-0.5B, sft, on rtx3060``."""
    verdict: str
    """``fits rtx3060 with 3 changes: needs 10.8 GiB of 11.2 GiB``."""
    fits: bool
    command: str
    """By which the plan, or the run, can be made again."""
    made: str
    """When the plan or the run was made, in ISO 8601; empty where no file says."""
    versions: Mapping[str, str]
    how_to_read: tuple[str, ...]
    """Three sentences."""
    key_figures: tuple[tuple[str, str, str], ...]
    """Name, value and a note: ``peak reserved``, ``10.8 GiB``, ``of 11.2 GiB``."""
    sections: tuple[Section, ...]
    not_shown: tuple[str, ...] = ()
    """What is missing on this page, each in a sentence with what would add it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardOffer:
    """Returns whether one known card holds a plan's settings, and what it is rented for."""

    hardware: Hardware
    required_bytes: int
    budget_bytes: int
    price: Price | None

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.budget_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """Holds a plan and whatever is known beside it."""

    plan: Plan
    command: str
    """By which it can be made again."""
    made: str = ""
    timeline: Timeline | None = None
    report: Report | None = None
    """Of the run that trained with it, once it has ended."""
    history: RunHistory | None = None
    profile: DataProfile | None = None
    """How many rows there are of each length; None where that was not kept."""
    cards: tuple[CardOffer, ...] = ()
    not_shown: tuple[str, ...] = ()
