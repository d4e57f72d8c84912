"""Restarts a training process that ended too early, with the same plan or with one that takes less memory.

Nothing here starts a process or reads a file; a :class:`RunBackend` does, so that a test can script every ending.

Restarts without progress are limited. A checkpoint beyond the one that the last process began with resets the count. A
cause that the user must fix ends the run at once, and so do most causes that recur at the same step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, InterruptedByUser, OutputFolderError
from autotrain_mem.training.checkpoints import Checkpoint
from autotrain_mem.training.exit_causes import Cause, Ending, Remedy, cause_of
from autotrain_mem.training.rank_processes import Event
from autotrain_mem.types import Knobs, LearnedLimits, Restart


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAttempt:
    """Holds the settings, the limits and the checkpoint that one process of a run starts with."""

    knobs: Knobs
    learned: LearnedLimits
    """The limits that the guards of earlier processes learned."""
    checkpoint: Checkpoint | None
    """The checkpoint to resume from; None to start from the beginning."""

    @property
    def began_at(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Holds another plan for the same run."""

    knobs: Knobs
    flags: str
    """The changes, as flags: ``--per_device_train_batch_size 2 --gradient_accumulation_steps 4``."""


class RunBackend(Protocol):
    """Runs processes and reads files for the supervisor."""

    def train(self, attempt: RunAttempt, on_event: Callable[[Event], None]) -> Event | Ending:
        """Runs a process to its end."""

    def newest(self, ending: Ending) -> Checkpoint | None:
        """Sets torn checkpoints aside; returns the run's newest whole checkpoint, or None."""

    def changed(self, cause: Cause, ending: Ending, knobs: Knobs) -> Change | None:
        """Returns a plan that takes less memory or runs on the remaining machines; None to keep the plan. Raises
        AutofitError if too few machines are left."""

    def explained(self, ending: Ending) -> AutofitError:
        """Returns the process's own error, or one with more explanation."""


def supervise(first: RunAttempt, backend: RunBackend, *, restarts: int, on_event: Callable[[Event], None]) -> Event:
    """Trains to the end; returns the ``end`` event of the last process. ``restarts``: the most restarts in a row
    without a new checkpoint; 0 for none. ``on_event``: gets the events of every process, ``died`` when one ended too
    early, and ``restart`` before the next.

    Raises:
        AutofitError: the last process's error; the hint says why it was not restarted, and what to resume from.
        InterruptedByUser: as :func:`launch.train`; also on Ctrl-C while no process runs.
    """
    attempt, spent, before = first, 0, ("", 0)
    learned = first.learned

    def follow(event: Event) -> None:
        nonlocal learned
        if event["event"] == "incident":
            learned = codec.from_json(LearnedLimits, event["learned"])
        on_event(event)

    while True:
        if not isinstance(ended := backend.train(attempt, follow), Ending):
            return ended
        cause, newest = cause_of(ended), None
        is_repeated = before == (cause.name, ended.step)
        on_event({"event": "died", "step": ended.step, "cause": cause.name})
        try:
            newest = backend.newest(ended)
            spent = 0 if newest is not None and newest.step > attempt.began_at else spent
            refusal = _why_not(cause, ended, newest, is_repeated=is_repeated)
            if not refusal and spent >= restarts:
                times = "once" if spent == 1 else f"{spent} times"
                refusal = (
                    f"It was restarted {times} without progress (--max_restarts {restarts})."
                    if restarts
                    else "--max_restarts 0 allows no restart."
                )
            takes_other = cause.remedy in (Remedy.LESS_DEVICE_MEMORY, Remedy.LESS_HOST_MEMORY, Remedy.MACHINES)
            change = backend.changed(cause, ended, attempt.knobs) if takes_other and not refusal else None
            # Other processes may have filled the device. That is unlikely twice, or at the very first step unless the
            # refused request would have fitted a moment later: then the run begins again as it is.
            short = ended.shortage
            had_room = short is not None and short.free_bytes >= (short.segment_bytes or short.total_bytes)
            is_hopeless = is_repeated or (ended.step == ended.began_at and not had_room)
            if change is None and cause.remedy is Remedy.LESS_DEVICE_MEMORY and is_hopeless:
                refusal = refusal or "No other settings for the same training need less memory."
            if refusal:
                if isinstance(ended.error, OutputFolderError) and ended.step == ended.began_at:
                    newest = None  # it refused the checkpoint that it began with
                error = backend.explained(ended)
                # If the user must fix the cause, the hint only adds which checkpoint to resume from.
                why = "" if cause.remedy is Remedy.NONE else f"It was not restarted: {refusal}"
                error.hint = "\n".join(filter(None, [error.hint, why, _go_on(newest)]))
                raise error
        except KeyboardInterrupt as interrupt:
            raise InterruptedByUser(
                f"Interrupted after step {ended.step}, while no training process ran.",
                hint=_go_on(newest) or "Run the command again at any time.",
            ) from interrupt
        change = change or Change(knobs=attempt.knobs, flags="")
        attempt = RunAttempt(knobs=change.knobs, learned=learned, checkpoint=newest)
        restart = Restart(
            step=ended.step, resumed_at=attempt.began_at, cause=cause.name, why=cause.why, change=change.flags
        )
        on_event({"event": "restart", "restart": codec.to_json(restart)})
        spent, before = spent + 1, (cause.name, ended.step)


def _why_not(cause: Cause, ending: Ending, newest: Checkpoint | None, *, is_repeated: bool) -> str:
    """Returns a sentence on why a restart would fail in the same way; empty if it may succeed."""
    has_trained = ending.step > ending.began_at
    match cause.remedy:
        case Remedy.NONE:
            return "It would end in the same way again."
        case Remedy.UNLESS_LOST if newest is None or not has_trained:
            return "It would most likely end in the same way again."
        case Remedy.UNLESS_LOST | Remedy.UNLESS_REPEATED if is_repeated:
            return f"It has ended in this way twice, after step {ending.step}."
    return ""


def _go_on(newest: Checkpoint | None) -> str:
    if newest is None:
        return ""
    return f"Its newest complete checkpoint is {newest.path}; --resume_from_checkpoint continues from there."
