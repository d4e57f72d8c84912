"""Runs the longest rows once, forward and backward, before the first step, to fail early if they do not fit."""

import copy
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW
from torch.utils._python_dispatch import _disable_current_modes
from transformers import GenerationConfig

from autotrain_mem.data.image_sizes import has_images
from autotrain_mem.data.longest_rows import are_conversations, fetched, longest_of, repeated, samples_completions
from autotrain_mem.methods import online
from autotrain_mem.methods.interface import method_of_trainer
from autotrain_mem.methods.row_lengths import prepared_lengths
from autotrain_mem.settings.optimizer_verdicts import optimizer_of
from autotrain_mem.support.errors import DatasetFormatError
from autotrain_mem.training.guard.context import keep_rng_state


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestBatch:
    """The result of running the longest rows before the first step, or why they were not run."""

    rows: int = 0
    longest_tokens: int = 0
    """Tokens of the longest row, or of the longest prompt if completions are sampled."""
    seconds: float = 0.0
    why_not: str = ""


def attach_longest_batch(
    trainer: Any, on_result: Callable[[LongestBatch], None], on_error: "OnError | None" = None
) -> None:
    """Runs the longest rows before the first micro-step of this trainer, on every rank. Attach a guard before this.

    The trainer's current ``training_step`` is called with these rows, so a guard splits them like any other batch.
    Out-of-memory errors are passed on.

    Online methods sample completions of full length with transformers. A vLLM engine is replaced, since its memory is
    constant and its random state cannot be restored. Reward models are called, reward functions are not. PPO has no
    ``training_step``, and its loop empties the cache in every update (``trl/experimental/ppo/ppo_trainer.py: train``):
    only a probe runs its longest rows.
    """
    step = trainer.training_step

    def first_step(model: Any, *args: Any, **kwargs: Any) -> Any:
        if pending:
            pending.clear()
            if vars(trainer).get("training_step") is first_step:  # else it has been wrapped, and just passes through
                trainer.training_step = step
            on_result(run_longest_batch(trainer, model, step, on_error))
        return step(model, *args, **kwargs)

    pending = [True]
    trainer.training_step = first_step


def run_longest_batch(
    trainer: Any, model: Any, step: Callable[..., Any], on_error: "OnError | None" = None
) -> LongestBatch:
    """Runs the longest rows once through ``step``, and restores everything."""
    if why_not := _why_not(trainer):
        return LongestBatch(why_not=why_not)
    started, method = time.perf_counter(), method_of_trainer(trainer)
    # Trackers would log the timings of the step's parts (``trl/extras/profiling.py: profiling_context``).
    with untouched(trainer), patch.object(trainer.args, "report_to", []):
        try:
            rows, longest_tokens = _rows(trainer)
        except DatasetFormatError as error:  # an unreadable image, which training may never use
            return LongestBatch(why_not=str(error).splitlines()[0].rstrip("."))
        collated = trainer.data_collator(rows)
        batch = collated if samples_completions(trainer) else trainer._prepare_inputs(collated)
        items = trainer._get_num_items_in_batch([batch], trainer.args.device)
        with with_memory_of_later_steps(trainer, on_error), _sampling_to_the_end(trainer):
            # Each step gets a copy: GKD adds answers to its inputs.
            for way in (nullcontext(),) if method is None else method.ways_of_step(trainer):
                with way:
                    step(model, copy.copy(batch), items)
            if keeps_whole_gradients(model):  # FSDP2 reduces gradients in a step's last micro-batch
                model.set_requires_gradient_sync(True)
                try:
                    step(model, copy.copy(batch), items)
                finally:
                    model.set_requires_gradient_sync(False)
        del batch
    return LongestBatch(rows=len(rows), longest_tokens=longest_tokens, seconds=time.perf_counter() - started)


def _why_not(trainer: Any) -> str:
    dataset, optimizer = trainer.train_dataset, optimizer_of(trainer.args)
    if not all(hasattr(dataset, name) for name in ("select_columns", "with_format", "__len__")):
        return "the training data are a stream, whose longest rows are unknown"
    if not len(dataset):
        return "the training data have no rows"
    is_known = has_images(dataset.column_names) or (samples_completions(trainer) and "prompt" in dataset.column_names)
    is_known = is_known or are_conversations(trainer, dataset)
    if prepared_lengths(dataset) is None and not is_known:
        return f"the lengths of rows with these columns are unknown: {', '.join(dataset.column_names)}"
    if str(getattr(trainer.accelerator.distributed_type, "value", "")) == "DEEPSPEED":
        return "DeepSpeed's backward steps the optimizer itself"
    has_hooks = any(parameter._post_accumulate_grad_hooks for parameter in trainer.model.parameters())
    if "lomo" in optimizer or "layerwise" in optimizer or has_hooks:
        return "the optimizer steps within the backward pass"
    user_code = [name for name in ("tools", "environment_factories", "rollout_func") if getattr(trainer, name, None)]
    if user_code:
        return f"sampling calls user code ({', '.join(user_code)}), which may have side effects"
    if getattr(trainer, "use_transformers_continuous_batching", False):
        return "transformers' continuous batching casts the weights for sampling"
    return ""


