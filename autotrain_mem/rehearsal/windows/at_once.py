"""Attends to all windows of an image at once, and tells what each of them would have allocated.

Qwen's towers split queries, keys and values into windows, or into images, and call attention for each
(``transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py: Qwen2_5_VLVisionAttention.forward``): of a row with one image
of 1024 x 768 that is 70 calls in each of 28 layers, forward, again as a checkpoint recomputes it, and backward, which
was nine tenths of a rehearsal. Here a layer's calls are run one by one in a trial (``trial``), once for each of their
shapes. What that allocated, computed and freed is written down for every other layer and micro-step, in the same
order. A trial of what is run in the calls' place must tell the same, else they go on being made one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.rehearsal.windows.trial import (
    BackwardScript,
    Extra,
    ForwardScript,
    Saving,
    Script,
    TensorLayout,
    UnclearTrialError,
    born_as,
    tried,
)

TOWERS = frozenset(
    {"VisionAttention", "Qwen2_5_VLVisionAttention", "Qwen3VLVisionAttention", "Qwen3VLMoeVisionAttention"}
)
"""Classes that attend window by window (``transformers/models/*/modeling_*.py``)."""
FEWEST_WINDOWS = 4
"""Fewer are not worth a trial, which makes each call some six times."""

Interface = Callable[..., tuple[torch.Tensor, Any]]
"""Attention as transformers calls it."""


@contextmanager
def windows_at_once(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Within the block, a model of this class attends to all windows at once where that records the same."""
    homes = {type(module).__module__ for module in model.modules() if type(module).__name__ in TOWERS}
    with ExitStack() as stack:
        for home in homes:
            module = sys.modules[home]
            registry = getattr(module, "ALL_ATTENTION_FUNCTIONS", None)
            if hasattr(registry, "get_interface"):
                calls = _Calls(recorder)
                stack.enter_context(patch.object(module, "torch", _Torch(calls)))
                stack.enter_context(patch.object(module, "ALL_ATTENTION_FUNCTIONS", _Registry(registry, calls)))
        yield


class _Torch:
    def __init__(self, calls: _Calls) -> None:
        self.split, self.cat = calls.split, calls.cat

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Registry:
    def __init__(self, registry: Any, calls: _Calls) -> None:
        self._registry, self._calls = registry, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def get_interface(self, *names: Any) -> Interface:
        """Returns what transformers knows by a name, watched where it is sdpa."""
        interface: Interface = self._registry.get_interface(*names)
        return self._calls.watched(interface)


class _OneByOne:
    """Holds the results of windows that were attended to one by one, with the windows."""

    def __init__(self, windows: Any, outputs: list[torch.Tensor]) -> None:
        self.windows, self.outputs = windows, outputs


class _Calls:
    """Wraps attention for a tower: the calls of one layer come as one."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._watches = False
        self._split: list[torch.Tensor] = []
        self._lengths: list[int] = []
        self._scripts: dict[Any, dict[Saving, Script] | None] = {}
        self._saved: dict[int, dict[int, int]] = {}
        """For each tensor that carries what is saved, the blocks by their numbers in the script."""

    # -- what a tower calls ----------------------------------------------------------------------------------------

    def watched(self, interface: Interface) -> Interface:
        """Replaces sdpa; other implementations are left alone, and so are the windows that it gets."""
        self._watches = interface is sdpa_attention_forward
        self._split = []
        return self.attend if self._watches else interface

    def split(self, tensor: torch.Tensor, lengths: Any, dim: int = 0) -> Sequence[torch.Tensor]:
        """``torch.split``; windows come as one piece."""
        if not self._watches or dim != 2 or not isinstance(lengths, list) or len(lengths) < FEWEST_WINDOWS:
            return tuple(torch.split(tensor, lengths, dim))
        self._split.append(tensor)
        self._lengths = lengths
        return (tensor,)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **options: Any
    ) -> tuple[Any, None]:
        """Attends to one window, or to those that came as one."""
        inputs = (query, key, value)
        if not self._split:
            attended: tuple[Any, None] = sdpa_attention_forward(module, *inputs, *mask, **options)
            return attended
        options |= dict(zip(("attention_mask",), mask, strict=False))
        assert len(self._split) == len(inputs)
        assert all(one is other for one, other in zip(self._split, inputs, strict=True)), "these are not the windows"
        lengths, self._split = self._lengths, []
        saving = _saving(inputs)
        script = None if saving is None else self._script(saving, module, inputs, lengths, options)
        if script is None:
            return _OneByOne(*_one_by_one(module, inputs, lengths, options)), None
        return self.play(script, inputs), None

    def cat(self, tensors: Sequence[Any], dim: int = 0, **options: Any) -> torch.Tensor:
        """``torch.cat``, also of windows that were attended to one by one."""
        if len(tensors) == 1 and isinstance(tensors[0], _OneByOne):
            tensors = tensors[0].outputs
        return torch.cat(tensors, dim, **options)

    # -- what is known of them -------------------------------------------------------------------------------------

    def _script(
        self, saving: Saving, module: Any, inputs: Sequence[torch.Tensor], lengths: list[int], options: dict[str, Any]
    ) -> Script | None:
        if _get_current_dispatch_mode() is not self._recorder or not all(
            isinstance(value, (bool, int, float, str, type(None))) for value in options.values()
        ):
            return None
        savings = _TOGETHER[saving]
        layouts = tuple(map(TensorLayout.of, inputs))
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        key = (layouts, tuple(lengths), savings, torch.is_grad_enabled(), autocast, *sorted(options.items()))
        if key not in self._scripts:
            try:
                learned = {each: self._learned(each, module, layouts, lengths, options) for each in savings}
                if Saving.DROPPED in learned:  # its graph gets what is recomputed
                    recomputed = learned[Saving.RECOMPUTED].backward
                    learned[Saving.DROPPED] = replace(learned[Saving.DROPPED], backward=recomputed)
                self._scripts[key] = learned
            except UnclearTrialError:
                self._scripts[key] = None
        scripts = self._scripts[key]
        return None if scripts is None else scripts[saving]

    def _learned(
        self, saving: Saving, module: Any, layouts: Sequence[TensorLayout], lengths: list[int], options: dict[str, Any]
    ) -> Script:
        """Tries the windows one by one, and what is run in their place. Raises UnclearTrialError where they differ."""

        def one_by_one(_: Recorder, inputs: Sequence[torch.Tensor]) -> Any:
            windows, outputs = _one_by_one(module, inputs, lengths, options)
            return [windows, outputs], lambda: torch.cat(outputs, dim=1)

        def at_once(apart: Recorder, inputs: Sequence[torch.Tensor]) -> Any:
            calls = _Calls(apart)
            output = calls.play(script, inputs)
            return [calls, output], lambda: torch.cat([output], dim=1)

        whole = tried(self._recorder, layouts, saving, one_by_one)
        script = whole.script()
        played = tried(self._recorder, layouts, saving, at_once)
        if whole.story() != played.story():
            raise UnclearTrialError
        forward, backward = (one.over(other) for one, other in zip(whole.extras(), played.extras(), strict=True))
        return Script(
            forward=replace(script.forward, extra=forward),
            backward=None if script.backward is None else replace(script.backward, extra=backward),
        )

    # -- what is run in their place --------------------------------------------------------------------------------

    def play(self, script: Script, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Runs a script; its result replaces all windows' results."""
        if script.backward is None and not any(tensor.requires_grad for tensor in inputs):
            return self.forward(script.forward)[0]
        ends = [_Joint.apply(tensor, self, script.backward, index) for index, tensor in enumerate(inputs)]
        output: torch.Tensor = _Windows.apply(*ends, self, script)
        return output

    def forward(self, script: ForwardScript) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a forward pass; returns what has the place of the results, and of what is saved beside the inputs."""
        blocks: dict[int, int] = {}
        self._recorder.play(script.steps, blocks)
        self._count(script.extra)
        output = self._carrier(script.joined, [blocks.pop(number) for number in script.with_outputs])
        saved = self._carrier(replace(script.joined, shape=(1,), stride=(1,)), blocks.values())
        if blocks:
            self._saved[born_as(self._recorder, saved)] = blocks
        return output, saved

    def backward(self, script: BackwardScript, saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Writes a backward pass; returns what has the place of all windows' gradients."""
        blocks = self._saved.pop(born_as(self._recorder, saved), {})
        self._recorder.let_go(saved)
        self._recorder.play(script.steps, blocks)
        self._count(script.extra)
        return tuple(
            self._carrier(layout, [blocks.pop(number) for number in numbers])
            for layout, numbers in zip(script.gradients, script.with_gradients, strict=True)
        )

    def _carrier(self, layout: TensorLayout, blocks: Any) -> torch.Tensor:
        with _pop_mode_temporarily():
            tensor = layout.empty()
        self._recorder.carry(tensor, blocks)
        return tensor

    def _count(self, extra: Extra) -> None:
        self._recorder.ledger.operators += extra.operators
        self._recorder.work.add(extra.counts)


class _Joint(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Replaces ``torch.split``: its backward pass joins the windows' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, calls: _Calls, script: BackwardScript | None, index: int) -> Any:
        ctx.layout = None if script is None else script.gradients[index]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.layout.empty(), None, None, None


class _Windows(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Replaces all windows' attention."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, calls: _Calls, script: Script
    ) -> torch.Tensor:
        output, saved = calls.forward(script.forward)
        ctx.calls, ctx.script = calls, script
        ctx.save_for_backward(query, key, value, saved)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *_, saved = ctx.saved_tensors
        return (*ctx.calls.backward(ctx.script.backward, saved), None, None)


def _one_by_one(
    module: Any, inputs: Sequence[torch.Tensor], lengths: list[int], options: dict[str, Any]
) -> tuple[list[Any], list[torch.Tensor]]:
    """Runs the windows one by one, as the tower does."""
    windows = [torch.split(tensor, lengths, dim=2) for tensor in inputs]
    return windows, [sdpa_attention_forward(module, *rows, **options)[0] for rows in zip(*windows, strict=True)]


# -- what becomes of what is saved -------------------------------------------------------------------------------------

_TOGETHER = {
    Saving.NOTHING_SAVED: (Saving.NOTHING_SAVED,),
    Saving.KEPT: (Saving.KEPT,),
    **dict.fromkeys((Saving.DROPPED, Saving.RECOMPUTED), (Saving.DROPPED, Saving.RECOMPUTED)),
}
"""What a checkpoint saves it counts, and counts again as it recomputes: both are played, or neither."""
_HOOKS = {"_checkpoint_hook": Saving.DROPPED, "_recomputation_hook": Saving.RECOMPUTED}


def _saving(inputs: Sequence[torch.Tensor]) -> Saving | None:
    """Returns what autograd does with saved tensors at the moment; None where that is unknown, or differs between
    inputs."""
    wanted = {torch.is_grad_enabled() and tensor.requires_grad for tensor in inputs}
    if len(wanted) > 1:
        return None
    if wanted == {False}:
        return Saving.NOTHING_SAVED
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return Saving.KEPT
    return _HOOKS.get(hooks[0].__qualname__.split(".")[0])
