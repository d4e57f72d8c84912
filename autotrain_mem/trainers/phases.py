"""Reports a trainer's phases to a recorder. It wraps the methods at which a phase begins."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from autotrain_mem.trainers.model_support import statistics
from autotrain_mem.types import Owner, Phase

PAGED_FROM_ELEMENTS = 100_000
"""The least number of elements of a state tensor that a paged optimizer keeps in CUDA managed memory, outside torch's
allocator (``bitsandbytes/optim/optimizer.py: Optimizer8bit.get_state_buffer``). On the CPU it is an ordinary tensor."""


class PhaseRecorder(Protocol):
    """Records the phases of a trainer, and in a rehearsal also the owners of tensors."""

    @property
    def phase(self) -> Phase:
        """Returns the trainer's current phase."""

    def enter_phase(self, phase: Phase) -> None:
        """Starts a phase."""

    def adopt_model(self, model: torch.nn.Module, role: str = "") -> None:
        """Records the model's parameters and buffers as weights. ``role`` names a model that is not trained."""
        return

    def mark(self, tensor: torch.Tensor, owner: Owner, name: str) -> None:
        """Records ``owner`` as the owner of a tensor's storage."""
        return

    def disown(self, tensor: torch.Tensor) -> None:
        """Records that a tensor's storage is outside torch's allocator."""
        return

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Reports the end of an optimizer's step."""
        return


def follow(trainer: Any, recorder: PhaseRecorder) -> None:
    """Reports each phase of the trainer to the recorder from now on, and records the weights of all its models.

    ``compute_loss`` begins the forward phase, and ``accelerator.backward`` the backward phase. When backward returns,
    the optimizer phase begins. Online trainers have two more phases: generation while the policy's ``generate`` (or
    vLLM's) runs, then scoring until the next forward.
    """
    models = {name: getattr(trainer, name, None) for name in ("ref_model", "reward_model", "teacher_model")}
    rewards = [each for each in getattr(trainer, "reward_funcs", None) or () if isinstance(each, torch.nn.Module)]
    models |= {f"reward_model_{number}" if number else "reward_model": model for number, model in enumerate(rewards)}
    for role, model in {**models, "": trainer.model}.items():
        if isinstance(model, torch.nn.Module):
            recorder.adopt_model(model, role)
            for name, tensor in statistics(model):
                recorder.mark(tensor, Owner.WEIGHTS, f"{role}.{name}" if role else name)
    trainer.compute_loss = _watched(trainer.compute_loss, recorder, Phase.FORWARD, Phase.FORWARD)
    trainer.evaluate = _watched(trainer.evaluate, recorder, Phase.EVALUATE)
    trainer._save_checkpoint = _watched(trainer._save_checkpoint, recorder, Phase.SAVE)
    _follow_backward(trainer, recorder)
    _follow_optimizer(trainer, recorder)
    if hasattr(trainer, "_generate_and_score_completions"):
        _follow_groups(trainer, recorder)
    elif hasattr(trainer, "value_model"):
        _follow_ppo(trainer, recorder)
    elif hasattr(trainer, "generate_on_policy_outputs"):
        # A step of GKD begins with a generation by the student or the teacher, or without one.
        for model in (trainer.model, trainer.teacher_model):
            _follow_generation(trainer.accelerator.unwrap_model(model), recorder)


def _follow_groups(trainer: Any, recorder: PhaseRecorder) -> None:
    """Follows GRPO, RLOO, distillation and online DPO, in which one method both generates and scores."""
    score = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = _watched(score, recorder, Phase.SCORE, Phase.SCORE)
    _follow_generation(trainer.accelerator.unwrap_model(trainer.model), recorder)
    if (engine := getattr(trainer, "vllm_generation", None)) is not None:
        engine.generate = _watched(engine.generate, recorder, Phase.GENERATE, Phase.SCORE)
        engine.sync_weights = _watched(engine.sync_weights, recorder, Phase.GENERATE, Phase.SCORE)
    if not hasattr(trainer, "_forward"):
        return
    forward = trainer._forward

    def forward_or_score(*args: Any, **kwargs: Any) -> Any:
        """Enters a phase: online DPO uses ``_forward`` first for the policy, with gradients, and then to score."""
        recorder.enter_phase(Phase.FORWARD if torch.is_grad_enabled() else Phase.SCORE)
        return forward(*args, **kwargs)

    trainer._forward = forward_or_score


