"""Every error a user can meet, each with its exit code.

::

    AutofitError                     1   anything below; also what we did not foresee
    ├── UsageError                   2   a flag or a YAML key: unknown, malformed, contradictory
    ├── MissingExtraError            3   an optional package is not installed, or not in the version that is needed
    ├── HardwareError
    │   ├── NoGpuError              10   no GPU here and none named
    │   ├── UnknownGpuError         11   a GPU name that the catalog does not hold
    │   ├── UnreadableGpuError      12   a GPU that is here but does not say what it has, or that torch cannot use
    │   └── HostMemoryError         13   too little host memory to load or to offload
    ├── ModelError
    │   ├── ModelNotFoundError      20   no config.json there, or a hub id that cannot be reached
    │   ├── UnsupportedModelError   21   an architecture that the installed transformers or TRL cannot train
    │   ├── ContextLengthError      22   max_length beyond the model's context
    │   ├── ModelConfigError        23   a config.json that cannot be read
    │   └── TokenizerError          24   a tokenizer that does not go with the model or the trainer
    ├── DatasetError
    │   ├── DatasetNotFoundError    30   no such file, folder or hub id
    │   ├── EmptyDatasetError       31   no rows
    │   ├── MalformedDatasetError   32   a line that cannot be read
    │   └── DatasetFormatError      33   the columns that the trainer needs are not there
    ├── RewardFunctionError         35   a reward function raised, or did not return one number per completion
    ├── PlanError
    │   ├── BatchSplitError         40   the effective batch does not divide
    │   ├── DoesNotFitError         41   nothing allowed fits the budget
    │   ├── PlanFileError           42   a plan to explain that is not there, or is none
    │   └── LimitError              43   what fits takes longer than --within, or costs more than --budget
    ├── RehearsalError              50   the installed trainer raised while being rehearsed
    │   ├── WorkerDiedError         51   the rehearsal's process ended
    │   └── WorkerTimeoutError      52   the rehearsal took longer than its limit
    ├── TrainingError               60   the training process raised or ended
    │   ├── GpuOutOfMemoryError     61   the card was full
    │   └── OutputFolderError       62   the output folder cannot be written, or holds another run
    └── InterruptedByUser          130   Ctrl-C, SIGTERM, SIGHUP or SIGUSR1

An error says what happened; its ``hint`` says what to do, with the exact flag; ``str(error)`` says both. Of this
package only ``cli.main`` catches them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from autotrain_mem.support.units import printable


class AutofitError(Exception):
    """Is the root of the errors; ``autotrain_mem.support.errors`` draws their tree.

    >>> from autotrain_mem import AutoFit, AutofitError, plan
    >>> try:
    ...     plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_lenght=512)
    ... except AutofitError as error:
    ...     print(error)
    Unknown key: max_lenght.
      max_lenght: did you mean max_length?

    Args:
        message: What is wrong, in one sentence with the values that matter.
        hint: What to do about it, with exact flags; may span lines. Empty when nothing helps.
        details: What a parent may make a better message of, as JSON: a ``Shortage`` of a full card.
    """

    exit_code: ClassVar[int] = 1

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


class UsageError(AutofitError):
    """Raised for a request that is unknown, malformed or contradictory; the message names all problems.

    >>> from autotrain_mem import AutoFit, UsageError
    >>> try:
    ...     AutoFit(headroom="much")
    ... except UsageError as error:
    ...     print(error.message)
    --headroom 'much' is neither a size nor a share.
    """

    exit_code = 2

    @classmethod
    def of(cls, problems: Iterable[tuple[str, str]], opening: str = "") -> UsageError:
        """Returns one error for all problems, each with its cure; ``opening`` precedes the first problem."""
        reasons, cures = zip(*problems, strict=True)
        return cls(f"{opening}{'; '.join(reasons)}.", hint="\n".join(dict.fromkeys(cures)))


class MissingExtraError(AutofitError):
    exit_code = 3


class HardwareError(AutofitError):
    pass


class NoGpuError(HardwareError):
    exit_code = 10


class UnknownGpuError(HardwareError):
    exit_code = 11


class UnreadableGpuError(HardwareError):
    exit_code = 12


class HostMemoryError(HardwareError):
    exit_code = 13


class ModelError(AutofitError):
    pass


class ModelNotFoundError(ModelError):
    exit_code = 20


class UnsupportedModelError(ModelError):
    exit_code = 21


class ContextLengthError(ModelError):
    exit_code = 22


class ModelConfigError(ModelError):
    exit_code = 23


class TokenizerError(ModelError):
    exit_code = 24


class DatasetError(AutofitError):
    pass


class DatasetNotFoundError(DatasetError):
    exit_code = 30


class EmptyDatasetError(DatasetError):
    exit_code = 31


class MalformedDatasetError(DatasetError):
    exit_code = 32


class DatasetFormatError(DatasetError):
    exit_code = 33


class RewardFunctionError(AutofitError):
    exit_code = 35


class PlanError(AutofitError):
    pass


class BatchSplitError(PlanError):
    exit_code = 40


class DoesNotFitError(PlanError):
    """Raised if nothing that is allowed fits the budget; the message says what is missing and what would fit.

    >>> from autotrain_mem import AutoFit, DoesNotFitError, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> try:
    ...     plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="1MiB", plan=chosen))
    ... except DoesNotFitError as error:
    ...     print(error.message.splitlines()[0])
    Qwen/Qwen2.5-0.5B with the settings of its plan does not fit 1MiB.
    """

    exit_code = 41


class PlanFileError(PlanError):
    exit_code = 42


class LimitError(PlanError):
    exit_code = 43


class RehearsalError(AutofitError):
    exit_code = 50


class WorkerDiedError(RehearsalError):
    exit_code = 51


class WorkerTimeoutError(RehearsalError):
    exit_code = 52


class TrainingError(AutofitError):
    exit_code = 60


class GpuOutOfMemoryError(TrainingError):
    exit_code = 61


class OutputFolderError(TrainingError):
    exit_code = 62


class InterruptedByUser(AutofitError):
    exit_code = 130


def _tree(root: type[AutofitError]) -> dict[str, type[AutofitError]]:
    names = {root.__name__: root}
    for child in root.__subclasses__():
        names |= _tree(child)
    return names


def from_json(fields: dict[str, Any]) -> AutofitError:
    """Rebuilds an error that a child process sent with :meth:`AutofitError.to_json`."""
    kind = _tree(AutofitError).get(fields["error"], AutofitError)
    return kind(fields["message"], hint=fields.get("hint", ""), details=fields.get("details"))
