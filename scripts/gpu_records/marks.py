"""Phase and module of every line of torch's memory history: the package's own following of a trainer, told to torch.

The history then says where an allocation was made without a stack trace for each, which would take most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autotrain_mem.trainers.phases import follow
from autotrain_mem.types import Owner, Phase

Say = Callable[[str], None]


class Marks:
    """What ``trainers.phases.follow`` tells a recorder, as far as a label needs it: phase and module.

    Args:
        say: Labels what is allocated from now on.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._names: dict[int, str] = {}
        self._stack: list[int] = []
        self.phase = Phase.LOAD
        self._label()

    def enter_phase(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self._stack.clear()
            self._label()

    def adopt_model(self, model: Any) -> None:
        self._names |= {id(module): name for name, module in model.named_modules()}

    def mark(self, tensor: Any, owner: Owner, name: str) -> None: ...

    def disown(self, tensor: Any) -> None: ...

    def optimizer_stepped(self, optimizer: Any) -> None: ...

    @contextmanager
    def following(self, trainer: Any) -> Iterator[None]:
        """Inside, the trainer trains."""
        import torch

        follow(trainer, self)
        hooks = torch.nn.modules.module
        entering = hooks.register_module_forward_pre_hook(self._enter)
        leaving = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()

    def _enter(self, module: Any, args: Any) -> None:
        self._stack.append(id(module))
        self._label()

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() != id(module):
            pass  # a checkpoint that stops its recomputation early leaves past modules further in
        self._label()

    def _label(self) -> None:
        module = self._names.get(self._stack[-1], "") if self._stack else ""
        self._say(f"{self.phase.value} {module}".rstrip())
