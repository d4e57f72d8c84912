"""Makes the consoles that everything is printed to, and the lines on them that live while something takes long."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.run_history import event_line
from autotrain_mem.settings.words import CHECKPOINTING
from autotrain_mem.support.processes import LossyStream
from autotrain_mem.support.units import counted, duration, format_bytes, printable
from autotrain_mem.types import Candidate, Counting, Hardware, Knobs
from autotrain_mem.types.gpu_comparison import Axis, SweepPoint
from autotrain_mem.types.report import REWARD_NAMES

UNWRAPPED_COLUMNS = 4000
"""Where no terminal shows it, a line is not wrapped: a name cut in two cannot be searched for in a log."""


class Console(rich.console.Console):
    """Prints text as it is: a name may hold square brackets, and what would steer a terminal is spelled out.

    rich itself lets escape sequences through (``rich/control.py: STRIP_CONTROL_CODES``). All text of a view comes by
    ``render``, before it is measured and wrapped.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and (shown := printable(renderable.plain)) != renderable.plain:
            renderable = renderable.blank_copy(shown)
        return super().render(renderable, options)


def whole_lines(*, stderr: bool = False) -> Console:
    """Make a console that wraps at the terminal's width, and nowhere where there is none."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=UNWRAPPED_COLUMNS)


def lasting_console(*, stderr: bool = False) -> Console:
    """A console for what is told while a training runs: a closed terminal, a full disk and ``| head`` end nothing."""
    return Console(file=LossyStream(sys.stderr if stderr else sys.stdout))


SMOOTHING = 0.8
"""Weight of the past in the shown loss: about the mean of the last five logs, so that single batches do not flicker."""

PLAIN_LINES = 10
"""Lines that a whole run prints where there is no terminal."""


def is_live(console: Console) -> bool:
    """Whether a line can be redrawn in place."""
    return console.is_terminal and not console.is_dumb_terminal


class TrainingProgress:
    """A bar over the optimizer steps, with loss, peak memory and time left. Entered before the run, left after it.

    Args:
        console: Where to print; stderr keeps stdout free for results.
        budget_bytes: What the peak is shown against.
        pages: Gets the paths of reports that were written; None to say them as they come.
    """

    def __init__(self, console: Console, *, budget_bytes: int, pages: list[str] | None = None) -> None:
        self._console = console
        self._budget_bytes = budget_bytes
        self._pages = pages
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            console=console,
            expand=True,
            refresh_per_second=4,
            disable=not is_live(console),
        )
        self._task = self._bar.add_task("", total=0)
        self._started = time.monotonic()
        self._logged: dict[str, float | None] = {}
        self._total_steps = 0
        self._loss: float | None = None
        self._reward: float | None = None
        self._peak_bytes: int | None = None
        self._first: tuple[int, float] | None = None
        self._tenths_said = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._bar.stop()

    def on_event(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "start":
                self._started = time.monotonic()
                self.start(event["total_steps"])
            case "log":
                reward = next((event["logs"][name] for name in REWARD_NAMES if name in event["logs"]), None)
                found = {"loss": event["logs"].get("loss"), "reward": reward}
                self._logged |= {name: value for name, value in found.items() if value is not None}
            case "step":
                seconds = time.monotonic() - self._started
                peak = None if event["memory"] is None else event["memory"]["peak_reserved_bytes"]
                self.advance(event["step"], self._logged.get("loss"), peak, seconds, self._logged.get("reward"))
                self._logged = {}
            case "interrupted":
                self._console.print("Interrupted: training ends after this step; Ctrl-C again ends it now.")
            case "report" if self._pages is not None:
                self._pages.append(event["path"])
            case "moved_aside":
                say(self._console, f"The run that was there is now in {event['path']}.")
            case _:
                if line := event_line(event):
                    say(self._console, line)

    def start(self, total_steps: int) -> None:
        """Training begins; draws the bar where there is a terminal. A process that goes on draws none of its own."""
        self._first = None
        if self._total_steps == total_steps:
            return
        self._total_steps = total_steps
        if self._bar.disable:
            say(self._console, f"training {counted(total_steps, 'step')}")
        self._bar.update(self._task, total=total_steps)
        self._bar.start()

    def advance(
        self, step: int, loss: float | None, allocated_bytes: int | None, seconds: float, reward: float | None = None
    ) -> None:
        """Optimizer step number ``step`` is done, counted from the run's beginning, also after a resume.

        Args:
            loss, reward: None when this step logged none.
            allocated_bytes: Now or at most so far; the largest one is shown. None where nothing measures it.
            seconds: Since training began.
        """
        if loss is not None:
            self._loss = loss if self._loss is None else SMOOTHING * self._loss + (1 - SMOOTHING) * loss
        if allocated_bytes is not None:
            self._peak_bytes = max(allocated_bytes, self._peak_bytes or 0)
        self._reward = self._reward if reward is None else reward
        if self._first is None:
            self._first = (step, seconds)
        parts = [] if self._loss is None else [f"loss {self._loss:#.4g}"]
        parts += [] if self._reward is None else [f"reward {self._reward:#.4g}"]
        if self._peak_bytes is not None:
            parts.append(f"peak {formatting.of_budget(self._peak_bytes, self._budget_bytes)}")
        # The first step seen warms up kernels and allocator, and so is left out of the pace.
        first_step, first_seconds = self._first
        if first_step < step < self._total_steps:
            left = (seconds - first_seconds) / (step - first_step) * (self._total_steps - step)
            parts.append(f"{duration(left)} left")
        facts = "  ".join(parts)
        self._bar.update(self._task, completed=step, description=facts)
        tenths = PLAIN_LINES * step // max(1, self._total_steps)
        if self._bar.disable and tenths > self._tenths_said:  # at the first step, and when another tenth is done
            self._tenths_said = tenths
            say(self._console, f"step {step}/{self._total_steps}  {facts}".rstrip())


class LiveLine:
    """One line that a terminal redraws in place, with the seconds that it has taken; nothing where none watches."""

    def __init__(self, console: Console, text: str = "") -> None:
        # A line that wraps flickers when it is redrawn.
        cut = Column(no_wrap=True, overflow="crop", ratio=1)
        column = TextColumn("{task.description}", markup=False, table_column=cut)
        spinner = SpinnerColumn("line" if console.options.ascii_only else "dots")
        columns = (spinner, column, TimeElapsedColumn())
        self.console = console
        self.line = Progress(*columns, console=console, transient=True, expand=True, disable=not is_live(console))
        self._task = self.line.add_task(text)

    def __enter__(self) -> Self:
        self.line.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.line.stop()

    def show(self, text: str) -> None:
        """Shows another text, which is cut where the terminal ends."""
        self.line.update(self._task, description=text)

    def counting(self, counting: Counting) -> None:
        """The tokens of the data are being counted."""
        doing = f"{counting.doing[:1].lower()}{counting.doing[1:]}"
        self.show(f"counting tokens: {counting.done:,} of {counted(counting.rows, 'row')}, {doing}")


class SearchProgress(LiveLine):
    """Shows what was rehearsed last; a line for each where there is no terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "rehearsing")
        self._first: Knobs | None = None
        self._tried = 0
        self._copies = False

    def tried(self, attempt: Candidate) -> None:
        self._tried += 1
        self._first = self._first or attempt.knobs
        self._copies |= attempt.rehearsed_layers is not None
        whole = ", whole model" if self._copies and attempt.rehearsed_layers is None else ""
        changed = formatting.difference(attempt.knobs, self._first)
        checkpointing = formatting.settings(attempt.knobs, [CHECKPOINTING])
        settings = f"micro-batch {attempt.knobs.per_device_train_batch_size}, {checkpointing}, {changed}{whole}"
        outcome = f"needs {format_bytes(attempt.required_bytes)}, {'fits' if attempt.fits else 'does not fit'}"
        self.show(f"rehearsing, {self._tried} tried: {outcome}: {settings}")
        if self.line.disable:
            say(self.console, f"rehearsing: {settings} ... {outcome}")


