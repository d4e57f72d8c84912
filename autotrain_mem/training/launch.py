"""Starts the processes of a run or a probe, passes on their events, and reports how they ended."""

import contextlib
import pathlib
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotrain_mem.support import codec, errors
from autotrain_mem.support.errors import AutofitError, InterruptedByUser, RewardFunctionError, TrainingError
from autotrain_mem.support.processes import ChildTimeout
from autotrain_mem.training.cuda_oom import HOST, kind_of_text
from autotrain_mem.training.environment import ADDRESS, meeting_port, rank_environments
from autotrain_mem.training.exit_causes import Ending
from autotrain_mem.training.machines.lead import Machines, capitalized
from autotrain_mem.training.rank_processes import Event, Progress, RankDied, RankProcesses, RankTimeout
from autotrain_mem.training.run_folder import unwritable
from autotrain_mem.training.task import Request, interrupted_before_training, largest
from autotrain_mem.types import Phase, PhasePeak, Probe

RUN_PROCESS = "autotrain_mem.training.process.main"
SIMULATED_PROCESS = "autotrain_mem.rehearsal.simulated_run"
LOG_NAME = "train.log"
PROBE_LOG_NAME = "probe.log"
SCRATCH_NAME = ".probe"
"""The folder that a probe saves to, on the disk of the run's folder."""

LAST_WORDS_SECONDS = 60.0
"""Seconds that a finished process may take to exit: trackers flush their data at interpreter exit."""

LAST_WORDS_CHARACTERS = 800
"""The most characters of a dead process's log in an error."""

INTERRUPT_SECONDS = 1.0
"""Seconds between repeated interrupts."""


def train(
    request: Request,
    environment: Mapping[str, str],
    log: pathlib.Path,
    on_event: Callable[[Event], None],
    *,
    lock: int | None = None,
    machines: Machines | None = None,
) -> Event | Ending:
    """Runs the processes of one run to their end; returns rank 0's ``end`` event, or an Ending if it sent none.

    A rank's child processes, such as dataloader workers, end with it, and all ranks end with this process. When one
    rank fails, the others are stopped within ``processes.GRACE_SECONDS``. Raises InterruptedByUser for a Ctrl-C before
    the first step, or a second one; a single later one ends all ranks after the same step.

    Args:
        log: Gets everything that the trainer and its libraries print; ``train.rank1.log`` beside it is rank 1's.
        on_event: Called with every event.
        lock: The open file that holds the lock on the output folder; every process of this machine inherits it.
        machines: The other machines of the run; None for a single machine.
    """
    progress = Progress(on_event)
    with _started(request, environment, log, machines, () if lock is None else (lock,)) as ranks:
        try:
            ranks.send(_requests(request))
            return _listen(ranks, log, progress)
        except KeyboardInterrupt:
            return _end_after_step(ranks, log, progress)
        except (RankDied, RankTimeout) as failure:
            return _ending_by(failure, ranks, log, progress)


@contextlib.contextmanager
def _started(
    request: Request,
    environment: Mapping[str, str],
    log: pathlib.Path,
    machines: Machines | None,
    keeps_open: Sequence[int] = (),
) -> Iterator[RankProcesses]:
    """Starts the processes of a request, and stops them at the end of the block."""
    address = ADDRESS if machines is None else machines.place.address
    names = [
        f"rank {rank}" + ("" if machines is None else f" on {machines.name_of(rank, request.processes_here)}")
        for rank in range(request.knobs.processes)
    ]
    with meeting_port(request, environment, None if machines is None else machines.place.port) as port:
        try:
            ranks = RankProcesses(
                SIMULATED_PROCESS if request.simulate else RUN_PROCESS,
                rank_environments(request, environment, port, address),
                [_log_of(log, rank) for rank in range(request.knobs.processes)],
                names=names,
                silent_seconds=request.silent_seconds,
                keeps_open=keeps_open,
                elsewhere=None if machines is None else machines.begin_attempt(request.processes_here),
            )
        except OSError as error:
            raise unwritable(log.parent, f"{pathlib.Path(error.filename or log).name}: {error.strerror}") from error
        try:
            yield ranks
        finally:
            ranks.stop()


def _requests(request: Request) -> list[Event]:
    return [codec.to_json(request.of_rank(rank)) for rank in range(request.knobs.processes)]


