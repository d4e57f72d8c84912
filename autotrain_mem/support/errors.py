"""The errors of this package and their exit codes.

::

    AutofitError                     1   base class of all errors below; also an unforeseen error
    ├── UsageError                   2   a flag or a YAML key is unknown, malformed or contradictory
    ├── MissingExtraError            3   an optional package is missing, or its version is too old
    ├── HardwareError
    │   ├── NoGpuError              10   this machine has no GPU, and none is named
    │   ├── UnknownGpuError         11   the catalog does not have this GPU
    │   ├── UnreadableGpuError      12   NVML cannot read the GPU, or torch cannot use it
    │   └── HostMemoryError         13   host memory is too small to load or to offload
    ├── ModelError
    │   ├── ModelNotFoundError      20   there is no config.json, or the hub cannot be reached
    │   ├── UnsupportedModelError   21   the installed transformers or TRL cannot train this architecture
    │   ├── ContextLengthError      22   max_length exceeds the model's context
    │   ├── ModelConfigError        23   config.json cannot be read
    │   └── TokenizerError          24   the tokenizer does not work with the model or the trainer
    ├── DatasetError
    │   ├── DatasetNotFoundError    30   there is no such file, folder or hub id
    │   ├── EmptyDatasetError       31   there are no rows
    │   ├── MalformedDatasetError   32   a line cannot be read
    │   └── DatasetFormatError      33   columns that the trainer needs are missing
    ├── RewardFunctionError         35   a reward function raised, or did not return one number per completion
    ├── PlanError
    │   ├── BatchSplitError         40   the batch sizes do not divide evenly, or contradict each other
    │   ├── DoesNotFitError         41   nothing allowed fits the budget
    │   ├── PlanFileError           42   a plan's file does not exist, or is not a plan
    │   └── LimitError              43   every fitting plan exceeds --within or --budget
    ├── RehearsalError              50   the installed trainer raised during a rehearsal
    │   ├── WorkerDiedError         51   the rehearsal's process exited
    │   └── WorkerTimeoutError      52   the rehearsal exceeded its time limit
    ├── TrainingError               60   the training process raised or exited
    │   ├── GpuOutOfMemoryError     61   the card ran out of memory
    │   └── OutputFolderError       62   the output folder is not writable, or has another run
    └── InterruptedByUser          130   Ctrl-C, SIGTERM, SIGHUP or SIGUSR1

UsageError, UnsupportedModelError, DatasetError and BatchSplitError are also ValueErrors, as TRL's own refusals are. The
message states the problem, and the ``hint`` gives the fix with its exact flag; ``str(error)`` joins both. Only
``cli.main`` catches these errors for the user.
"""

import os
from collections.abc import Iterable
from typing import Any, ClassVar, Self

from autotrain_mem.support.units import printable