class CardsProgress(LiveLine):
    """Shows which card is being planned for; a line for each card where there is no terminal."""

    def __init__(self, console: Console, count: int) -> None:
        super().__init__(console)
        self._count = count
        self._seen: list[str] = []

    def tried(self, card: Hardware, attempt: Candidate) -> None:
        name = formatting.cards(card)
        if is_new := name not in self._seen:
            self._seen.append(name)
        line = f"card {self._seen.index(name) + 1} of {self._count}: {name}"
        self.show(f"{line}, {formatting.batch(attempt.knobs)}")
        if self.line.disable and is_new:
            say(self.console, line)


class SweepProgress(LiveLine):
    """Counts the points, on a terminal only: the table that follows says everything again."""

    def __init__(self, console: Console, axes: Sequence[Axis]) -> None:
        super().__init__(console, "rehearsing")
        self._axes = axes
        self._count = math.prod(len(axis.settings) for axis in axes)
        self._done = 0

    def done(self, point: SweepPoint) -> None:
        """One point has its figures, or its refusal."""
        self._done += 1
        settings = (f"{axis.name} {each.text}" for axis, each in zip(self._axes, point.settings, strict=True))
        needs = "refused" if point.estimate is None else f"needs {format_bytes(point.estimate.required_bytes)}"
        self.show(f"rehearsing, {self._done} of {self._count}: {needs}: {', '.join(settings)}")


@contextlib.contextmanager
def waiting(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is being done; yields what takes the next thing that is being done."""
    with LiveLine(console, what) as line:
        yield line.show


def say(console: Console, line: str) -> None:
    """Print a line whole: one that is wrapped at 80 columns cannot be searched for in a log."""
    console.print(Text(line), soft_wrap=True)


def warn(message: str) -> None:
    """Something that the user should know, and that stops nothing."""
    Console(stderr=True).print(f"note: {message}", style="dim", highlight=False)