def _log_of(log: pathlib.Path, rank: int) -> pathlib.Path:
    return log.with_name(f"{log.stem}.rank{rank}{log.suffix}") if rank else log


def _listen(
    ranks: RankProcesses, log: pathlib.Path, progress: Progress, interrupt_seconds: float | None = None
) -> Event | Ending:
    """Follows the ranks to the end; raises RankDied and RankTimeout. ``interrupt_seconds``: interrupts the ranks now,
    after each event, and whenever none comes for this long. One interrupt can be lost: if a shell started the command
    with ``&``, ranks ignore interrupts until they set their handlers, and Python drops an exception raised in a
    ``__del__`` method."""
    while True:
        if interrupt_seconds is not None:
            ranks.interrupt()
        try:
            message = ranks.receive(interrupt_seconds)
        except ChildTimeout:
            continue
        if "error" in message:
            rank = message.get("rank")
            if isinstance(error := _error_of(message, log, ranks.names), InterruptedByUser):
                raise error
            return progress.ending(error, rank=rank)
        if message["event"] == "end":
            ranks.wait(LAST_WORDS_SECONDS)
            return message
        progress.follow(message)


def _end_after_step(ranks: RankProcesses, log: pathlib.Path, progress: Progress) -> Event:
    """Interrupts the ranks after Ctrl-C, so that they finish their step and save; a second Ctrl-C kills them."""
    ended: Event | Ending
    try:
        progress.follow({"event": "interrupted"})
        ended = _listen(ranks, log, progress, INTERRUPT_SECONDS)
    except (RankDied, RankTimeout) as failure:
        ended = _ending_by(failure, ranks, log, progress)
    except KeyboardInterrupt as again:
        ranks.kill()
        raise InterruptedByUser(
            "Interrupted twice, in the middle of a step.",
            hint="Earlier complete checkpoints stay valid; if the newest is incomplete, it is skipped.",
        ) from again
    if not isinstance(ended, Ending):
        return ended
    if ended.step == ended.began_at:  # it had not begun to train
        raise interrupted_before_training() from ended.error
    raise InterruptedByUser(
        f"Interrupted after step {ended.step}; the run ended before it could save: {ended.error.message}",
        hint="Earlier complete checkpoints stay valid.",
    ) from ended.error


def _error_of(message: Event, log: pathlib.Path, names: Sequence[str]) -> AutofitError:
    """Returns the error that a rank sent. Adds the rank's name, and to the trainer's own errors the path of the log."""
    error, rank = errors.from_json(message), message.get("rank")
    if isinstance(error, (TrainingError, RewardFunctionError)):
        error.hint = f"{error.hint}\nThe trainer's output is in {_log_of(log, rank or 0)}.".strip()
    if rank is not None and not isinstance(error, InterruptedByUser):
        error.message = f"{capitalized(names[rank])}: {error.message}"
    return error


def _ending_by(failure: RankDied | RankTimeout, ranks: RankProcesses, log: pathlib.Path, progress: Progress) -> Ending:
    error, rank = _error_by(failure, ranks, log), failure.rank if ranks.are_several else None
    if isinstance(failure, RankTimeout):
        ranks.kill()  # a stopped process ignores signals
        return progress.ending(error, rank=rank, waited_for=failure.why)
    if failure.gone is not None:
        return progress.ending(error, machine_lost=error.message)
    return progress.ending(error, rank=rank, code=failure.code, log_tail=failure.log_tail)


def _error_by(
    failure: RankDied | RankTimeout, ranks: RankProcesses, log: pathlib.Path, *, is_probe: bool = False
) -> TrainingError:
    """Returns the error for a rank that the others wait for, or that died without sending one (quoting its log)."""
    log, name = _log_of(log, failure.rank), ranks.names[failure.rank]
    if isinstance(failure, RankTimeout):
        hint = f"What it printed is in {log}. --ddp_timeout SECONDS sets the time without progress that is allowed."
        what = f"The other ranks wait for {name}" if ranks.are_several else "The training process hangs"
        return TrainingError(f"{what}: {failure.why}.", hint=hint)
    if failure.gone is not None:
        lost = f"{capitalized(failure.gone.machine)} is gone, and its ranks with it: {failure.gone.why}."
        return TrainingError(lost, hint="The run resumes when its command is started there again.")
    place = f" ({name})" if ranks.are_several else ""
    what = f"{'The probe before the training' if is_probe else 'The training process'}{place}"
    code, words = failure.code, failure.log_tail[-LAST_WORDS_CHARACTERS:].strip()
    status = f"it was killed by signal {-code}" if code is not None and code < 0 else f"exit status {code}"
    likely = "Signal 9 often means that host memory ran out.\n" if code == -signal.SIGKILL else ""
    if code == 0:
        likely = "A callback, a reward function or a library called exit().\n"
    where = f"Its last output is below; the whole output is in {log}." if words else f"Its log, {log}, is empty."
    advice = " --no_probe trains without a probe." if is_probe else ""
    hint = "\n".join(filter(None, [f"{likely}{where}{advice}", words]))
    return TrainingError(f"{what} ended too early: {status}.", hint=hint)


