"""A page holds what the HTML report shows: figures and tables in which everything is decided but how it looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotrain_mem.support.codec import Form
from autotrain_mem.types.data import DataProfile
from autotrain_mem.types.experience import RunHistory
from autotrain_mem.types.hardware import Hardware, Price
from autotrain_mem.types.planned import Plan
from autotrain_mem.types.report import Report
from autotrain_mem.types.trace import Owner
from autotrain_mem.types.work import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Says what one module holds for one owner at one moment; its JSON is a list of its values."""

    json_form: ClassVar = Form(is_row=True)

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
    """``rehearsed step``, or ``rank 0`` where several processes share the work."""
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
class Series:
    """Holds one line of a figure over the time of a run."""

    name: str
    values: tuple[float | None, ...]
    """One for each moment of its figure; None where nothing was measured then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Marks a moment of a run at which something happened: an incident of the guard, a restart, a checkpoint."""

    seconds: float
    step: int
    kind: str
    """``out of memory``, ``restart``, ``checkpoint``, ``warning``."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Holds a figure with lines over a common axis."""

    key: str
    """Names the figure in links and in file names: ``loss``."""
    title: str
    x_title: str
    y_title: str
    unit: str
    """Of the values: ``bytes``, ``tokens/s``, or empty for a plain number."""
    x: tuple[float, ...]
    """Ascending."""
    series: tuple[Series, ...]
    limits: Mapping[str, float]
    """Horizontal lines by name: ``budget``."""
    marks: tuple[Mark, ...] = ()
    """On the x axis, by ``seconds``; only where that is seconds."""
    verticals: Mapping[str, float] | None = None
    """Vertical lines by name, such as the chosen ``max_length`` over lengths."""
    steps: bool = False
    """Whether a value holds until the next, as of a distribution, in place of a straight line between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Holds a figure with a group of bars for each row: predicted beside probe and run, phase by phase."""

    key: str
    title: str
    unit: str
    rows: tuple[str, ...]
    series: tuple[Series, ...]
    limits: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Holds a table of text."""

    key: str
    title: str
    note: str
    """A sentence above it; empty for none."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    """Columns with numbers, which stand at the right."""
    strong: tuple[int, ...] = ()
    """Rows that stand out: what was chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Holds a whole report of a plan, or of a run, for ``report.page``.

    Figures and tables come in this order: timelines, then ``charts`` and ``bars``, then ``grids``; what is not known is
    not there. All texts are plain: what shows them escapes them.
    """

    json_form: ClassVar = Form(schema="autofit.page/1")

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
    timelines: tuple[Timeline, ...]
    charts: tuple[Chart, ...]
    bars: tuple[Bars, ...]
    grids: tuple[Grid, ...]
    not_shown: tuple[str, ...] = ()
    """What is missing on this page, each in a sentence with what would add it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardOffer:
    """Says whether one known card holds a plan's settings, and what it is rented for."""

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
    timelines: tuple[Timeline, ...] = ()
    report: Report | None = None
    """Of the run that trained with it, once it has ended."""
    history: RunHistory | None = None
    profile: DataProfile | None = None
    """How many rows there are of each length; None where that was not kept."""
    cards: tuple[CardOffer, ...] = ()
    not_shown: tuple[str, ...] = ()
