"""Makes the consoles for all output, and their progress lines."""

import sys
import threading
import time
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.run_history import event_line
from autotrain_mem.support.processes import LossyStream
from autotrain_mem.support.units import counted, duration, format_bytes, printable
from autotrain_mem.types import REWARD_NAMES, Candidate, Counting, Hardware, Job, Knobs

UNWRAPPED_COLUMNS = 4000
"""The width without a terminal: lines are not wrapped, since a name cut in two cannot be searched for in a log."""


class Console(rich.console.Console):
    """Prints text as it is, square brackets included, but writes control characters as escapes.

    rich itself lets escape sequences through (``rich/control.py: STRIP_CONTROL_CODES``). All text of a view passes
    ``render`` before it is measured and wrapped.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)
        if self.is_jupyter:
            self.width = 80  # a cell scrolls wider lines; rich assumes 115 columns

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and (shown := printable(renderable.plain)) != renderable.plain:
            renderable = renderable.blank_copy(shown)
        return super().render(renderable, options)


def whole_lines(*, stderr: bool = False) -> Console:
    """Makes a console that wraps at the terminal's width, and does not wrap without a terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=UNWRAPPED_COLUMNS)


def lasting_console(*, stderr: bool = False) -> Console:
    """Makes a console for a run's output: a closed terminal, a full disk or ``| head`` does not stop the run."""
    return Console(file=LossyStream(sys.stderr if stderr else sys.stdout))


def is_live(console: Console) -> bool:
    """Returns whether a line can be redrawn in place."""
    return console.is_terminal and not console.is_dumb_terminal


REPEAT_SECONDS, NOTEBOOK_SECONDS = 5.0, 1.0
"""Seconds between two lines of the same text without a terminal, and between two updates in a notebook."""


class LiveLine(Progress):
    """Redraws one line with its seconds in place, on a terminal or in a notebook; elsewhere it prints the line every
    :data:`REPEAT_SECONDS`. ``bar``: shown instead of the spinner."""

    def __init__(self, console: Console, text: str = "", bar: ProgressColumn | None = None) -> None:
        cut = Column(no_wrap=True, overflow="crop", ratio=1)  # a line that wraps flickers when it is redrawn
        column = TextColumn("{task.description}", markup=False, table_column=cut)
        spinner = SpinnerColumn("line" if console.options.ascii_only else "dots")
        columns = (bar or spinner, column, TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True, expand=True, disable=not is_live(console))
        self._line = self.add_task(text, total=None)
        self._output: Any = None
        self.show(text)
        self._in_lines = self.disable and not console.is_jupyter
        self._stopped = threading.Event()

    def start(self) -> None:
        """Shows the line."""
        super().start()
        if self.disable and not self.console.quiet:
            threading.Thread(target=self._repeat, daemon=True).start()

    def _repeat(self) -> None:
        while not self._stopped.wait(REPEAT_SECONDS if self._in_lines else NOTEBOOK_SECONDS):
            line = f"{self.tasks[0].description} ({duration(self.tasks[0].elapsed or 0.0)})"
            if not self._in_lines:
                self._display(line)
            elif self.tasks[0].total is None:  # steps are shown as they are done
                say(self.console, line)

    def show(self, text: str) -> None:
        """Shows another text, cropped at the terminal's width."""
        self.update(self._line, description=text)
        self._display(text)

    def _display(self, text: str) -> None:
        if self.console.is_jupyter and not self.console.quiet:
            shown = {"text/plain": printable(text)}
            if self._output is None:
                self._output = import_module("IPython.display").display(shown, raw=True, display_id=True)
            self._output.update(shown, raw=True)

    def stop(self) -> None:
        """Removes the line."""
        self._stopped.set()
        super().stop()
        self.show("")

    def counting(self, counting: Counting) -> None:
        """Shows how many rows are tokenized."""
        doing = f"{counting.doing[:1].lower()}{counting.doing[1:]}"
        self.show(f"counting tokens: {counting.done:,} of {counted(counting.rows, 'row')}, {doing}")


PLAIN_LINES = 10
"""Number of progress lines of a whole run without a terminal."""
_WAITS = {
    "probing": "probing",
    "probe": "preparing the training",
    "died": "the training process ended: looking for how to continue",
    "restart": "starting the training process",
}
"""Event -> what is waited for after it."""


