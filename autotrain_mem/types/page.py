"""Holds the content of the HTML report: figures and tables, without their styles."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from autotrain_mem.support.codec import Form
from autotrain_mem.types.data import DataProfile
from autotrain_mem.types.experience import RunHistory
from autotrain_mem.types.planned import Plan
from autotrain_mem.types.report import Report
from autotrain_mem.types.trace import Owner
from autotrain_mem.types.work import Phase


class Holder(NamedTuple):
    """Holds the bytes of one module and owner at one moment; its JSON is a list."""

    module: int
    """Index into ``Timeline.modules``."""
    owner: int
    """Index into ``Timeline.owners``."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Holds the memory of one rehearsed process, event by event, thinned to the pixels of a screen.

    Each stretch of events that shares a pixel keeps its lowest and its highest moment, so no peak is lost. All columns
    are equally long; ``sum(each[i] for each in owners.values())`` is allocated at point ``i``.
    """

    name: str
    """``rehearsed step``, with its rank if there are several."""
    events: int
    """Number of events before thinning."""
    event: tuple[int, ...]
    """Index of the event after which each point was taken, ascending."""
    owners: Mapping[Owner, tuple[int, ...]]
    """Allocated bytes of each owner at each point, the lowest of the stack first."""
    reserved_bytes: tuple[int, ...]
    modules: tuple[str, ...]
    holders: tuple[tuple[Holder, ...], ...]
    """At each point the largest holders, largest first, at most five."""
    phases: tuple[tuple[Phase, int], ...]
    """Phase and the index of its first event, in order; a phase may occur several times."""
    peak: int
    """Index of the point with the most allocated bytes."""
    budget_bytes: int
    """The budget minus the memory outside torch's allocator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Holds a table, or a figure and a table with the same content."""

    key: str
    """Used in links and file names: ``loss``."""
    title: str
    note: str
    """A sentence above a table, or below a figure; empty for none."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    """Right-aligned columns, of numbers."""
    strong: tuple[int, ...] = ()
    """Highlighted rows, which show what was chosen."""
    figure: Mapping[str, Any] | None = None
    """The figure as ``report/page/static/page.js`` draws it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Holds the report of a plan or of a run. All texts are plain: the template escapes them."""

    json_form: ClassVar = Form(schema="autofit.page/2")

    title: str
    """``Qwen/Qwen2.5-0.5B, sft, on rtx3060``."""
    verdict: str
    """``fits rtx3060 with 3 changes: needs 10.8 GiB of 11.2 GiB``."""
    fits: bool
    command: str
    """The command that makes the plan, or repeats the run."""
    made: str
    """Time of the plan or the run in ISO 8601; empty if unknown."""
    versions: Mapping[str, str]
    how_to_read: tuple[str, ...]
    """Three sentences."""
    key_figures: tuple[tuple[str, str, str], ...]
    """Name, value and a note: ``peak reserved``, ``10.8 GiB``, ``of 11.2 GiB``."""
    sections: tuple[Section, ...]
    not_shown: tuple[str, ...] = ()
    """A sentence for each missing part, with what would add it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """Holds a plan and everything known besides it."""

    plan: Plan
    command: str
    """The command that makes it again."""
    made: str = ""
    timeline: Timeline | None = None
    report: Report | None = None
    """The report of the run that trained with it; None until the run has ended."""
    history: RunHistory | None = None
    profile: DataProfile | None = None
    """Number of rows of each length; None if not stored."""
    not_shown: tuple[str, ...] = ()
