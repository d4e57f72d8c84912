"""Knows which parameters got their gradient before a backward pass ended in an error; no gradient is copied.

Autograd adds to a parameter's ``.grad`` once per backward pass, when all that flows into it is summed
(``torch/csrc/autograd/functions/accumulate_grad.h``), and then runs its post-accumulate hooks. A parameter whose hook
ran has the whole gradient of its micro-batch; in a repetition it must get nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Gradients:
    """Follows the gradients of one model's parameters."""

    def __init__(self) -> None:
        self._hooks: dict[int, Any] = {}
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []
        self._model: Any = None
        self._repeated = False

    def follow(self, model: Any) -> None:
        """Begin to note which parameters of a model got their gradient."""
        if model is self._model:
            return
        self._model = model

        def mark(parameter: Any) -> None:
            self._repeated |= id(parameter) in self._done
            self._done[id(parameter)] = parameter

        for parameter in model.parameters():
            if parameter.requires_grad and id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(mark)

    def release(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._done.clear()
        self._model = None

    def begin(self) -> None:
        """Begin a try: no gradient is there yet."""
        self._done = {}
        self.keep()

    def keep(self) -> None:
        """Freeze again what gets no gradient inside :meth:`kept`, whoever changed that.

        PEFT lets all of an adapter's weights require gradients when it is switched on again, as DPO does after each
        forward of the reference (``peft/tuners/tuners_utils.py: BaseTunerLayer.set_adapter``).
        """
        for parameter in self._kept:
            parameter.requires_grad_(False)

    def done(self) -> list[Any]:
        """Parameters that got their gradient since the try began."""
        return list(self._done.values())

    @property
    def come_in_parts(self) -> bool:
        """Whether some parameter got its gradient in more than one go: then it is not known which have all of it.

        So it is with reentrant checkpointing, which runs a backward pass for each stretch that it recomputes.
        """
        return self._repeated

    @contextmanager
    def kept(self, parameters: list[Any]) -> Iterator[None]:
        """Inside, these get no gradient."""
        known = {id(parameter) for parameter in self._kept}
        changed = [parameter for parameter in parameters if id(parameter) not in known]
        before = self._kept
        self._kept = [*before, *changed]
        self.keep()
        try:
            yield
        finally:
            self._kept = before
            for parameter in changed:
                parameter.requires_grad_(True)
