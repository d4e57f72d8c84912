"""Changes TRL 1.12's PPOTrainer so that it applies all settings of its config. TRL's training loop is unchanged.

Importing this module raises :class:`MissingExtraError` with TRL 1.13 or newer, which has no PPO.
"""

import copy
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import trl
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin
from transformers import DataCollatorWithPadding

from autotrain_mem.support.errors import MissingExtraError, TrainingError, UnsupportedModelError
from autotrain_mem.trainers import ppo_checks, ppo_resume

with warnings.catch_warnings():
    # TRL warns about experimental modules on import. There is no other PPO trainer, so the warning does not help.
    warnings.filterwarnings("ignore", message=".*trl.experimental")
    try:
        from trl.experimental.ppo import PPOConfig
        from trl.experimental.ppo import ppo_trainer as trl_ppo
    except ImportError as error:
        raise MissingExtraError(
            f"PPO needs trl 1.12, the last version that has it; trl {trl.__version__} is installed.",
            hint="pip install 'autotrain_mem[ppo]', or train with GRPO or RLOO, which need no value model.",
        ) from error

__all__ = ["PPOConfig", "PPOTrainer"]

_trl_batch_generation, _trl_forward, _trl_get_reward = trl_ppo.batch_generation, trl_ppo.forward, trl_ppo.get_reward


class _TrainingEnded(Exception):
    """Ends TRL's loop. It is raised when the loop requests a batch after the last update."""


class _PolicyAndValue(trl_ppo.PolicyAndValueWrapper):  # type: ignore[misc]  # TRL is untyped to mypy
    """Checkpoints activations of policy and value model, also after a generation. TRL's does so for the policy only."""

    before_forward: Callable[[], None]

    def checkpoint(self, options: Mapping[str, Any]) -> None:
        """Enables gradient checkpointing in both models, as ``transformers/trainer.py: train`` does in one."""
        options = {"use_reentrant": False, **options}
        own = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
        for model in (self.policy, self.value_model):
            try:
                # The older name has been deprecated since transformers 5.23.
                getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(options, **own)
            except ValueError as error:
                raise UnsupportedModelError(str(error), hint="Give --gradient_checkpointing false.") from error
        self.is_gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Pauses checkpointing for TRL's generation, since a checkpointed layer cannot use a KV cache."""
        self._paused = [module for module in self.modules() if getattr(module, "gradient_checkpointing", False)]
        for module in self._paused:
            module.gradient_checkpointing = False

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        """Resumes checkpointing after TRL's generation."""
        for module in self._paused:
            module.gradient_checkpointing = True

    def forward(self, **inputs: Any) -> Any:
        """Runs both models in training. The rollout calls the two models directly."""
        self.before_forward()
        return super().forward(**inputs)