def run_probe(
    request: Request, environment: Mapping[str, str], folder: pathlib.Path, machines: Machines | None = None
) -> Probe:
    """Tries a plan in separate processes. Returns the maxima over the ranks, and the out-of-memory message of any rank.
    ``probe.log`` in ``folder``, which exists, gets all that the trainer prints.

    Raises:
        OutputFolderError: the disk is full, or cannot be written.
        TrainingError, RewardFunctionError, DatasetError, ModelError: as in training.
        InterruptedByUser: Ctrl-C.
    """
    started = time.monotonic()
    log = folder / PROBE_LOG_NAME
    with _scratch(folder) as scratch:
        request = replace(request, output_dir=str(scratch))
        with _started(request, environment, log, machines) as ranks:
            try:
                ranks.send(_requests(request))
                probe = _probe_answers(ranks, log)
            except KeyboardInterrupt as interrupt:
                raise interrupted_before_training() from interrupt
            except (RankDied, RankTimeout) as failure:
                # Some libraries exit when the device is out of memory; then only the log shows the cause.
                tail = failure.log_tail if isinstance(failure, RankDied) and failure.gone is None else ""
                lines = [line for line in tail.splitlines() if kind_of_text(line) not in (None, HOST)]
                if not lines:
                    raise _error_by(failure, ranks, log, is_probe=True) from failure
                probe = Probe(knobs=request.knobs, fits=False, measured=None, phases={}, refused=lines[-1].strip())
            finally:
                ranks.kill()  # the probe's results are in: free its GPUs
    return replace(probe, seconds=round(time.monotonic() - started, 3))


def _probe_answers(ranks: RankProcesses, log: pathlib.Path) -> Probe:
    """Merges the ranks' answers. Stops when one rank ran out of memory: the others would wait for it forever."""
    answers: dict[int, Probe] = {}
    while True:
        message = ranks.receive()
        if "error" in message:
            raise _error_of(message, log, ranks.names)
        if message["event"] == "probe":
            probe, rank = codec.from_json(Probe, message["probe"]), message.get("rank", 0)
            answers[rank] = probe
            if probe.refused and ranks.are_several:
                answers[rank] = replace(probe, refused=f"{ranks.names[rank]}: {probe.refused}")
            if probe.refused or len(answers) == len(ranks.names):
                return most_of(list(answers.values()))


def most_of(probes: Sequence[Probe]) -> Probe:
    """Merges the ranks' measurements: the largest of each figure, also by phase."""

    def most(figures: Iterable[Any]) -> Any:
        return max((figure for figure in figures if figure is not None), default=None)

    measured = [probe.measured for probe in probes if probe.measured is not None]
    peaks: dict[Phase, PhasePeak] = {}
    for phase, peak in (item for probe in probes for item in probe.phases.items()):
        peaks[phase] = largest([peaks.get(phase, peak), peak])
    names = ("row_tokens", "non_torch_bytes", "step_seconds")
    return replace(
        next((probe for probe in probes if probe.refused), probes[0]),
        fits=all(probe.fits for probe in probes),
        measured=largest(measured) if measured else None,
        phases=peaks,
        **{name: most(getattr(probe, name) for probe in probes) for name in names},
    )


@contextlib.contextmanager
def _scratch(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Creates an empty folder for the probe, replacing one that a killed parent left, and removes it afterwards."""
    scratch = folder / SCRATCH_NAME
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir()
        yield scratch
    except OSError as error:
        raise unwritable(folder, str(error.strerror)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
