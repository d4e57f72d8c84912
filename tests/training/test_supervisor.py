"""How a process ended, and what the supervisor does with every ending; the processes are a script of endings."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from nouns import TRL_DEFAULTS, divided

from autotrain_mem.settings.words import RESTARTS
from autotrain_mem.support import codec, errors
from autotrain_mem.support.errors import AutofitError, GpuOutOfMemoryError, InterruptedByUser, TrainingError
from autotrain_mem.support.units import MIB
from autotrain_mem.training.checkpoints import Checkpoint
from autotrain_mem.training.exit_causes import CAUSES, WHY_CHARACTERS, Cause, Ending, Remedy, cause_of
from autotrain_mem.training.supervisor import Change, RunAttempt, supervise
from autotrain_mem.types import Knobs, LearnedLimits

END = {"event": "end", "interrupted": False}
KILLED = "signal 9, often because host memory ran out: see dmesg, or the scheduler's log"
SMALLER = Change(
    knobs=divided(TRL_DEFAULTS, 4, 2),
    flags="--per_device_train_batch_size 4 --gradient_accumulation_steps 2",
)
LEARNED = LearnedLimits(train_tokens=512)


def killed(step: int, began_at: int = 0) -> Ending:
    return Ending(error=TrainingError("It ended."), code=-signal.SIGKILL, step=step, began_at=began_at)


def out_of_memory(step: int, began_at: int = 0) -> Ending:
    return Ending(error=GpuOutOfMemoryError("Out of memory."), step=step, began_at=began_at)


def refused(free_mib: int) -> Ending:
    """264 bytes, for which the allocator asks for a segment of 2 MiB, in the first step."""
    sizes = dict.fromkeys(("total_bytes", "allocated_bytes", "reserved_bytes", "outside_bytes"), 0)
    asked = {"phase": None, "step": 0, "requested_bytes": 264, "segment_bytes": 2 * MIB, "measured": {}, **sizes}
    error = GpuOutOfMemoryError("Out of memory.", details=asked | {"free_bytes": free_mib * MIB})
    return replace(out_of_memory(0), error=error)


def error_of(text: str) -> TrainingError:
    return TrainingError(f"The trainer raised {text}")


def raised(text: str, step: int, began_at: int = 0) -> Ending:
    return Ending(error=error_of(text), step=step, began_at=began_at)


def test_what_a_process_tells_is_its_cause() -> None:
    told: list[tuple[AutofitError, str]] = [
        (GpuOutOfMemoryError("Out of memory during backward."), "GPU out of memory"),
        (error_of("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "GPU out of memory"),
        (error_of("MemoryError:"), "host out of memory"),
        (error_of("OutOfMemoryError: CUDA error: an illegal memory access was encountered"), "CUDA error"),
        (error_of("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."), "host out of memory"),
        (error_of("RuntimeError: CUDA error: uncorrectable ECC error encountered"), "CUDA error"),
        (error_of("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error"), "NCCL error"),
        (error_of("RuntimeError: something of the moment"), "raised"),
        (error_of("ValueError: this will be as wrong the next time"), "refused"),
        (errors.OutputFolderError("The disk is full."), "disk full"),
        (errors.DatasetFormatError("No column."), "refused"),
    ]
    assert [(error, cause_of(Ending(error=error)).name) for error, _ in told] == told


def test_a_silent_end_is_told_by_its_status_and_its_last_words() -> None:
    ends: list[tuple[int, dict[str, Any], str]] = [
        (-signal.SIGKILL, {}, "killed"),
        (-signal.SIGKILL, {"host_kills": 1}, "host out of memory"),
        (-signal.SIGTERM, {}, "killed"),
        (-signal.SIGSEGV, {"host_kills": 1}, "crashed"),
        (-signal.SIGBUS, {}, "crashed"),
        (-signal.SIGABRT, {"log_tail": "CUDA error: unspecified launch failure\nAborted"}, "CUDA error"),
        (1, {"log_tail": "Error out of memory at line 42 in file /src/csrc/ops.cu"}, "GPU out of memory"),
        (-signal.SIGABRT, {"log_tail": "warning: CUDA error is\nterminate: std::bad_alloc"}, "host out of memory"),
        (1, {}, "ended"),
    ]
    for code, seen, name in ends:
        assert cause_of(Ending(error=TrainingError("It ended."), code=code, **seen)).name == name, (code, seen)


def test_a_cause_names_the_checkpoint_that_was_written_and_the_rank_in_one_line() -> None:
    ending = Ending(error=error_of("RuntimeError: cannot rename"), saving="run/checkpoint-5")
    assert cause_of(ending).name == "saving failed"
    assert cause_of(ending).remedy is Remedy.UNLESS_REPEATED
    ending = Ending(error=TrainingError("Rank 1 of the training ended."), code=-9, rank=1)
    assert cause_of(ending).why == f"rank 1: {KILLED}"
    hang = replace(ending, code=None, waited_for="its process sends no heartbeats")
    assert (cause_of(hang).name, cause_of(hang).why) == ("hang", "rank 1: its process sends no heartbeats")
    cause = cause_of(Ending(error=error_of("RuntimeError: " + "very long " * 100)))
    assert cause.name in CAUSES
    assert len(cause.why) <= WHY_CHARACTERS


@dataclass
class Script:
    """Processes that end one after the other as they are told to, each with the checkpoint that it leaves."""

    endings: list[tuple[Any, int | None]]
    smaller: Change | None = None
    attempts: list[RunAttempt] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)

    def train(self, attempt: RunAttempt, hear: Callable[[dict[str, Any]], None]) -> Any:
        self.attempts.append(attempt)
        ended, self.left = self.endings.pop(0)
        if isinstance(ended, BaseException):
            raise ended
        hear({"event": "incident", "incident": {}, "learned": codec.to_json(LEARNED)})
        return ended

    def newest(self, ending: Ending) -> Checkpoint | None:
        if self.left == -1:
            raise KeyboardInterrupt
        return None if self.left is None else Checkpoint(path=Path(f"run/checkpoint-{self.left}"), step=self.left)

    def changed(self, cause: Cause, ending: Ending, knobs: Knobs) -> Change | None:
        return self.smaller

    def explained(self, ending: Ending) -> AutofitError:
        ending.error.hint = f"{ending.error.hint}[explained]"
        return ending.error

    def run(self, restarts: int = RESTARTS) -> Any:
        first = RunAttempt(knobs=TRL_DEFAULTS, learned=LearnedLimits(), checkpoint=None)
        return supervise(first, self, restarts=restarts, on_event=self.told.append)

    @property
    def restarts(self) -> list[dict[str, Any]]:
        return [event["restart"] for event in self.told if event["event"] == "restart"]


def test_a_killed_process_is_gone_on_with_from_the_last_checkpoint_and_what_the_guard_learned() -> None:
    script = Script([(killed(47), 40), (END, 60)])
    assert script.run() is END
    assert [attempt.began_at for attempt in script.attempts] == [0, 40]
    assert [attempt.learned for attempt in script.attempts] == [LearnedLimits(), LEARNED]
    restart = {"step": 47, "resumed_at": 40, "cause": "killed", "why": KILLED, "change": ""}
    assert script.restarts == [restart]
    assert [event["event"] for event in script.told] == ["incident", "died", "restart", "incident"]
    script = Script([(killed(3), None), (END, None)])
    assert script.run() is END
    assert script.attempts[1].checkpoint is None, "without a checkpoint it begins again"


def test_what_may_end_otherwise_is_tried_again_unless_no_restarts_are_asked_for_a_full_card_with_less() -> None:
    assert Script([(raised(ODD, 7), 5), (END, 20)]).run() is END, "an unknown error with a checkpoint"
    assert Script([(raised(ASSERT, 7), 5), (raised(ASSERT, 9, 5), 5), (END, 20)]).run() is END, "at another step"
    further = [(killed(10 * n + 5, 10 * (n - 1)), 10 * n) for n in range(1, 10)]
    script = Script([*further, (END, 100)])
    assert script.run() is END
    assert len(script.restarts) == 9
    with pytest.raises(TrainingError, match=r"--max_restarts 0(.|\n)*run/checkpoint-40; --resume_from_checkpoint"):
        Script([(killed(47), 40)]).run(restarts=0)
    script = Script([(out_of_memory(7), 5), (killed(12, 5), 10), (END, 20)], smaller=SMALLER)
    assert script.run() is END
    assert [attempt.knobs for attempt in script.attempts] == [TRL_DEFAULTS, SMALLER.knobs, SMALLER.knobs]
    assert [restart["change"] for restart in script.restarts] == [SMALLER.flags, ""]


ODD = "RuntimeError: odd"
ASSERT = "AcceleratorError: CUDA error: device-side assert triggered"
INTERRUPTED = InterruptedByUser("Interrupted.")

GIVEN_UP: dict[str, tuple[list[tuple[Any, int | None]], type[AutofitError], str]] = {
    "no process gets further": (
        [(killed(3), None)] * (RESTARTS + 1),
        TrainingError,
        "restarted 3 times without progress",
    ),
    "a card is full twice": (
        [(out_of_memory(7), 5), (out_of_memory(7, 5), 5)],
        GpuOutOfMemoryError,
        r"explained(.|\n)*need less",
    ),
    "a card is full in the first step": ([(refused(1), None)], GpuOutOfMemoryError, "explained"),
    "a card with room is full in the first step": ([(refused(239), None)] * 2, GpuOutOfMemoryError, "need less"),
    "the code is wrong": ([(raised("ValueError: wrong", 7), 5)], TrainingError, "wrong"),
    "nothing was trained": ([(raised("RuntimeError: before the first step", 5, 5), 5)], TrainingError, "first step"),
    "an unknown error without a checkpoint": ([(raised(ODD, 7), None)], TrainingError, "odd"),
    "an unknown error twice": ([(raised(ODD, 7), 5), (raised(ODD, 7, 5), 5)], TrainingError, "way twice, after step 7"),
    "an interrupt": ([(INTERRUPTED, 5)], InterruptedByUser, "Interrupted"),
    "an interrupt between processes": ([(killed(7), -1)], InterruptedByUser, "after step 7, while no training process"),
}


@pytest.mark.parametrize("name", GIVEN_UP)
def test_what_would_end_so_again_is_given_up_with_its_reason(name: str) -> None:
    endings, kind, words = GIVEN_UP[name]
    script = Script([*endings])
    with pytest.raises(kind, match=words):
        script.run()
    assert len(script.attempts) == len(endings)


def test_the_users_own_error_is_told_in_its_own_words_and_with_the_checkpoint() -> None:
    error = errors.RewardFunctionError("reward raised.", hint="Mend it.")
    with pytest.raises(AutofitError) as caught:
        Script([(Ending(error=error, step=7), 5)]).run()
    said = "Its newest complete checkpoint is run/checkpoint-5; --resume_from_checkpoint continues from there."
    assert caught.value.hint.splitlines() == ["Mend it.[explained]", said]


def test_a_checkpoint_that_was_refused_is_not_recommended_and_one_before_a_full_disk_is() -> None:
    for step, is_named in ((40, False), (47, True)):
        refused = Ending(error=errors.OutputFolderError("Cannot.", hint="Otherwise."), step=step, began_at=40)
        with pytest.raises(errors.OutputFolderError) as caught:
            Script([(refused, 40)]).run()
        assert caught.value.hint.startswith("Otherwise.")
        assert ("run/checkpoint-40" in caught.value.hint) == is_named
