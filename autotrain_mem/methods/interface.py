"""Names what every method's module offers, has what holds where it leaves something out, and finds the module."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, Protocol, cast

from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.image_rows import RowImages, Texts
from autotrain_mem.methods.row_lengths import RowLengths
from autotrain_mem.methods.worst_case_text import EditRows
from autotrain_mem.types import Knobs
from autotrain_mem.types.methods_table import METHODS
from autotrain_mem.types.preflight import Finding


class Basis(StrEnum):
    """Names what a loss, or a number that is logged, is a mean over: by it the guard adds up a micro-batch's parts."""

    WHOLE = "whole"
    """Its divisor is that of all micro-batches together: the parts' add up as they are."""
    UNITS = "units"
    """Rows, or pairs."""
    TOKENS = "tokens"
    """Those that count for the loss."""
    LABELS = "labels"
    """Tokens that count for a loss which does not shift its labels by one: that of the first column too."""
    CHOSEN_TOKENS = "chosen tokens"
    REJECTED_TOKENS = "rejected tokens"
    LOWEST = "lowest"
    HIGHEST = "highest"
    SUM = "sum"


class Method(Protocol):
    """Stands for a module of this package: these functions in this order, of which one with a body may be left out."""

    def make_parser(self) -> Any:
        """Make TRL's own parser: every flag and YAML key that it takes, we take."""

    def configs(self, arguments: Mapping[str, Any]) -> Configs:
        """Fill TRL's dataclasses."""

    def rehearsal_changes(self, arguments: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
        """List what a rehearsal of this trainer needs otherwise than ``configs.rehearsal_arguments`` has it."""
        return {}

    def build_trainer(
        self, filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None
    ) -> Any:
        """Build the installed trainer as TRL's own script does; the model is loaded by TRL from its path.

        Args:
            stub: The tokenizer of a rehearsal; None in a real run, which takes the model's own.
        """

    def without_precomputing(self) -> AbstractContextManager[Any]:
        """Keep a trainer from a pass over all the data before it trains, such as a reference's that scores them.

        For two steps that would take too long, and it is a forward alone: less than training.
        """
        return nullcontext()

    def worst_rows(self, filled: Configs, length: int, rows: int) -> Any:
        """Make a dataset of ``rows`` rows, each of which fills ``length`` tokens (of the prompt, in online methods)."""

    def rows_editor(self, filled: Configs) -> EditRows:
        """Return what makes the worst micro-batch of the rows that the sampler drew."""

    def worst_image_rows(self, filled: Configs, length: int, rows: int, images: RowImages) -> Any:
        """Make the same of rows with images, of which ``length`` tokens hold those of the images too."""

    def image_rows_editor(self, filled: Configs) -> EditRows:
        """Return what :meth:`rows_editor` does, for rows with images."""

    def training_patches(self, trainer: Any, filled: Configs, knobs: Knobs) -> AbstractContextManager[None]:
        """Arrange what a rehearsal of this trainer needs while it trains."""
        return nullcontext()

    def ways_of_step(self, trainer: Any) -> Iterable[AbstractContextManager[None]]:
        """List the ways that chance may choose for a training step, each as what makes it go so inside."""
        return (nullcontext(),)

    def micro_steps_per_generation(self, filled: Configs, knobs: Knobs) -> int | None:
        """Return how many micro-steps train on what an optimizer step of a rehearsal generates; None: as TRL's config
        says, 0: on nothing that was generated."""
        return None

    def unprepared_lengths(self, trainer: Any, rows: list[Any]) -> list[int]:
        """Count the tokens that a step makes of each row, at most, where rows stay conversations until the collator
        makes a batch of them (``facts.MethodFacts.collates_conversations``)."""

    def row_lengths(
        self, filled: Configs, split: Any, tokenizer: Any, formatting: Callable[[Any], str] | None = None
    ) -> RowLengths:
        """Count tokens of every row after the trainer's own formatting, untruncated.

        Args:
            formatting: A script's own function, which SFT's trainer takes; the others are not called with one.
        """

    def image_texts(self, filled: Configs, row: Mapping[str, Any], images: int, processor: Any) -> Texts:
        """Format a row of the user's own, with so many images, as the trainer does."""

    def check(self, filled: Configs, *, to_train: bool) -> None:
        """Refuse what the trainer would refuse later, or silently ignore. Raises UsageError."""

    def tokenizer_findings(self, filled: Configs, tokenizer: Any) -> Iterable[Finding]:
        """Find what is wrong with the tokenizer for this trainer alone."""
        return ()

    def why_not_split(self, trainer: Any) -> str | None:
        """Say why a micro-batch cannot be split without another gradient; None where its loss is a weighted sum of
        those of its parts.

        Read from TRL 1.12 and 1.16, as are the two below: ``trl/trainer/*_trainer.py: compute_loss, _compute_loss``.
        """
        return None

    def loss_basis(self, trainer: Any, *, is_counted: bool) -> Basis:
        """Name what the loss of a micro-batch is a mean over: rows, or pairs.

        Args:
            is_counted: transformers counted the tokens of all micro-batches, and each one's loss is divided by that.
        """
        return Basis.UNITS

    def is_models_loss(self, trainer: Any) -> bool:
        """Tell whether the loss is what the model's own forward returns: what it is a mean over must be tried then."""
        return False

    def logged_basis(self, trainer: Any, name: str) -> Basis:
        """Name what one number that the trainer logs is over."""
        return Basis.UNITS


@functools.cache
def method_of(name: str) -> Method:
    """Find the module of a method in ``table.METHODS``; what it leaves out is :class:`Method`'s own."""
    if name not in METHODS:
        raise ValueError(f"no method {name!r}; there are {', '.join(METHODS)}")
    module = vars(importlib.import_module(f"autotrain_mem.methods.{name}"))
    own = {each: staticmethod(module[each]) for each in vars(Method).keys() & module.keys() if each[0] != "_"}
    return cast(Method, type(name, (Method,), own)())


def method_of_trainer(trainer: Any) -> str | None:
    """Name the method whose TRL trainer this is, or derives from; None for others."""
    names = {row.trainer: name for name, row in METHODS.items()}
    return next((names[kind.__name__] for kind in type(trainer).__mro__ if kind.__name__ in names), None)
