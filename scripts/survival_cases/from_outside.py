"""What comes to a run from outside: a second run in its folder, and the end of the terminal."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Sequence
from dataclasses import replace

from survival_cases.command import Ended, Running, autofit

SECOND = ((), ("--overwrite_output_dir",), ("--resume_from_checkpoint",))
"""What the second run is asked for beside the first one's words, in turn."""


def second_run(
    argv: Sequence[str], place: pathlib.Path, run: str, *, step: int, words: Sequence[str]
) -> tuple[Ended, Ended]:
    """A run, and another in its folder: from some step on while the first one is held, or at 0 both at once.

    Returns the one that trained, and the one that ought to have been refused.
    """
    others: list[Ended] = []

    def intrude(running: Running) -> None:
        is_held = step > 0 and running.reaches(step)
        if is_held:
            running.process.send_signal(signal.SIGSTOP)  # else it may be done before the other has begun
        others.append(autofit([*argv, *words], place, f"{run}-second", {}, folder=place / "runs" / run))
        if is_held:
            running.process.send_signal(signal.SIGCONT)

    first = autofit(argv, place, run, {}, meanwhile=intrude)
    (second,) = others
    return (second, first) if second.finished and not first.finished else (first, second)


def hang_up(
    argv: Sequence[str], place: pathlib.Path, run: str, *, step: int, number: signal.Signals = signal.SIGHUP
) -> tuple[Ended, Ended]:
    """A run whose terminal goes after some step, or that is ended otherwise, and the one that goes on with it."""

    def end(running: Running) -> None:
        if running.reaches(step):
            running.process.send_signal(number)

    first = autofit(argv, place, run, {}, meanwhile=end)
    if first.finished:
        return first, first
    rest = autofit([*argv, "--resume_from_checkpoint"], place, f"{run}-resumed", {}, folder=first.folder)
    return first, replace(rest, seconds=first.seconds + rest.seconds)