class AutofitError(Exception):
    """Base class of all errors; ``autotrain_mem.support.errors`` draws their tree.

    >>> from autotrain_mem import AutoFit, AutofitError, plan
    >>> try:
    ...     plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_lenght=512)
    ... except AutofitError as error:
    ...     print(error)
    Unknown key: max_lenght.
      max_lenght: did you mean max_length?

    Args:
        message: The problem, in one sentence with the values that matter.
        hint: The fix, with exact flags; may have several lines. Empty if there is none.
        details: JSON from which the parent process may make a better message: the ``Shortage`` of a full card.
    """

    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, *, exit_code: int | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code

    def __init__(self, message: str, *, hint: str = "", details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def __str__(self) -> str:
        """Joins message and hint, for tracebacks, notebooks and logs."""
        return printable("\n".join([self.message, *(f"  {line}" for line in self.hint.splitlines())]))

    def to_json(self) -> dict[str, Any]:
        """Returns class name, message and hint, and details if there are any, for another process."""
        sent = {"error": type(self).__name__, "message": self.message, "hint": self.hint}
        return sent if self.details is None else {**sent, "details": self.details}


def described(error: BaseException) -> str:
    """Returns an exception's class and text in one line; the code that raised it if it has no text.

    >>> described(ValueError("no such row"))
    'ValueError: no such row'
    """
    import traceback

    text = " ".join(str(error).split())
    if not text and (frames := traceback.extract_tb(error.__traceback__)):
        text = f"raised by {frames[-1].name} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


Problem = tuple[str, str]
"""What is wrong with what the user gave, and its cure."""


class UsageError(AutofitError, ValueError, exit_code=2):
    """Raised for unknown, malformed or contradictory arguments; the message names all problems.

    >>> from autotrain_mem import AutoFit, UsageError
    >>> try:
    ...     AutoFit(headroom="much")
    ... except UsageError as error:
    ...     print(error.message)
    --headroom 'much' is neither a size nor a share.
    """

    @classmethod
    def of(cls, problems: Iterable[Problem], opening: str = "") -> Self:
        """Returns one error for all problems, each with its cure; ``opening`` precedes the first problem."""
        reasons, cures = zip(*problems, strict=True)
        return cls(f"{opening}{'; '.join(reasons)}.", hint="\n".join(dict.fromkeys(cures)))


class MissingExtraError(AutofitError, exit_code=3): ...


class HardwareError(AutofitError): ...


class NoGpuError(HardwareError, exit_code=10): ...


class UnknownGpuError(HardwareError, exit_code=11): ...


class UnreadableGpuError(HardwareError, exit_code=12): ...


class HostMemoryError(HardwareError, exit_code=13): ...


class ModelError(AutofitError): ...


class ModelNotFoundError(ModelError, exit_code=20): ...


class UnsupportedModelError(ModelError, ValueError, exit_code=21): ...


class ContextLengthError(ModelError, exit_code=22): ...


class ModelConfigError(ModelError, exit_code=23): ...


class TokenizerError(ModelError, exit_code=24): ...


class DatasetError(AutofitError, ValueError): ...


class DatasetNotFoundError(DatasetError, exit_code=30): ...


class EmptyDatasetError(DatasetError, exit_code=31): ...


class MalformedDatasetError(DatasetError, exit_code=32): ...


class DatasetFormatError(DatasetError, exit_code=33): ...


class RewardFunctionError(AutofitError, exit_code=35): ...


class PlanError(AutofitError): ...


class BatchSplitError(PlanError, ValueError, exit_code=40): ...


class DoesNotFitError(PlanError, exit_code=41):
    """Raised if nothing allowed fits the budget; the message has the shortage and what would fit.

    >>> from autotrain_mem import AutoFit, DoesNotFitError, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> try:
    ...     plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="1MiB", plan=chosen))
    ... except DoesNotFitError as error:
    ...     print(error.message.splitlines()[0])
    Qwen/Qwen2.5-0.5B with the settings of its plan does not fit 1MiB.
    """


class PlanFileError(PlanError, exit_code=42): ...


class LimitError(PlanError, exit_code=43): ...


class RehearsalError(AutofitError, exit_code=50): ...


class WorkerDiedError(RehearsalError, exit_code=51): ...


class WorkerTimeoutError(RehearsalError, exit_code=52): ...


class TrainingError(AutofitError, exit_code=60): ...


class GpuOutOfMemoryError(TrainingError, exit_code=61): ...


class OutputFolderError(TrainingError, exit_code=62): ...


class InterruptedByUser(AutofitError, exit_code=130): ...


def _tree(root: type[AutofitError]) -> dict[str, type[AutofitError]]:
    names = {root.__name__: root}
    for child in root.__subclasses__():
        names |= _tree(child)
    return names


def from_json(fields: dict[str, Any]) -> AutofitError:
    """Rebuilds an error that a child process sent with :meth:`AutofitError.to_json`."""
    kind = _tree(AutofitError).get(fields["error"], AutofitError)
    return kind(fields["message"], hint=fields.get("hint", ""), details=fields.get("details"))
