"""Attends to all windows of an image at once, and records what one call for each window would allocate.

Qwen's vision towers call attention for each window or image
(``transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py: Qwen2_5_VLVisionAttention.forward``). An image of 1024 x 768
needs 70 calls in each of 28 layers, in forward, recomputation and backward; that was nine tenths of a rehearsal's time.
Here a trial (``trial``) runs the calls of one layer one by one, once for each shape. Its allocations, work and frees
are repeated for all other layers and micro-steps. If a replay records anything else, all calls run one by one.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.rehearsal.windows.trial import Pass, Saving, Script, TensorLayout, Trial, UnclearTrialError, born_as
from autotrain_mem.types import Phase

TOWERS = frozenset(
    {"VisionAttention", "Qwen2_5_VLVisionAttention", "Qwen3VLVisionAttention", "Qwen3VLMoeVisionAttention"}
)
"""Classes that attend window by window (``transformers/models/*/modeling_*.py``)."""
FEWEST_WINDOWS = 4
"""The fewest windows for which a trial, which runs each call about six times, pays off."""

Interface = Callable[..., tuple[torch.Tensor, Any]]
"""The type of transformers' attention functions."""


@contextmanager
def windows_at_once(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Within the block, :data:`TOWERS` attend to all windows at once, if this records the same as separate calls."""
    homes = {type(module).__module__ for module in model.modules() if type(module).__name__ in TOWERS}
    with ExitStack() as stack:
        for home in homes:
            module = sys.modules[home]
            registry = getattr(module, "ALL_ATTENTION_FUNCTIONS", None)
            if hasattr(registry, "get_interface"):
                calls = _Calls(recorder)
                watched = _Instead(registry, get_interface=calls.interface_of(registry))
                stack.enter_context(patch.object(module, "torch", _Instead(torch, split=calls.split, cat=calls.cat)))
                stack.enter_context(patch.object(module, "ALL_ATTENTION_FUNCTIONS", watched))
        yield


class _Instead:
    """Wraps an object, with some attributes replaced."""

    def __init__(self, other: Any, **attributes: Any) -> None:
        self._other = other
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


@dataclass(frozen=True, slots=True)
class _OneByOne:
    """Holds windows that were attended to one by one, and their results."""

    windows: Any
    outputs: list[torch.Tensor]


_HOOKS = {"_checkpoint_hook": Saving.DROPPED, "_recomputation_hook": Saving.RECOMPUTED}


class _Calls:
    """Wraps a tower's attention, so that all calls of a layer become one."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._watches = False
        self._split: list[torch.Tensor] = []
        self._lengths: list[int] = []
        self._scripts: dict[Any, dict[Saving, Script] | None] = {}
        self._saved: dict[int, dict[int, int]] = {}
        """Maps the block of each stand-in for saved tensors to the blocks of these tensors, by number in the script."""

    def interface_of(self, registry: Any) -> Callable[..., Interface]:
        """Wraps a registry's sdpa implementation; other implementations get their windows one by one."""

        def get_interface(*names: Any) -> Interface:
            interface: Interface = registry.get_interface(*names)
            self._watches = interface is sdpa_attention_forward
            self._split = []
            return self.attend if self._watches else interface

        return get_interface

    def split(self, tensor: torch.Tensor, lengths: Any, dim: int = 0) -> Sequence[torch.Tensor]:
        """Replaces ``torch.split``: returns all windows as one tensor."""
        if not self._watches or dim != 2 or not isinstance(lengths, list) or len(lengths) < FEWEST_WINDOWS:
            return tuple(torch.split(tensor, lengths, dim))
        self._split.append(tensor)
        self._lengths = lengths
        return (tensor,)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **options: Any
    ) -> tuple[Any, None]:
        """Attends to one window, or to all windows that :meth:`split` returned as one."""
        inputs = (query, key, value)
        if not self._split:
            attended: tuple[Any, None] = sdpa_attention_forward(module, *inputs, *mask, **options)
            return attended
        options |= dict(zip(("attention_mask",), mask, strict=False))
        assert len(self._split) == len(inputs)
        assert all(one is other for one, other in zip(self._split, inputs, strict=True)), "not the split tensors"
        lengths, self._split = self._lengths, []
        if (script := self._script(module, inputs, lengths, options)) is None:
            return _one_by_one(module, inputs, lengths, options), None
        return self.play(script, inputs), None

    def cat(self, tensors: Sequence[Any], dim: int = 0, **options: Any) -> torch.Tensor:
        """Replaces ``torch.cat``; also joins windows that were attended to one by one."""
        if len(tensors) == 1 and isinstance(tensors[0], _OneByOne):
            tensors = tensors[0].outputs
        return torch.cat(tensors, dim, **options)

    def _script(
        self, module: Any, inputs: Sequence[torch.Tensor], lengths: list[int], options: dict[str, Any]
    ) -> Script | None:
        wanted = {torch.is_grad_enabled() and tensor.requires_grad for tensor in inputs}
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        hooked = Saving.KEPT if hooks is None else _HOOKS.get(hooks[0].__qualname__.split(".")[0])
        saving = Saving.NOTHING_SAVED if wanted == {False} else hooked
        if saving is None or len(wanted) > 1 or _get_current_dispatch_mode() is not self._recorder:
            return None
        if not all(isinstance(value, (bool, int, float, str, type(None))) for value in options.values()):
            return None
        # A checkpoint checks that it recomputes as many tensors as it saved: both passes are replayed, or neither.
        checkpoint = (Saving.DROPPED, Saving.RECOMPUTED)
        savings = checkpoint if saving in checkpoint else (saving,)
        layouts = tuple(map(TensorLayout.of, inputs))
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        key = (layouts, tuple(lengths), savings, torch.is_grad_enabled(), autocast, *sorted(options.items()))
        if key not in self._scripts:
            try:
                learned = {each: self._learned(each, module, layouts, lengths, options) for each in savings}
                if Saving.DROPPED in learned:  # its backward pass gets the recomputed tensors
                    recomputed = learned[Saving.RECOMPUTED].backward
                    learned[Saving.DROPPED] = learned[Saving.DROPPED]._replace(backward=recomputed)
                self._scripts[key] = learned
            except UnclearTrialError:
                self._scripts[key] = None
        return None if (scripts := self._scripts[key]) is None else scripts[saving]

    def _learned(
        self, saving: Saving, module: Any, layouts: Sequence[TensorLayout], lengths: list[int], options: dict[str, Any]
    ) -> Script:
        """Tries the windows one by one, then the script of that trial. Raises UnclearTrialError if the two differ."""

        def one_by_one(_: Recorder, inputs: Sequence[torch.Tensor]) -> Any:
            attended = _one_by_one(module, inputs, lengths, options)
            return attended, lambda: torch.cat(attended.outputs, dim=1)

        def at_once(apart: Recorder, inputs: Sequence[torch.Tensor]) -> Any:
            calls = _Calls(apart)
            output = calls.play(script, inputs)
            return [calls, output], lambda: torch.cat([output], dim=1)

        whole = Trial(self._recorder, layouts, saving, one_by_one)
        script = whole.script()
        played = Trial(self._recorder, layouts, saving, at_once)
        if whole.story() != played.story():
            raise UnclearTrialError
        return Script(
            script.forward.beside(whole, played, Phase.FORWARD),
            None if script.backward is None else script.backward.beside(whole, played, Phase.BACKWARD),
        )

    def play(self, script: Script, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Replays a script; returns a tensor in place of all windows' results."""
        if script.backward is None and not any(tensor.requires_grad for tensor in inputs):
            return self.forward(script.forward)[0]
        ends = [_Joint.apply(tensor, script.backward, index) for index, tensor in enumerate(inputs)]
        output: torch.Tensor = _Windows.apply(*ends, self, script)
        return output

    def forward(self, recording: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """Records a forward pass; returns tensors in place of the results, and of what is saved besides the inputs."""
        blocks: dict[int, int] = {}
        (output,) = self._write(recording, blocks)
        saved = self._carrier(replace(recording.results[0], shape=(1,), stride=(1,)), blocks.values())
        if blocks:
            self._saved[born_as(self._recorder, saved)] = blocks
        return output, saved

    def backward(self, recording: Pass, saved: torch.Tensor) -> list[torch.Tensor]:
        """Records a backward pass; returns tensors in place of all windows' gradients."""
        blocks = self._saved.pop(born_as(self._recorder, saved), {})
        self._recorder.detach(saved)
        return self._write(recording, blocks)

    def _write(self, recording: Pass, blocks: dict[int, int]) -> list[torch.Tensor]:
        self._recorder.replay(recording.steps, blocks)
        self._recorder.ledger.operators += recording.operators
        self._recorder.work.add(recording.counts)
        return [
            self._carrier(layout, [blocks.pop(number) for number in numbers])
            for layout, numbers in zip(recording.results, recording.with_results, strict=True)
        ]

    def _carrier(self, layout: TensorLayout, blocks: Iterable[int]) -> torch.Tensor:
        with _pop_mode_temporarily():
            tensor = layout.empty()
        self._recorder.attach(tensor, blocks)
        return tensor


class _Joint(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Replaces ``torch.split``: its backward pass joins the windows' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backward: Pass | None, index: int) -> Any:
        ctx.layout = None if backward is None else backward.results[index]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.layout.empty(), None, None


class _Windows(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Replaces the attention of all windows."""

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


def _one_by_one(module: Any, inputs: Sequence[torch.Tensor], lengths: list[int], options: dict[str, Any]) -> _OneByOne:
    windows = [torch.split(tensor, lengths, dim=2) for tensor in inputs]
    outputs = [sdpa_attention_forward(module, *rows, **options)[0] for rows in zip(*windows, strict=True)]
    return _OneByOne(windows, outputs)
