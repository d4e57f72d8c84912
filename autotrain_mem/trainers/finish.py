"""Adds settings that no TRL config offers to a trainer as TRL builds it."""

import functools
import inspect
import sys
from typing import Any
from unittest.mock import patch

from autotrain_mem.types import Knobs


def finished(trainer: Any, knobs: Knobs) -> Any:
    """Returns the trainer with the plan's settings that no TRL config offers."""
    if trainer.is_fsdp_enabled:
        name_layers_to_shard(trainer.model)
    if knobs.fp16:
        _widen_trained(trainer.model)
    if knobs.optimizer_offload:
        from autotrain_mem.trainers.host_optimizer import offload_to_host

        offload_to_host(trainer)
    if knobs.sp_size > 1:
        from autotrain_mem.trainers.shared_rows import share_rows  # DeepSpeed takes seconds to import

        share_rows(trainer)
    return trainer


def _widen_trained(model: Any) -> None:
    """Converts trained weights to float32: fp16's scaler rejects float16 gradients, and on CUDA bfloat16 ones.

    ``torch/amp/grad_scaler.py: _unscale_grads_``, ``aten/src/ATen/native/cuda/AmpKernels.cu:
    _amp_foreach_non_finite_check_and_unscale_cuda_``. TRL makes a quantized base's adapter bfloat16
    (``trl/trainer/sft_trainer.py: __init__``, https://github.com/huggingface/trl/issues/4901).
    """
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.to(torch.float32)


def layers_to_shard(model: Any) -> tuple[str, ...]:
    """Returns the model's ``_no_split_modules`` that are classes of its modules, sorted."""
    classes = {type(module).__name__ for module in model.modules()}
    return tuple(sorted({*(getattr(model, "_no_split_modules", None) or ())} & classes))


def name_layers_to_shard(model: Any) -> None:
    """Removes the names of layers that a model lacks from its ``_no_split_modules``, also under an adapter.

    accelerate and PEFT reject such names (``accelerate/utils/dataclasses.py: set_auto_wrap_policy``,
    ``peft/utils/other.py: fsdp_auto_wrap_policy``), as of vision layers in Gemma 3 from 4B on, Gemma 4 and Qwen3.5.
    """
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._no_split_modules = {*layers_to_shard(module)}
            return  # the outermost one: accelerate and PEFT read no other


def keep_cache_in_evaluation(trainer: Any) -> None:
    """Prevents transformers' evaluation loop from emptying torch's cache, in a run and in its rehearsal.

    The longest rows run first, and every later batch fits into their segments; a released cache would fragment
    (``estimator.mixed_steps``). A failing allocation releases it anyway (``c10/cuda/CUDACachingAllocator.cpp: malloc``,
    ``release_cached_blocks``).

    TRL still empties the cache before it wakes a colocated vLLM engine (``trl/generation/vllm_generation.py``), in its
    PPO loop, and in its activation offloading with bitsandbytes (``trl/models/activation_offloading.py: __enter__``).
    """
    import torch
    from transformers import Trainer

    evaluation_loop, loop = trainer.evaluation_loop, inspect.unwrap(Trainer.evaluation_loop).__code__

    @functools.wraps(evaluation_loop)
    def keeps_cache(*args: Any, **kwargs: Any) -> Any:
        empty_cache = torch.cuda.empty_cache

        def unless_loop() -> None:
            if sys._getframe(1).f_code is not loop:  # transformers' own loop
                empty_cache()

        with patch.object(torch.cuda, "empty_cache", unless_loop):
            return evaluation_loop(*args, **kwargs)

    trainer.evaluation_loop = keeps_cache
