"""Tells a recorder where a trainer is: wraps the few methods of one trainer object at which a phase begins.

Works on any transformers Trainer, rehearsed, simulated or real; only the object is changed, never its class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autotrain_mem.rehearsal.recorder import Recorder
from autotrain_mem.spec import Owner, Phase

PAGED_FROM_ELEMENTS = 100_000
"""State of a paged optimizer from this size on lies in CUDA's managed memory, outside torch's allocator
(``bitsandbytes/optim/optimizer.py: Optimizer8bit.get_state_buffer``); the CPU build keeps it in ordinary tensors."""


def follow(trainer: Any, recorder: Recorder) -> None:
    """From now on, the trainer's forward, backward, optimizer step, evaluation and saving are told apart.

    ``compute_loss`` begins a forward, ``accelerator.backward`` a backward; what follows a backward (clipping, the
    step, zeroing) is the optimizer step. Gradients and optimizer state are found where they come to be: on the
    parameters after each backward, in the optimizer after its step.
    """
    recorder.adopt_model(trainer.model)
    trainer.compute_loss = _entering(trainer.compute_loss, recorder, Phase.FORWARD)
    trainer.evaluate = _within(trainer.evaluate, recorder, Phase.EVALUATE)
    trainer._save_checkpoint = _within(trainer._save_checkpoint, recorder, Phase.SAVE)
    accelerator = trainer.accelerator
    backward = accelerator.backward

    def watched_backward(*args: Any, **kwargs: Any) -> Any:
        recorder.enter_phase(Phase.BACKWARD)
        result = backward(*args, **kwargs)
        _mark_gradients(trainer.model, recorder)
        recorder.enter_phase(Phase.OPTIMIZER_STEP)
        return result

    accelerator.backward = watched_backward
    create_optimizer = trainer.create_optimizer

    def watched_create(*args: Any, **kwargs: Any) -> Any:
        optimizer = create_optimizer(*args, **kwargs)
        optimizer.register_step_post_hook(lambda *_: _mark_optimizer_state(optimizer, recorder))
        return optimizer

    trainer.create_optimizer = watched_create


def _entering(method: Callable[..., Any], recorder: Recorder, phase: Phase) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        if recorder.phase is not Phase.EVALUATE:
            recorder.enter_phase(phase)
        return method(*args, **kwargs)

    return watched


def _within(method: Callable[..., Any], recorder: Recorder, phase: Phase) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        before = recorder.phase
        recorder.enter_phase(phase)
        try:
            return method(*args, **kwargs)
        finally:
            recorder.enter_phase(before)

    return watched


def _mark_gradients(model: torch.nn.Module, recorder: Recorder) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            recorder.mark(parameter.grad, Owner.GRADIENTS, name)


def _mark_optimizer_state(optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    paged = getattr(optimizer, "is_paged", False)
    for state in optimizer.state.values():
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            recorder.mark(value, Owner.OPTIMIZER_STATE, str(name))
            if paged and value.numel() >= PAGED_FROM_ELEMENTS:
                recorder.disown(value)