def _rows(trainer: Any) -> tuple[list[Any], int]:
    """Returns one process's rows, as the dataloader passes them to the collator, and the tokens of the longest."""
    if not samples_completions(trainer):
        numbers, tokens = longest_of(trainer, trainer.train_dataset, trainer._train_batch_size)
        return fetched(trainer, trainer.train_dataset, numbers), tokens
    args, group, wanted = trainer.args, online.answers_of(trainer), online.prompts_at_once(trainer)
    longest, tokens = longest_of(trainer, trainer.train_dataset, wanted)
    # A prompt's repetitions for its answers are side by side (``trl/trainer/utils.py: RepeatSampler``).
    everyone = [number for number in repeated(longest, wanted) for _ in range(group)]
    own = len(everyone) // args.world_size
    return fetched(trainer, trainer.train_dataset, everyone[own * args.process_index :][:own]), tokens


def _sampling_to_the_end(trainer: Any) -> AbstractContextManager[Any]:
    """Within the block, completions have full length, and stand-ins for reward functions return differing rewards."""
    if not samples_completions(trainer):
        return nullcontext()
    changes: dict[str, Any] = {}
    if "reward_funcs" in vars(trainer):
        models = models_of(trainer)

        def differing(prompts: Sequence[Any], **_: Any) -> list[float]:
            return [float(number % 2) for number, _ in enumerate(prompts)]

        changes["reward_funcs"] = [
            judge if any(judge is model for model in models) else differing for judge in trainer.reward_funcs
        ]
    if getattr(trainer, "use_vllm", False):
        changes["vllm_generation"] = _Completions(trainer)
    else:
        options = {**trainer.generation_config.to_dict(), "min_new_tokens": trainer.max_completion_length}
        changes["generation_config"] = GenerationConfig.from_dict(options)
    return patch.multiple(trainer, **changes)  # type: ignore[no-any-return]


class _Completions:
    """Replaces ``trl/generation/vllm_generation.py: VLLMGeneration`` with completions of full length."""

    def __init__(self, trainer: Any) -> None:
        self._tokens: int = trainer.max_completion_length
        special = (trainer._tokenizer.eos_token_id, trainer._tokenizer.pad_token_id)
        self._token = next(token for token in range(3) if token not in special)

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, list[list[int]], list[list[list[float]]], Any]:
        """Returns prompts, completions, one log-probability of 0 for each of their tokens, and None."""
        completions = [[self._token] * self._tokens for _ in prompts]
        return prompts, completions, [[[0.0] for _ in completion] for completion in completions], None

    def sync_weights(self) -> None:
        """Does nothing: no weight has changed."""


