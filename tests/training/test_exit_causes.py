"""How a process ended, and what is made of it."""

import signal
from dataclasses import replace

import pytest

from autotrain_mem.support.errors import (
    AutofitError,
    DatasetFormatError,
    GpuOutOfMemoryError,
    OutputFolderError,
    TrainingError,
)
from autotrain_mem.training.exit_causes import CAUSES, LOW_HOST_SHARE, WHY_CHARACTERS, Ending, Remedy, cause_of

ENDED = TrainingError("The training process ended before its time.")


def _raised(text: str) -> TrainingError:
    return TrainingError(f"The trainer raised {text}")


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (GpuOutOfMemoryError("Out of memory during backward."), "GPU out of memory"),
        (_raised("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "GPU out of memory"),
        (_raised("MemoryError:"), "host out of memory"),
        (_raised("OutOfMemoryError: CUDA error: an illegal memory access was encountered"), "CUDA error"),
        (_raised("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."), "host out of memory"),
        (_raised("RuntimeError: CUDA error: uncorrectable ECC error encountered"), "CUDA error"),
        (_raised("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error"), "NCCL error"),
        (_raised("RuntimeError: something of the moment"), "raised"),
        (_raised("ValueError: this will be as wrong the next time"), "refused"),
        (OutputFolderError("The disk is full."), "disk full"),
        (DatasetFormatError("No column."), "refused"),
    ],
)
def test_what_a_process_tells_is_its_cause(error: AutofitError, name: str) -> None:
    assert cause_of(Ending(error=error)).name == name


@pytest.mark.parametrize(
    ("code", "seen", "name"),
    [
        (-signal.SIGKILL, {}, "killed"),
        (-signal.SIGKILL, {"host_kills": 1}, "host out of memory"),
        (-signal.SIGKILL, {"host_left_share": LOW_HOST_SHARE / 2}, "host out of memory"),
        (-signal.SIGTERM, {}, "killed"),
        (-signal.SIGSEGV, {"host_kills": 1}, "crashed"),
        (-signal.SIGBUS, {}, "crashed"),
        (-signal.SIGABRT, {"log_tail": "CUDA error: unspecified launch failure\nAborted"}, "CUDA error"),
        (1, {"log_tail": "Error out of memory at line 42 in file /src/csrc/ops.cu"}, "GPU out of memory"),
        (-signal.SIGABRT, {"log_tail": "warning: CUDA error is\nterminate: std::bad_alloc"}, "host out of memory"),
        (1, {}, "ended"),
    ],
)
def test_a_silent_end_is_told_by_its_status_and_its_last_words(code: int, seen: dict, name: str) -> None:
    assert cause_of(Ending(error=ENDED, code=code, **seen)).name == name


def test_an_error_while_a_checkpoint_is_written_is_the_checkpoints() -> None:
    ending = Ending(error=_raised("RuntimeError: cannot rename"), saving="run/checkpoint-5")
    assert cause_of(ending).name == "saving failed"
    assert cause_of(ending).remedy is Remedy.UNLESS_REPEATED


def test_a_cause_names_its_rank() -> None:
    ending = Ending(error=TrainingError("Rank 1 of the training ended."), code=-9, rank=1)
    assert cause_of(ending).why == "rank 1: signal 9"
    hang = replace(ending, code=None, waited_for="its process stands still")
    assert (cause_of(hang).name, cause_of(hang).why) == ("hang", "rank 1: its process stands still")


def test_every_cause_can_come_and_has_a_line_of_its_own() -> None:
    cause = cause_of(Ending(error=_raised("RuntimeError: " + "very long " * 100)))
    assert cause.name in CAUSES
    assert len(cause.why) <= WHY_CHARACTERS