def _follow_ppo(trainer: Any, recorder: PhaseRecorder) -> None:
    """Follows PPO with hooks on its models, since its loop has no ``compute_loss``. Classifiers get the hook on their
    backbone, which ``get_reward`` calls in place of the classifier (``trl/experimental/utils.py``)."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    classifiers = (model.value_model, trainer.accelerator.unwrap_model(trainer.reward_model))
    backbones = [getattr(classifier, classifier.base_model_prefix) for classifier in classifiers]

    def before_forward(module: torch.nn.Module, args: Any) -> None:
        if recorder.phase not in (Phase.GENERATE, Phase.EVALUATE):
            recorder.enter_phase(Phase.FORWARD if torch.is_grad_enabled() else Phase.SCORE)

    for module in (model, model.policy, trainer.ref_model, *backbones):
        if module is not None:
            module.register_forward_pre_hook(before_forward)
    trainer.generate_completions = _watched(trainer.generate_completions, recorder, Phase.EVALUATE)
    _follow_generation(model.policy, recorder)


def _follow_generation(policy: Any, recorder: PhaseRecorder) -> None:
    """Marks the cache before and after each forward in ``generate`` as KV cache. After ``generate``, scoring begins."""
    policy.generate = _watched(policy.generate, recorder, Phase.GENERATE, Phase.SCORE)

    def before(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if recorder.phase is Phase.GENERATE:
            _mark_cache(kwargs.get("past_key_values"), recorder)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if recorder.phase is Phase.GENERATE:
            _mark_cache(getattr(output, "past_key_values", None), recorder)

    generating = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    generating.register_forward_pre_hook(before, with_kwargs=True)
    generating.register_forward_hook(after)


def _mark_cache(cache: Any, recorder: PhaseRecorder) -> None:
    for layer in getattr(cache, "layers", ()):
        states = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for name in ("conv_states", "recurrent_states"):
            states += getattr(layer, name, {}).values()
        for state in states:
            if isinstance(state, torch.Tensor):
                recorder.mark(state, Owner.KV_CACHE, "kv_cache")


def _follow_backward(trainer: Any, recorder: PhaseRecorder) -> None:
    accelerator = trainer.accelerator
    backward = accelerator.backward

    def watched_backward(*args: Any, **kwargs: Any) -> Any:
        recorder.enter_phase(Phase.BACKWARD)
        result = backward(*args, **kwargs)
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                recorder.mark(parameter.grad, Owner.GRADIENTS, name)
        recorder.enter_phase(Phase.OPTIMIZER_STEP)
        return result

    accelerator.backward = watched_backward


def _follow_optimizer(trainer: Any, recorder: PhaseRecorder) -> None:
    """Follows the optimizer. Most trainers create it when training begins; PPO's trainer already has one."""

    def watch(optimizer: Any) -> Any:
        def after_step(*_: Any) -> None:
            paged = getattr(optimizer, "is_paged", False)
            for state in optimizer.state.values():
                for name, value in state.items():
                    if not isinstance(value, torch.Tensor):
                        continue
                    recorder.mark(value, Owner.OPTIMIZER_STATE, str(name))
                    if paged and value.numel() >= PAGED_FROM_ELEMENTS:
                        recorder.disown(value)
            recorder.optimizer_stepped(optimizer)

        optimizer.register_step_post_hook(after_step)
        return optimizer

    create_optimizer = trainer.create_optimizer
    trainer.create_optimizer = lambda *args, **kwargs: watch(create_optimizer(*args, **kwargs))
    if trainer.optimizer is not None:
        watch(getattr(trainer.optimizer, "optimizer", trainer.optimizer))


def _watched(
    method: Callable[..., Any], recorder: PhaseRecorder, phase: Phase, after: Phase | None = None
) -> Callable[..., Any]:
    """Wraps a method: when it is called, ``phase`` begins; when it returns, ``after`` or else the earlier phase begins.

    During evaluation the phase does not change.
    """

    def watched(*args: Any, **kwargs: Any) -> Any:
        if (before := recorder.phase) is Phase.EVALUATE:
            return method(*args, **kwargs)
        recorder.enter_phase(phase)
        try:
            return method(*args, **kwargs)
        finally:
            recorder.enter_phase(after or before)

    return watched
