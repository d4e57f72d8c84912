"""Rehearses the device memory of saving a model after training, while the optimizer's state is still allocated.

Tensors are copied to the host one at a time (``safetensors/torch.py: save_file``, ``torch/serialization.py: _save``),
so most models and adapters (``peft/utils/save_and_load.py: get_peft_model_state_dict``) need no device memory. Two
cases need some: fused weights, such as a mixture's experts, are split into copies that are all alive at once, and
shards are gathered.
"""

from collections.abc import Iterable
from typing import Any

import torch

from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.trainers.host_optimizer import HostOptimizer, master_bytes
from autotrain_mem.types import Owner, Phase


def rehearse_saving(trainer: Any, recorder: Recorder) -> None:
    """Allocates what ``transformers/trainer.py: save_model`` allocates, and writes nothing.

    A checkpoint during training needs no more, since it writes shards without gathering them.
    """
    from transformers import PreTrainedModel

    recorder.enter_phase(Phase.SAVE)
    policy = getattr(trainer.model, "policy", trainer.model)
    is_adapter = hasattr(policy, "peft_config")
    recorder.saved_model_bytes = _bytes(each for each in policy.parameters() if each.requires_grad or not is_adapter)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if isinstance(optimizer, HostOptimizer):  # this optimizer does not run here: count AdamW's two moments
        moments = 2 if "betas" in optimizer.defaults else 0
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        saved = (((moments + 1) * master_bytes(weight) or moments * weight.nbytes) for weight in weights)
        recorder.saved_state_bytes = sum(saved)
        recorder.unpinned.peak_bytes += recorder.saved_state_bytes
    else:
        values = (value for state in optimizer.state.values() for value in state.values())
        recorder.saved_state_bytes = _bytes(value for value in values if torch.is_tensor(value))
    if getattr(trainer, "is_deepspeed_enabled", False):
        recorder.saved_state_bytes *= trainer.accelerator.num_processes
        # ZeRO-3 gathers the parameters of one module at a time (deepspeed/runtime/engine.py:
        # _zero3_consolidated_16bit_state_dict).
        engine = trainer.deepspeed
        for module in engine.module.modules() if engine.zero_optimization_partition_weights() else ():
            recorder.touch(_bytes(module.parameters(recurse=False)), Owner.GATHERED_WEIGHTS)
        return
    if getattr(trainer, "is_fsdp_enabled", False):
        # FSDP2 gathers one parameter at a time on the device (``torch/distributed/_state_dict_utils.py:
        # _gather_state_dict``), called by accelerate (``accelerator.py: get_state_dict``).
        for weight in trainer.model.parameters():
            recorder.touch(weight.numel() * weight.element_size(), Owner.GATHERED_WEIGHTS)
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = getattr(model, "policy", model)  # PPO's: ``trl/experimental/ppo/ppo_trainer.py: save_model``
    if isinstance(model, PreTrainedModel):
        # ``transformers/modeling_utils.py: save_pretrained`` splits fused weights. For Qwen3-30B-A3B, which fuses gate
        # and up of 128 experts in each layer, that copies 38 of 61 GB.
        from transformers.core_model_loading import revert_weight_conversion

        stored = {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in model.state_dict().items()}
        split = revert_weight_conversion(model, dict(stored.values()))
        written = [tensor.contiguous() for tensor in split.values()]
        del written


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sums the bytes of tensors; a parameter of ZeRO-3 counts with all its shards."""
    return sum(getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size() for tensor in tensors)
