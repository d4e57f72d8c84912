"""Defines the content of the HTML report: figures and tables, without styles."""

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
    """Holds the bytes of one module and owner at one moment. Its JSON is a list."""

    module: int
    """The module's index in ``Timeline.modules``."""
    owner: int
    """The owner's index in ``Timeline.owners``."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Holds the allocated memory of one rehearsed process over time, at about one point per pixel of a screen.

    Of the events that fall on one pixel, the lowest and the highest point are kept, so no peak is lost. All columns are
    equally long. At point ``i``, ``sum(each[i] for each in owners.values())`` bytes are allocated.
    """

    name: str
    """The title: ``rehearsed step``, with the rank if there are several processes."""
    events: int
    """The number of allocations and frees, of which the points are a selection."""
    event: tuple[int, ...]
    """For each point, the index of the event after which it was taken, ascending."""
    owners: Mapping[Owner, tuple[int, ...]]
    """The allocated bytes of each owner at each point. The first owner is drawn at the bottom of the stack."""
    reserved_bytes: tuple[int, ...]
    modules: tuple[str, ...]
    """The module names to which :class:`Holder` refers."""
    holders: tuple[tuple[Holder, ...], ...]
    """For each point, at most five of the largest holders, largest first."""
    phases: tuple[tuple[Phase, int], ...]
    """Each phase with the index of its first event, in order. A phase can occur several times."""
    peak: int
    """The index of the point with the most allocated bytes."""
    budget_bytes: int
    """The bytes that torch's allocator may reserve: the budget minus the memory outside the allocator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Holds a table, or a figure and a table with the same content."""

    key: str
    """The name in links and file names, such as ``loss``."""
    title: str
    note: str
    """The sentence above a table or below a figure; empty if there is none."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    """The indices of columns with numbers, which are right-aligned."""
    strong: tuple[int, ...] = ()
    """The indices of highlighted rows, which show the choice."""
    figure: Mapping[str, Any] | None = None
    """The figure's data, which ``report/page/static/page.js`` draws; None for a table alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Holds the report of a plan or of a run. All texts are plain: the template escapes them."""

    json_form: ClassVar = Form(schema="autofit.page/3")

    title: str
    """The heading, such as ``Qwen/Qwen2.5-0.5B, sft, on rtx3060``."""
    verdict: str
    """The result: ``fits rtx3060 with 3 changes: needs 10.8 GiB of 11.2 GiB``, or what came of the run."""
    assessment: tuple[str, ...] = ()
    """At most three sentences on a run: what went wrong, why, and what to do next."""
    is_good: bool
    """Whether the plan fits, or the run has finished with usable weights."""
    command: str
    """The command that makes the plan or repeats the run."""
    made: str
    """The time of the plan or the run, in ISO 8601; empty if unknown."""
    versions: Mapping[str, str]
    how_to_read: tuple[str, ...]
    """Three sentences that explain the page."""
    key_figures: tuple[tuple[str, str, str], ...]
    """The name, value and note of each figure: ``peak reserved``, ``10.8 GiB``, ``of 11.2 GiB``."""
    sections: tuple[Section, ...]
    not_shown: tuple[str, ...] = ()
    """A sentence on each missing part, which tells how to add it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """Holds a plan and everything else from which its report is made."""

    plan: Plan
    command: str
    """The command that makes the plan again."""
    made: str = ""
    timeline: Timeline | None = None
    report: Report | None = None
    """The report of the run that trained with the plan; None until the run has ended."""
    history: RunHistory | None = None
    profile: DataProfile | None = None
    """The lengths of the data's rows; None if they are not stored."""
    not_shown: tuple[str, ...] = ()
