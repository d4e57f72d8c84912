"""Changes a trainer that TRL has built: adds the settings that no TRL config offers."""

import functools
import inspect
import sys
from typing import Any
from unittest.mock import patch

from autotrain_mem.types import Knobs


def finished(trainer: Any, knobs: Knobs) -> Any:
    """Changes a built trainer as the plan needs where no TRL config can, and returns it."""
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
    """Converts trained weights to float32, since fp16's gradient scaler rejects other gradients.

    It rejects float16 (``torch/amp/grad_scaler.py: _unscale_grads_``), and on CUDA also bfloat16
    (``aten/src/ATen/native/cuda/AmpKernels.cu: _amp_foreach_non_finite_check_and_unscale_cuda_``). TRL makes the
    adapter of a quantized base bfloat16 (``trl/trainer/sft_trainer.py: __init__``,
    https://github.com/huggingface/trl/issues/4901).
    """
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.to(torch.float32)


def layers_to_shard(model: Any) -> tuple[str, ...]:
    """Returns the names in the model's ``_no_split_modules`` that are classes of its modules, sorted."""
    classes = {type(module).__name__ for module in model.modules()}
    return tuple(sorted({*(getattr(model, "_no_split_modules", None) or ())} & classes))


def name_layers_to_shard(model: Any) -> None:
    """Removes the names of layers that a model lacks from its ``_no_split_modules``, also under an adapter.

    accelerate and PEFT reject such names (``accelerate/utils/dataclasses.py: set_auto_wrap_policy``,
    ``peft/utils/other.py: fsdp_auto_wrap_policy``). Gemma 3 from 4B on, Gemma 4 and Qwen3.5 list vision layers.
    """
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._no_split_modules = {*layers_to_shard(module)}
            return  # accelerate and PEFT read only the outermost model's


def keep_cache_in_evaluation(trainer: Any) -> None:
    """Prevents transformers' evaluation loop from emptying torch's cache, in a run and in its rehearsal.

    The longest rows run first, and every later batch fits into their segments. If the cache were released, memory would
    fragment (``estimator.mixed_steps``). A failing allocation still releases the cache
    (``c10/cuda/CUDACachingAllocator.cpp: malloc``, ``release_cached_blocks``).

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
            if sys._getframe(1).f_code is not loop:  # not called by transformers' own loop
                empty_cache()

        with patch.object(torch.cuda, "empty_cache", unless_loop):
            return evaluation_loop(*args, **kwargs)

    trainer.evaluation_loop = keeps_cache
