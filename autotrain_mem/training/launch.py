"""Starts a training process or a probe's from the parent, passes on its events, and names how it ended."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from autotrain_mem import errors
from autotrain_mem.errors import AutofitError, InterruptedByUser, RewardFunctionError, TrainingError
from autotrain_mem.host import host_memory, oom_kills
from autotrain_mem.processes import Child, ChildDied, ChildTimeout
from autotrain_mem.spec import codec
from autotrain_mem.spec.experience import Probe
from autotrain_mem.training.exit_causes import Ending
from autotrain_mem.training.out_of_memory import HOST, kind_of_text
from autotrain_mem.training.request import Request, interrupted_before_training
from autotrain_mem.training.run_folder import unwritable

RUN_PROCESS = "autotrain_mem.training.process.main"
LOG_NAME = "train.log"
PROBE_LOG_NAME = "probe.log"
SCRATCH_NAME = ".probe"
"""Of the folder that a probe saves to, within the run's: the training will save to the same disk."""

LAST_WORDS_SECONDS = 60.0
"""How long a run that is done may take to end by itself: trackers send what they hold when the interpreter exits."""

LAST_WORDS_CHARACTERS = 800
"""How much of a dead process's log an error shows."""

INTERRUPT_SECONDS = 1.0
"""How long a process that is to end may say nothing before it is asked again."""

HOST_SECONDS = 1.0
"""How often the host's memory is looked at while a run tells of its steps: reading it takes 0.1 ms."""

Event = dict[str, Any]


class _Progress:
    """Follows a process's events, to say how far it came where it ends without an ``end`` event."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._kills = oom_kills()
        self._looked = 0.0
        self._host_left_share = 1.0
        self._began_at = self._step = 0
        self._saving = ""
        self._peak_reserved_bytes: int | None = None

    def follow(self, event: Event) -> None:
        match event["event"]:
            case "start":
                self._began_at = self._step = event["step"]
            case "step":
                self._step = event["step"]
                self._peak_reserved_bytes = event["memory"] and event["memory"]["peak_reserved_bytes"]
            case "saving":
                self._saving = event["path"]
            case "checkpoint" | "save_failed":
                self._saving = ""
        if time.monotonic() - self._looked >= HOST_SECONDS:
            self._looked, memory = time.monotonic(), host_memory()
            self._host_left_share = min(self._host_left_share, memory.available_bytes / memory.total_bytes)
        self._on_event(event)

    def ending(self, error: AutofitError, *, code: int | None = None, log_tail: str = "") -> Ending:
        return Ending(
            error=error,
            code=code,
            log_tail=log_tail,
            step=self._step,
            began_at=self._began_at,
            saving=self._saving,
            host_kills=oom_kills() - self._kills,
            host_left_share=self._host_left_share,
            peak_reserved_bytes=self._peak_reserved_bytes,
        )

    def ending_by_death(self, death: ChildDied, log: pathlib.Path) -> Ending:
        error = _died_early("The training process", death, log)
        return self.ending(error, code=death.code, log_tail=death.log_tail)


def train(
    request: Request,
    environment: Mapping[str, str],
    log: pathlib.Path,
    on_event: Callable[[Event], None],
    *,
    lock: int | None = None,
) -> Event | Ending:
    """Run one training process to its end; returns its ``end`` event, or how it ended without one.

    Its own processes, such as those of a dataloader, end with it, and all of them with this process.

    Args:
        log: Where everything goes that the trainer and its libraries print.
        on_event: Is called with every event on the way.
        lock: The open file that the lock on the output folder is of: the process holds it too.

    Raises:
        InterruptedByUser: Ctrl-C before the first step, or twice. After a single one the child ends after its step,
            and so does this function.
    """
    progress = _Progress(on_event)
    child = Child(RUN_PROCESS, environment, log, has_children=True, keeps_open=() if lock is None else (lock,))
    try:
        child.send(codec.to_json(request))
        return _listen(child, child.messages(), log, progress)
    except KeyboardInterrupt:
        return _end_after_step(child, log, progress)
    except ChildDied as death:
        return progress.ending_by_death(death, log)
    finally:
        child.stop()


def _listen(child: Child, messages: Iterable[Event], log: pathlib.Path, progress: _Progress) -> Event | Ending:
    for message in messages:
        if "error" in message:
            error = _error_of(message, log)
            if isinstance(error, InterruptedByUser):
                raise error
            return progress.ending(error)
        if message["event"] == "end":
            child.wait(LAST_WORDS_SECONDS)
            return message
        progress.follow(message)
    raise InterruptedByUser("The training process ended before its first step.", hint=f"What it printed is in {log}.")


def _end_after_step(child: Child, log: pathlib.Path, progress: _Progress) -> Event:
    """Ctrl-C: let the child end its step and write what it must. A second Ctrl-C does not wait."""
    ended: Event | Ending
    try:
        progress.follow({"event": "interrupted"})
        ended = _listen(child, _until_it_ends(child), log, progress)
    except ChildDied as death:
        ended = progress.ending_by_death(death, log)
    except KeyboardInterrupt as again:
        child.kill()
        raise InterruptedByUser(
            "Interrupted twice, in the middle of a step.",
            hint="Checkpoints that were complete before stay valid; the newest may not be, and is then passed over.",
        ) from again
    if not isinstance(ended, Ending):
        return ended
    if ended.step == ended.began_at:  # before training it has no step to end
        raise interrupted_before_training() from ended.error
    raise InterruptedByUser(
        f"Interrupted after step {ended.step}, and ended before it could save: {ended.error.message}",
        hint="Checkpoints that were complete before stay valid.",
    ) from ended.error


def _until_it_ends(child: Child) -> Iterator[Event]:
    """Ask a child to end, again and again, since one asking may be lost; gives the events that it sends meanwhile.

    Interrupts are ignored in whatever a shell starts with ``&``, and so in the child until it has imported what it
    needs; and what is raised in an object's ``__del__`` goes nowhere.
    """
    while True:
        child.interrupt()
        try:
            yield child.receive(INTERRUPT_SECONDS)
        except ChildTimeout:
            continue
        except ChildDied as death:
            if death.code == 0:
                return
            raise


def _error_of(message: Event, log: pathlib.Path) -> AutofitError:
    """The error that a process sent; one of the trainer's own names the log."""
    error = errors.from_json(message)
    if isinstance(error, (TrainingError, RewardFunctionError)):
        error.hint = f"{error.hint}\nAll that the trainer printed is in {log}.".strip()
    return error