class PPOTrainer(trl_ppo.PPOTrainer):  # type: ignore[misc]
    """Trains with proximal policy optimization as its config says, in one process or in several (DDP).

    It takes the arguments of TRL's PPOTrainer. These settings work here, but not in TRL: ``bf16`` and ``fp16``, also
    in the rollout; ``gradient_checkpointing`` of policy and value model; ``max_grad_norm``; ``max_steps`` (if
    ``total_episodes`` is also given, the smaller counts); ``data_seed``; ``train(resume_from_checkpoint=...)``; and a
    callback's request to stop. Gradients are always accumulated over ``gradient_accumulation_steps`` micro-batches. In
    the last batch of a pass over the data, TRL steps after each micro-batch. Checkpoints and the output folder hold the
    value model in ``value_model``. ``args`` is copied, and the tokenizer is set to pad on the left.

    Unchanged from TRL:

    - The optimizer steps after ``gradient_accumulation_steps`` micro-batches, also if ``num_mini_batches`` > 1. TRL's
      logged averages then include entries that are never filled: with 2 mini-batches, ``val/ratio`` is about 0.5. If
      ``num_mini_batches`` does not divide the accumulation, gradients carry over to the next update, and a resumed run
      starts without them.
    - ``logging_steps`` and ``eval_strategy`` have no effect: every update is logged, and ``eval_dataset`` only provides
      the prompts of the shown samples.
    - A policy trained without ``stop_token`` is saved with a generation config without an end token.
    - ``auto_find_batch_size``, ``torch_compile``, ``load_best_model_at_end``, ``group_by_length``,
      ``dataloader_num_workers`` and ``torch_empty_cache_steps`` have no effect.

    Raises:
        UsageError, DatasetFormatError, EmptyDatasetError: see :func:`ppo_checks.refuse` and :func:`ppo_checks.verify`.
        TrainingError: a setting of ``args`` did not take effect.
    """

    # transformers' Trainer.__init__ sets these, but TRL's PPOTrainer never calls it. Saving and loading read them.
    is_fsdp_xla_v1_enabled = False
    is_distributed_loading_by_transformers = False

    control: Any
    dataloader: Any

    def __init__(
        self,
        args: Any,
        processing_class: Any,
        model: Any,
        ref_model: Any,
        reward_model: Any,
        train_dataset: Any,
        value_model: Any,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: list[Any] | None = None,
        peft_config: Any = None,
    ) -> None:
        ppo_checks.refuse(args, processing_class, train_dataset, eval_dataset)
        processing_class.padding_side = "left"
        args = copy.copy(args)
        self._episodes_given = args.total_episodes is not None
        self._collates_prompts_only = data_collator is None
        self._grad_norms: list[torch.Tensor] = []
        with patch.multiple(
            trl_ppo, Accelerator=functools.partial(_accelerator, args), PolicyAndValueWrapper=_PolicyAndValue
        ):
            super().__init__(
                args=args,
                processing_class=processing_class,
                model=model,
                ref_model=ref_model,
                reward_model=reward_model,
                train_dataset=train_dataset,
                value_model=value_model,
                data_collator=self._collate,
                eval_dataset=eval_dataset,
                optimizers=optimizers,
                callbacks=callbacks,
                peft_config=peft_config,
            )
        self.data_collator = data_collator or DataCollatorWithPadding(processing_class)
        self._samples_every = getattr(self, "sample_generations_freq", 1)
        self.sample_generations_freq = 1  # TRL counts from its loop's start; generate_completions counts steps
        wrapper = self.accelerator.unwrap_model(self.model)

        def before_forward() -> None:
            wanted, device = self.args.mixed_precision, self.accelerator.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            if dtype is not {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]:
                raise TrainingError(f"The policy should train in mixed precision {wanted}, but runs under {dtype}.")

        wrapper.before_forward = before_forward
        if self.args.gradient_checkpointing:
            wrapper.checkpoint(self.args.gradient_checkpointing_kwargs or {})
        if wrapper is not self.model:
            # TRL reads both from DDP's wrapper. Set in __dict__, the policy does not become a submodule a second time.
            self.model.config = wrapper.config
            self.model.__dict__["policy"] = wrapper.policy
        # TRL calls ``step`` after every micro-batch. accelerate skips all calls but the last of an accumulation.
        step = self.optimizer.step

        def clip_and_step(closure: Any = None) -> None:
            if self.accelerator.sync_gradients and self.args.max_grad_norm:
                held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
                self._grad_norms.append(self.accelerator.clip_grad_norm_(held, self.args.max_grad_norm))
            step(closure)

        self.optimizer.step = clip_and_step
        ppo_checks.verify(self)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Applies ``max_steps``. TRL has counted the updates before this call, which creates their schedule."""
        args = self.args
        if args.max_steps > 0:
            num_training_steps = min(args.max_steps, num_training_steps if self._episodes_given else args.max_steps)
            args.num_total_batches = num_training_steps
            args.total_episodes = num_training_steps * args.batch_size
            if args.num_sample_generations > 0:
                self.sample_generations_freq = max(1, num_training_steps // args.num_sample_generations)
        super().create_optimizer_and_scheduler(num_training_steps)

    def _collate(self, rows: list[Any]) -> Any:
        """Collates ``input_ids`` only: TRL reads nothing else, and padding fails on text columns."""
        if self._collates_prompts_only:
            rows = [{"input_ids": row["input_ids"]} for row in rows]
        return self.data_collator(rows)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Trains, or resumes from a checkpoint as if the run had not been interrupted. ``resume_from_checkpoint``: a
        checkpoint's folder, or True for the newest checkpoint in ``args.output_dir``."""
        ppo_checks.verify(self)
        checkpoint = ppo_resume.find_checkpoint(resume_from_checkpoint, self.args.output_dir)
        callbacks, dataloader = list(self.callback_handler.callbacks), self.dataloader
        if checkpoint is not None:
            self.callback_handler.callbacks.insert(0, ppo_resume.Continuation(self._restore(checkpoint)))
        if self.accelerator.num_processes > 1:
            self.callback_handler.callbacks.append(ppo_resume.Agreement(self.accelerator))
        self.dataloader = self._prompts(dataloader, checkpoint)
        try:
            with patch.multiple(
                trl_ppo, batch_generation=self._generate_rollout, forward=self._forward, get_reward=self._judge
            ):
                super().train()
        except _TrainingEnded:
            # TRL's loop ends as follows after its last update. It has already counted the update that did not run.
            self.state.episode = self.state.global_step * self.args.batch_size
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            if self.control.should_save:
                self._save_checkpoint(self.model, trial=None)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        finally:
            self.dataloader, self.callback_handler.callbacks = dataloader, callbacks

    def _prompts(self, dataloader: Any, checkpoint: Path | None) -> Iterator[Any]:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        ppo_resume.seed_shuffling(dataloader, seed)
        restore_rng = functools.partial(self._load_rng_state, None if checkpoint is None else str(checkpoint))
        done = 0 if self.args.ignore_data_skip else self.state.global_step
        batches = ppo_resume.batches_after(done, dataloader, restore_rng)
        while not self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            yield next(batches)
        raise _TrainingEnded

    def _generate_rollout(self, *args: Any) -> Any:
        with self.accelerator.autocast():
            return _trl_batch_generation(*args)

    def _forward(self, model: Any, *args: Any) -> Any:
        """Runs the policy's training forward, or the reference's forward, for which autocast must be enabled here."""
        if model is self.model:
            return _trl_forward(model, *args)
        with self.accelerator.autocast():
            output = _trl_forward(model, *args)
        output.logits = self._full_precision(output.logits)
        return output

    def _judge(self, *args: Any) -> Any:
        with self.accelerator.autocast():
            scores, last_score, lengths = _trl_get_reward(*args)
        return self._full_precision(scores), self._full_precision(last_score), lengths

    def _full_precision(self, output: torch.Tensor) -> torch.Tensor:
        """Casts outputs as accelerate does for a model under autocast (``accelerator.py: prepare_model``)."""
        return output.float() if self.accelerator.native_amp else output

    def generate_completions(self, sampling: bool = False) -> None:
        """Shows samples if they are due, without changing the random state of training."""
        if self.eval_dataset is None or (sampling and (self.state.global_step - 1) % self._samples_every):
            return
        device = self.accelerator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            super().generate_completions(sampling)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds ``loss`` to the logs, and the mean ``grad_norm`` of the update's optimizer steps, before clipping."""
        if self._grad_norms:
            logs["grad_norm"] = sum(float(norm) for norm in self._grad_norms) / len(self._grad_norms)
            self._grad_norms.clear()
        if "loss/policy_avg" in logs:
            args = self.args
            filled = math.ceil(args.local_mini_batch_size / args.per_device_train_batch_size)
            total = logs["loss/policy_avg"] + args.vf_coef * logs["loss/value_avg"]
            logs["loss"] = total * args.gradient_accumulation_steps / filled
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the policy (or its adapter), and the value model in the subfolder ``value_model``."""
        if self.args.should_save:
            folder = output_dir or self.args.output_dir
            self.value_model.save_pretrained(os.path.join(folder, ppo_resume.VALUE_MODEL))
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # no process may continue or exit before the checkpoint is complete

    def _restore(self, checkpoint: Path) -> Any:
        """Loads models, optimizer, schedule and scaler. Returns the saved trainer state."""
        saved = trl_ppo.OnlineTrainerState.load_from_json(str(checkpoint / ppo_resume.STATE))
        if saved.episode != saved.global_step * self.args.batch_size:
            raise TrainingError(
                f"Cannot resume from {checkpoint}: its {saved.global_step} updates took {saved.episode} episodes, but "
                f"an update takes {self.args.batch_size} now, so its position in the data is unknown.",
                hint="Keep the product of per_device_train_batch_size, gradient_accumulation_steps and processes.",
            )
        ppo_resume.load_weights(self.policy_model, checkpoint)
        ppo_resume.load_weights(self.value_model, checkpoint / ppo_resume.VALUE_MODEL)
        self._load_optimizer_and_scheduler(str(checkpoint))
        self._load_scaler(str(checkpoint))
        return saved


def _accelerator(args: Any, gradient_accumulation_steps: int) -> Accelerator:
    """Returns the accelerator for TRL, with the precision of ``args``. Resets accelerate's shared state if that has
    another precision, as ``training_args.py: _setup_devices`` does."""
    _ = args.device  # sets up the process group, and the CPU if requested, before accelerate does
    if AcceleratorState._shared_state.get("_mixed_precision", args.mixed_precision) != args.mixed_precision:
        AcceleratorState._reset_state()
    accumulation = GradientAccumulationPlugin(num_steps=gradient_accumulation_steps, sync_with_dataloader=False)
    return Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_plugin=accumulation)
