"""What every method's module offers, and where it is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.loss_basis import Basis
from autotrain_mem.methods.row_lengths import RowLengths
from autotrain_mem.methods.table import METHODS
from autotrain_mem.spec import Knobs
from autotrain_mem.spec.preflight import Finding

EditRows = Callable[[list[Any]], list[Any]]


class Method(Protocol):
    """A module of this package. All of them hold the same functions in the same order."""

    def make_parser(self) -> Any:
        """TRL's own parser: every flag and YAML key that it takes, we take."""

    def configs(self, arguments: dict[str, Any]) -> Configs:
        """TRL's dataclasses, filled."""

    def rehearsal_changes(self, arguments: dict[str, Any], knobs: Knobs) -> dict[str, Any]:
        """Arguments that a rehearsal of this trainer needs otherwise than ``configs.rehearsal_arguments`` has them."""

    def build_trainer(
        self, filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None
    ) -> Any:
        """The installed trainer, built as TRL's own script builds it; the model is loaded by TRL from its path.

        Args:
            stub: The tokenizer of a rehearsal; None in a real run, which takes the model's own.
        """

    def without_precomputing(self) -> AbstractContextManager[Any]:
        """Inside, a trainer makes no pass over all the data before it trains, such as a reference's that scores them.

        For two steps that would take too long, and it is a forward alone: less than training.
        """

    def worst_rows(self, filled: Configs, length: int, rows: int) -> Any:
        """A dataset of ``rows`` rows, each of which fills ``length`` tokens (of the prompt, in online methods)."""

    def rows_editor(self, filled: Configs) -> EditRows:
        """What makes the worst micro-batch of the rows that the sampler drew."""

    def training_patches(self, trainer: Any, filled: Configs, knobs: Knobs) -> AbstractContextManager[None]:
        """What a rehearsal of this trainer must arrange while it trains."""

    def row_lengths(
        self, filled: Configs, split: Any, tokenizer: Any, formatting: Callable[[Any], str] | None = None
    ) -> RowLengths:
        """Tokens of every row after the trainer's own formatting, untruncated.

        Args:
            formatting: A script's own function, which SFT's trainer takes; the others are not called with one.
        """

    def check(self, filled: Configs, *, to_train: bool) -> None:
        """Refuse what the trainer would refuse later, or silently ignore. Raises UsageError."""

    def tokenizer_findings(self, filled: Configs, tokenizer: Any) -> Iterable[Finding]:
        """What is wrong with the tokenizer for this trainer alone."""

    def why_not_split(self, trainer: Any) -> str | None:
        """Why a micro-batch cannot be split without another gradient; None where its loss is a weighted sum of those of
        its parts.

        Read from TRL 1.12 and 1.16, as are the two below: ``trl/trainer/*_trainer.py: compute_loss, _compute_loss``.
        """

    def loss_basis(self, trainer: Any, *, is_counted: bool) -> Basis:
        """What the loss of a micro-batch is a mean over.

        Args:
            is_counted: transformers counted the tokens of all micro-batches, and each one's loss is divided by that.
        """

    def logged_basis(self, trainer: Any, name: str) -> Basis:
        """What one number that the trainer logs is over."""


def method_of(name: str) -> Method:
    """The module of a method in ``table.METHODS``."""
    if name not in METHODS:
        raise ValueError(f"no method {name!r}; there are {', '.join(METHODS)}")
    return cast(Method, importlib.import_module(f"autotrain_mem.methods.{name}"))


def method_of_trainer(trainer: Any) -> str | None:
    """The name of the method whose TRL trainer this is, or derives from; None for others."""
    names = {row.trainer: name for name, row in METHODS.items()}
    return next((names[kind.__name__] for kind in type(trainer).__mro__ if kind.__name__ in names), None)
