"""Faults for guarded trainers, and what is told of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from autotrain_mem.training.guard.attach import Guard
from autotrain_mem.types import Incident, LearnedLimits

NO_MEANS_OVER_ROWS = (
    *("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected", "min_reward", "max_reward"),
    *("kl", "policy_loss", "cispo_clip_ratio", "clip_ratio/low_min", "clip_ratio/high_max"),
)
"""Of these a micro-batch that was split logs the mean over its rows."""


@dataclass
class Faults:
    """Raises like a full device at the n-th time that something happens, as often as it is told."""

    at: list[int]
    seen: int = 0

    def __call__(self, *_: Any) -> None:
        self.seen += 1
        if self.seen - 1 in self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nMore of it.")


@dataclass
class Told:
    incidents: list[Incident] = field(default_factory=list)
    learned: list[LearnedLimits] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """Bytes that were allocated at each incident."""

    def __call__(self, incident: Incident, learned: LearnedLimits) -> None:
        self.incidents.append(incident)
        self.learned.append(learned)

    @property
    def remedies(self) -> list[str]:
        return [incident.remedy for incident in self.incidents]


def blocks(made: Any) -> list[Any]:
    return [module for name, module in made.model.named_modules() if name.endswith((".layers.0", ".layers.1"))]


def failing(method: Any, faults: Faults) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        faults()
        return method(*args, **kwargs)

    return called


@contextmanager
def as_built(made: Any, **attributes: Any) -> Iterator[Any]:
    """A trainer with these attributes, which afterwards is as it was built: the next test may be of the same one."""
    was = dict(vars(made))
    vars(made).update(attributes)
    try:
        yield made
    finally:
        vars(made).clear()
        vars(made).update(was)
        vars(made.model).pop("generate", None)
        made.callback_handler.callbacks = [one for one in made.callback_handler.callbacks if type(one) is not Guard]
        for block in blocks(made):
            block._forward_pre_hooks.clear()


def numbers(made: Any, *names: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history for name in names if name in entry]


def fail_in_forward(made: Any, at: list[int], layer: int = 1, *, training: bool = True) -> None:
    """Only where gradients are wanted, or only where they are not: a reference model's forward is not counted."""
    faults = Faults(at)
    blocks(made)[layer].register_forward_pre_hook(lambda *_: faults() if torch.is_grad_enabled() is training else None)


def fail_in_backward(made: Any, at: list[int], layer: int = 1) -> None:
    """When the gradient of what a layer was given is there: those of the layers after it have been added."""
    faults = Faults(at)

    def watch(module: Any, args: Any) -> None:
        if args[0].requires_grad:
            args[0].register_hook(faults)

    blocks(made)[layer].register_forward_pre_hook(watch)