class TrainingProgress(LiveLine):
    """Shows a bar over the optimizer steps, with loss, peak memory and time left, or what is waited for, and its time.
    Without a terminal, it prints some of the steps.

    Args:
        console: Where to print; stderr keeps stdout free for results.
        budget_bytes: What torch may reserve, which is shown beside the peak.
        pages: Collects the paths of written reports; None to print them at once.
    """

    def __init__(self, console: Console, *, budget_bytes: int, pages: list[str] | None = None) -> None:
        super().__init__(console, _WAITS["restart"], BarColumn(bar_width=6))
        self._budget_bytes = budget_bytes
        self._pages = pages
        self._logged: dict[str, float] = {}
        """The last values of ``loss`` and ``reward``, by name."""
        self._total_steps = self._peak_bytes = 0
        self._first: tuple[int, float] | None = None
        self._tenths_said = -1

    def on_event(self, event: Mapping[str, Any]) -> None:
        if line := event_line(event):
            if event["event"] == "report" and self._pages is not None:
                self._pages.append(event["path"])
            else:
                say(self.console, line)
        match event["event"]:
            case "probing" | "probe" | "died" | "restart" as kind:
                self._wait(_WAITS[kind])
            case "start":
                self._first = None
                self.reset(self._line, total=event["total_steps"])
                self.show("waiting for the first step")
                if (total_steps := event["total_steps"]) != self._total_steps:  # else a new process resumes it
                    self._total_steps = total_steps
                    if self._in_lines:
                        say(self.console, f"training {counted(total_steps, 'step')}")
            case "log":
                logs = event["logs"]
                reward = next((logs[name] for name in REWARD_NAMES if name in logs), None)
                found = {"loss": logs.get("loss"), "reward": reward}
                self._logged |= {name: value for name, value in found.items() if value is not None}
            case "step":
                self._advance(event["step"], event["memory"])
            case "interrupted":
                self.console.print("Interrupted: training stops after this step; press Ctrl-C again to stop it now.")
            case "moved_aside":
                say(self.console, f"The earlier run is now in {event['path']}.")

    def _advance(self, step: int, memory: Mapping[str, int] | None) -> None:
        """Shows optimizer step number ``step`` of the run, with the largest reserved memory so far."""
        self._peak_bytes = max(self._peak_bytes, 0 if memory is None else memory["peak_reserved_bytes"])
        parts = [f"step {step}/{self._total_steps}"]
        # The first step warms up kernels and allocator, and so is left out of the pace.
        now = time.monotonic()
        first_step, first_seconds = self._first = self._first or (step, now)
        if first_step < step < self._total_steps:
            left = (now - first_seconds) / (step - first_step) * (self._total_steps - step)
            parts.append(f"{duration(left)} left")
        parts += [f"{name} {value:#.4g}" for name, value in sorted(self._logged.items())]
        if self._peak_bytes:
            parts.append(f"peak {formatting.of_budget(self._peak_bytes, self._budget_bytes)}")
        line = "  ".join(parts)
        self.update(self._line, completed=step)
        self.show(line)
        tenths = PLAIN_LINES * step // max(1, self._total_steps)
        if self._in_lines and tenths > self._tenths_said:  # at the first step, and after each further tenth
            self._tenths_said = tenths
            say(self.console, line)
        if step == self._total_steps:
            self._wait(f"saving after {line}")

    def _wait(self, text: str) -> None:
        """Shows what is waited for, with a bar without end and a clock that starts at 0."""
        self.reset(self._line)
        self.tasks[0].total = None
        self.show(text)


class SearchProgress(LiveLine):
    """Shows the last rehearsal, or prints a line for each."""

    def __init__(self, console: Console, job: Job, defaults: Knobs) -> None:
        super().__init__(console, "planning")
        self._job, self._defaults = job, defaults
        self._asked: Knobs | None = None
        self._tried = 0
        self._has_copies = False

    def tried(self, attempt: Candidate) -> None:
        self._tried += 1
        self._asked = self._asked or formatting.asked_for(self._job, self._defaults, [attempt])
        self._has_copies |= attempt.rehearsed_layers is not None
        changed = formatting.attempt(attempt, self._asked, has_copies=self._has_copies)
        settings = f"micro-batch {attempt.knobs.per_device_train_batch_size}, {changed}"
        outcome = f"needs {format_bytes(attempt.required_bytes)}, {'fits' if attempt.fits else 'does not fit'}"
        last = "" if self._in_lines else f": {outcome}: {settings}"
        self.show(f"rehearsing, {self._tried} tried{last}")
        if self._in_lines:
            say(self.console, f"rehearsing: {settings} ... {outcome}")


class CardsProgress(LiveLine):
    """Shows the card being planned for, or prints a line for each."""

    def __init__(self, console: Console, count: int) -> None:
        super().__init__(console, "planning")
        self._count = count
        self._seen: list[str] = []

    def tried(self, card: Hardware, attempt: Candidate) -> None:
        name = formatting.cards(card)
        if is_new := name not in self._seen:
            self._seen.append(name)
        line = f"card {self._seen.index(name) + 1} of {self._count}: {name}"
        self.show(f"{line}, {formatting.batch(attempt.knobs)}")
        if self._in_lines and is_new:
            say(self.console, line)


def say(console: rich.console.Console, line: str) -> None:
    """Prints a line without wrapping it, so that a log can be searched for its names."""
    console.print(Text(line), soft_wrap=True)


def warn(message: str) -> None:
    """Prints a note on stderr."""
    Console(stderr=True).print(f"note: {message}", style="dim", highlight=False)