def _died_early(what: str, death: ChildDied, log: pathlib.Path, advice: str = "") -> TrainingError:
    """The error of a process that ended without a word, with the end of its log.

    Args:
        what: Begins the message: ``The training process``.
    """
    status = f"exit status {death.code}"
    if death.code is not None and death.code < 0:
        status = f"it was killed by signal {-death.code}"
    likely = "Signal 9 is often the host running out of memory.\n" if death.code == -signal.SIGKILL else ""
    words = death.log_tail[-LAST_WORDS_CHARACTERS:].strip()
    where = f"Its last words are below; all of them are in {log}." if words else f"Its log, {log}, is empty."
    hint = "\n".join(filter(None, [f"{likely}{where}{advice}", words]))
    return TrainingError(f"{what} ended before its time: {status}.", hint=hint)


# -- a probe -------------------------------------------------------------------------------------------------------


def run_probe(request: Request, environment: Mapping[str, str], folder: pathlib.Path) -> Probe:
    """Try settings in a process of its own; ``seconds`` of what comes back are of all of it.

    Args:
        folder: The output folder, which exists; ``probe.log`` in it gets all that the trainer prints.

    Raises:
        OutputFolderError: the disk is full, or cannot be written.
        TrainingError, RewardFunctionError, DatasetError, ModelError: what the training would have met as well.
        InterruptedByUser: Ctrl-C.
    """
    started = time.monotonic()
    log = folder / PROBE_LOG_NAME
    with _scratch(folder) as scratch:
        child = Child(RUN_PROCESS, environment, log, has_children=True)
        try:
            child.send(codec.to_json(replace(request, output_dir=str(scratch))))
            probe = _probe_answer(child, log)
        except KeyboardInterrupt as interrupt:
            raise interrupted_before_training() from interrupt
        except ChildDied as death:
            probe = _probe_of_death(request, death, log)
        finally:
            child.kill()  # it has told all that it had to tell, and its card is wanted
            child.stop()
    return replace(probe, seconds=round(time.monotonic() - started, 3))


def _probe_answer(child: Child, log: pathlib.Path) -> Probe:
    while True:
        message: Event = child.receive()
        if "error" in message:
            raise _error_of(message, log)
        if message["event"] == "probe":
            return codec.from_json(Probe, message["probe"])


def _probe_of_death(request: Request, death: ChildDied, log: pathlib.Path) -> Probe:
    """Answer that the settings do not fit, where a library ended the process since the device was full.

    Raises:
        TrainingError: it ended otherwise.
    """
    lines = [line for line in death.log_tail.splitlines() if kind_of_text(line) not in (None, HOST)]
    if lines:
        return Probe(knobs=request.knobs, fits=False, measured=None, phases={}, refused=lines[-1].strip())
    advice = " --no_probe trains without a probe."
    raise _died_early("The probe before the training", death, log, advice) from death


@contextlib.contextmanager
def _scratch(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder that goes when the probe has ended, however it ended; one of a parent that was killed goes too.

    Raises:
        OutputFolderError: it cannot be made.
    """
    scratch = folder / SCRATCH_NAME
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir()
        yield scratch
    except OSError as error:
        raise unwritable(folder, str(error.strerror)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