_KEPT_BY_VALUE = ("_metrics", "_stored_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "_textual_logs")
"""Attributes that a step modifies in place (``trl/trainer/grpo_trainer.py: __init__``; all TRL trainers have
``_metrics``): the step gets copies."""

_PLAIN = (bool, int, float, str, type(None), list, tuple, dict, set, deque, torch.Tensor)
"""Types of values that a step may set on a trainer: counters, buffers of completions, running entropies. A value of any
other type, such as a replaced method, is meant to stay."""

SMALLEST_8BIT_ELEMENTS = 4096
"""bitsandbytes keeps the state of smaller parameters in 32 bits (``bitsandbytes/optim/optimizer.py: Optimizer2State``,
``min_8bit_size``)."""

Undo = Callable[[], None]
OnError = Callable[[BaseException], None]
"""Called with an error before the stand-ins for later steps' tensors are freed: a report can still include them."""


@contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Restores gradients, random states, counters, metrics, and the buffers of all the trainer's models afterwards.

    A step changes these in ``transformers/trainer.py: training_step``, TRL 1.12 and 1.16 (``training_step``,
    ``_prepare_inputs``, ``compute_loss``) and ``accelerate/accelerator.py: backward``. DDP's forward counters are not
    restored: they advance equally on all ranks. The block must not step the optimizer.
    """
    shared = trainer.accelerator.gradient_state._shared_state
    modules = list({id(module): module for model in models_of(trainer) for module in model.modules()}.values())
    counting = [trainer, trainer.state, *(each for each in modules if not isinstance(each, DistributedDataParallel))]
    if trainer.accelerator.scaler is not None:
        counting.append(trainer.accelerator.scaler)
    undo: list[Undo] = [
        keep_rng_state(),
        functools.partial(shared.update, dict(shared)),
        *map(_attributes, counting),
        *(_buffers(module) for module in modules if module._buffers),
    ]
    parameters = {id(each): each for module in modules for each in module._parameters.values() if each is not None}
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    for parameter in parameters.values():
        parameter.grad = None
    try:
        yield
    finally:
        for back in undo:
            back()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module in modules:
            if isinstance(module, FSDPModule):
                _drop_whole_gradients(module)


def models_of(trainer: Any) -> list[torch.nn.Module]:
    """Lists a trainer's models, each once: the wrapped policy, reference, reward, value and teacher models."""
    names = ("model_wrapped", "model", "ref_model", "reward_model", "value_model", "teacher_model")
    candidates = [getattr(trainer, name, None) for name in names]
    candidates += getattr(trainer, "reward_funcs", None) or ()
    unique = {id(model): model for model in candidates if isinstance(model, torch.nn.Module)}
    return list(unique.values())


def _attributes(kept: Any) -> Undo:
    """Returns a function that restores an object's plain attributes, including those that a step modifies in place."""
    held = vars(kept)
    before = dict(held)
    held.update({name: copy.deepcopy(held[name]) for name in _KEPT_BY_VALUE if name in held})

    def back() -> None:
        for name in [name for name in held if name not in before and isinstance(held[name], _PLAIN)]:
            del held[name]
        for name, value in before.items():
            if held.get(name) is not value and isinstance(value, _PLAIN) and isinstance(held.get(name), _PLAIN):
                held[name] = value

    return back


def _buffers(module: torch.nn.Module) -> Undo:
    """Returns a function that restores a module's buffers, such as batch norm statistics."""
    before = dict(module._buffers)
    with torch.no_grad(), _disable_current_modes():  # a simulated card must not count these copies on the host
        copies = {name: buffer.detach().to("cpu", copy=True) for name, buffer in before.items() if buffer is not None}

    def back() -> None:
        module._buffers.clear()
        module._buffers.update(before)
        with torch.no_grad(), _disable_current_modes():
            for name, value in copies.items():
                before[name].copy_(value)

    return back


def keeps_whole_gradients(model: torch.nn.Module) -> bool:
    """Returns whether FSDP2 keeps unsharded gradients in this micro-step, to reduce them in the step's last one."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return not all(group.reduce_grads for each in modules for group in each._get_fsdp_state()._fsdp_param_groups)


def _drop_whole_gradients(module: FSDPModule) -> None:
    """Drops the gradients that FSDP2 has not yet reduced to its shards."""
    # torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: post_backward
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


@contextmanager
def with_memory_of_later_steps(trainer: Any, on_error: OnError | None = None) -> Iterator[None]:
    """Within the block, stand-ins for optimizer state and accumulated gradients are allocated, as in later steps. They
    match the real tensors one by one, so that those later reuse the cached blocks."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    stand_ins: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    try:
        for parameter, dtype in _kept_by_adam(optimizer):
            moments = {name: torch.empty_like(parameter, dtype=dtype) for name in ("first", "second")}
            stand_ins[parameter] = optimizer.state[parameter] = moments
        if trainer.args.gradient_accumulation_steps > 1 and not keeps_whole_gradients(trainer.model):
            for parameter in trainer.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        yield
    except BaseException as error:
        if on_error is not None:
            on_error(error)
        raise
    finally:
        for parameter in stand_ins:
            del optimizer.state[parameter]
        stand_ins.clear()
        for parameter in trainer.model.parameters():
            parameter.grad = None


def _kept_by_adam(optimizer: Any) -> list[tuple[torch.Tensor, torch.dtype]]:
    """Returns the parameters of torch's or bitsandbytes' Adam with the dtype of their two moments; else nothing."""
    if optimizer is None or optimizer.state or getattr(optimizer, "is_paged", False):
        return []
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    if type(optimizer) in (AdamW, Adam):
        return [(each, each.dtype) for each in trained]
    if type(optimizer).__module__ not in ("bitsandbytes.optim.adam", "bitsandbytes.optim.adamw"):
        return []
    few_bits = torch.uint8 if optimizer.args.optim_bits == 8 else torch.float32
    return [(each, few_bits if each.numel() >= SMALLEST_8BIT_ELEMENTS else torch.float32) for each in trained]
