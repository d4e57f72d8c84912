"""Rehearses what saving a model takes of the device, once training is done and its optimizer's state still there.

Weights go to the host tensor by tensor as they are written (``safetensors/torch.py: _tobytes``; of the optimizer's
state ``torch/serialization.py: _save``), so most models need nothing to be saved. An adapter is a few references
(``peft/utils/save_and_load.py: get_peft_model_state_dict``), and bitsandbytes packs what quantized weights need beside
them on the host. Two things take device memory: weights that transformers keep fused and checkpoints do not, such as a
mixture's experts, are split into copies, all of them alive at once; and shards are gathered.
"""

from collections.abc import Iterable
from typing import Any

import torch

from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.trainers.host_optimizer import HostOptimizer
from autotrain_mem.types import Owner, Phase


def rehearse_saving(trainer: Any, recorder: Recorder) -> None:
    """Saves the model as the end of a training does, as far as that is seen on the device; writes nothing.

    ``transformers/trainer.py: save_model``; of a checkpoint on the way no more, since shards are written as they are.
    """
    from transformers import PreTrainedModel

    recorder.enter_phase(Phase.SAVE)
    policy = getattr(trainer.model, "policy", trainer.model)
    is_adapter = hasattr(policy, "peft_config")  # what is trained is written, else all weights
    recorder.saved_model_bytes = _bytes(each for each in policy.parameters() if each.requires_grad or not is_adapter)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if isinstance(optimizer, HostOptimizer):  # which a rehearsal does not run: AdamW's two moments
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        recorder.saved_state_bytes = 2 * _bytes(weights) if "betas" in optimizer.defaults else 0
    else:
        values = (value for state in optimizer.state.values() for value in state.values())
        recorder.saved_state_bytes = _bytes(value for value in values if torch.is_tensor(value))
    if getattr(trainer, "is_deepspeed_enabled", False):
        recorder.saved_state_bytes *= trainer.accelerator.num_processes
        # ZeRO-3 gathers what one module holds itself after the other (deepspeed/runtime/engine.py:
        # _zero3_consolidated_16bit_state_dict); the other stages have whole weights.
        engine = trainer.deepspeed
        for module in engine.module.modules() if engine.zero_optimization_partition_weights() else ():
            with recorder.taken(_bytes(module.parameters(recurse=False)), Owner.GATHERED_WEIGHTS, ""):
                pass
        return
    if getattr(trainer, "is_fsdp_enabled", False):
        # Weights come together on the device and leave for the host of the first process. FSDP2 gathers one parameter
        # after the other (``torch/distributed/_state_dict_utils.py: _gather_state_dict``), as accelerate asks
        # (``accelerator.py: get_state_dict``).
        for weight in trainer.model.parameters():
            with recorder.taken(weight.numel() * weight.element_size(), Owner.GATHERED_WEIGHTS, ""):
                pass
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = getattr(model, "policy", model)  # PPO's: ``trl/experimental/ppo/ppo_trainer.py: save_model``
    if isinstance(model, PreTrainedModel):
        # Splits fused weights, where the model has some: ``transformers/modeling_utils.py: save_pretrained``.
        # Qwen3-30B-A3B keeps gate and up of 128 experts in one tensor a layer; 38 of its 61 GB in bfloat16 are
        # copied.
        from transformers.core_model_loading import revert_weight_conversion

        stored = {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in model.state_dict().items()}
        split = revert_weight_conversion(model, dict(stored.values()))
        written = [tensor.contiguous() for tensor in split.values()]
        del written


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sums the bytes of tensors; of a sharded tensor, those of all shards."""
    return sum(getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size() for tensor in tensors)
