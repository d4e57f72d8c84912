"""Holds what most trainers need: nothing of their own. A method's module takes these by name for what it leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.loss_basis import Basis
from autotrain_mem.spec import Knobs
from autotrain_mem.spec.preflight import Finding


def rehearsal_changes(arguments: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
    """Nothing is different."""
    return {}


def without_precomputing() -> AbstractContextManager[Any]:
    """The trainer makes no pass over all the data before it trains."""
    return nullcontext()


def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> AbstractContextManager[None]:
    """Nothing to arrange: the trainer's data are all there is."""
    return nullcontext()


def check(filled: Configs, *, to_train: bool) -> None:
    """Nothing beyond what TRL's config refuses by itself."""


def tokenizer_findings(filled: Configs, tokenizer: Any) -> Iterable[Finding]:
    """Nothing beyond what holds for every trainer."""
    return ()


def why_not_split(trainer: Any) -> str | None:
    """The loss is a mean over rows, or over pairs."""
    return None


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """The loss is a mean over rows, or over pairs."""
    return Basis.UNITS


def logged_basis(trainer: Any, name: str) -> Basis:
    """Every number is a mean over rows, or over pairs."""
    return Basis.UNITS
