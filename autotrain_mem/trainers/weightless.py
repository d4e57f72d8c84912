"""Runs transformers' own ``from_pretrained`` without reading a checkpoint, when TRL calls it in a rehearsal."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any, get_origin
from unittest.mock import patch

import torch
from peft.tuners.boft.layer import BOFTLayer
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel, modeling_utils
from transformers.core_model_loading import build_glob_alternation
from transformers.models.auto import auto_factory
from transformers.utils.loading_report import LoadStateDictInfo

from autotrain_mem.support.errors import UnsupportedModelError
from autotrain_mem.trainers.model_support import refuse_unrehearsed

_HEADS = ("lm_head", "score", "classifier")
"""The attributes that hold a head over the vocabulary or over labels (``transformers/modeling_layers.py``)."""
IN_SHARDS = "_is_in_shards"
"""The attribute that marks a model that DeepSpeed would have sharded with ``zero.Init`` when it was created: one that
is not quantized, if a ZeRO-3 config exists (``transformers/modeling_utils.py: get_init_context``)."""


@contextmanager
def without_weights(finish: Callable[[Any], Any] = lambda model: model) -> Iterator[None]:
    """Within the block, ``from_pretrained`` of every transformers model needs only config.json.

    It creates the model on the meta device and returns the result of ``finish`` for it.

    ``from_pretrained`` then raises UnsupportedModelError if the model cannot be built, has no output head, has a
    quantization that is not rehearsed, or has a LoRA adapter.
    """
    load = PreTrainedModel.__dict__["from_pretrained"].__func__

    def from_pretrained(cls: type[PreTrainedModel], path: Any, *args: Any, **kwargs: Any) -> Any:
        options = {**kwargs, "device_map": None, "local_files_only": True}
        try:
            with _disable_current_modes(), _no_checkpoint():
                model = load(cls, path, *args, **options)
        except (ValueError, KeyError, ImportError) as error:
            raise UnsupportedModelError(
                f"{cls.__name__} of {path} cannot be built for training: {error}",
                hint="Use a model that the installed transformers implements; see --attn_implementation for attention "
                "that is not installed here.",
            ) from error
        if not any(hasattr(model, name) for name in _HEADS) and model.get_output_embeddings() is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not a causal language model: it has no output head over the vocabulary.",
                hint="Train a causal language model, such as Qwen2ForCausalLM or LlamaForCausalLM.",
            )
        if modeling_utils.is_deepspeed_zero3_enabled() and getattr(model, "hf_quantizer", None) is None:
            setattr(model, IN_SHARDS, True)
        return finish(model)

    find_adapter = auto_factory.find_adapter_config_file

    def find_cached_adapter(path: Any, **options: Any) -> Any:
        return find_adapter(path, **{**options, "local_files_only": True})

    with (
        patch.object(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)),
        # It is not in _no_checkpoint, so that another patch can wrap it (rehearsal/cuda/loading.py).
        patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(_cast_as_loading_would)),
        patch.object(auto_factory, "find_adapter_config_file", find_cached_adapter),
        # BOFT's permutation matrix stays zero: writing its ones needs index values, which fake tensors lack.
        patch.object(BOFTLayer, "perm2mat", lambda layer, indices: torch.zeros(len(indices), len(indices))),
    ):
        yield


@contextmanager
def _no_checkpoint() -> Iterator[None]:
    """Within the block, transformers' ``from_pretrained`` skips the steps that read a checkpoint's tensors."""
    plain_quantizer, plain_adapters = modeling_utils.get_hf_quantizer, modeling_utils.maybe_load_adapters
    plain_files, plain_dtype = modeling_utils._get_resolved_checkpoint_files, modeling_utils._get_dtype

    def rehearsed_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_unrehearsed(config, quantization_config)
        return plain_quantizer(config, quantization_config, *args, **kwargs)

    def no_adapters(path: Any, *args: Any, **kwargs: Any) -> Any:
        adapter, base, rest = plain_adapters(path, *args, **kwargs)
        if adapter is not None:
            raise UnsupportedModelError(
                f"{adapter} holds a LoRA adapter beside its base model, which is not rehearsed yet.",
                hint="Merge the adapter into its base (peft's merge_and_unload), or train the base model.",
            )
        return adapter, base, rest

    def local_files(*, pretrained_model_name_or_path: Any, **options: Any) -> Any:
        """Returns the checkpoint files of a folder, if it has any: they state a dtype that config.json may lack."""
        if pretrained_model_name_or_path is not None and os.path.isdir(pretrained_model_name_or_path):
            with suppress(OSError):
                return plain_files(pretrained_model_name_or_path=pretrained_model_name_or_path, **options)
        return None, None

    def dtype_without_files(dtype: Any, checkpoint_files: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Resolves the dtype ``auto``. Without a dtype in config or files it is float32, as in older checkpoints."""
        if dtype == "auto" and config.dtype is None and checkpoint_files is None:
            dtype = torch.float32
        return plain_dtype(dtype, checkpoint_files, config, *args, **kwargs)

    def tie(model: Any, load_config: Any, loading_info: Any) -> Any:
        model.tie_weights(recompute_mapping=False)
        return loading_info

    with (
        patch.multiple(
            modeling_utils,
            get_hf_quantizer=rehearsed_quantizer,
            maybe_load_adapters=no_adapters,
            _get_resolved_checkpoint_files=local_files,
            _get_dtype=dtype_without_files,
            # Models are created whole. DeepSpeed's engine shards them later in the same way (rehearsal/ranks/zero.py).
            is_deepspeed_zero3_enabled=lambda: False,
        ),
        patch.object(PreTrainedModel, "_finalize_model_loading", staticmethod(tie)),
    ):
        yield


def _cast_as_loading_would(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any) -> Any:
    """Casts parameters and buffers to the dtypes of ``dtype_plan``, such as those that stay in float32, as loading does
    (``transformers/core_model_loading.py: convert_and_load_state_dict_in_model``, step 3)."""
    if plan := load_config.dtype_plan:
        pattern, patterns, _ = build_glob_alternation(list(plan))
        for path in model.state_dict():
            if (match := pattern.search(path)) is not None:
                dtype = plan[patterns[match.lastgroup]]
                module_path, _, name = path.rpartition(".")
                module = model.get_submodule(module_path)
                if (parameter := module._parameters.get(name)) is not None:
                    module._parameters[name] = torch.nn.Parameter(parameter.to(dtype), parameter.requires_grad)
                elif (buffer := module._buffers.get(name)) is not None:
                    module._buffers[name] = buffer.to(dtype)
    nothing: dict[str, Any] = {field.name: (get_origin(field.type) or set)() for field in fields(LoadStateDictInfo)}
    return LoadStateDictInfo(**nothing), None
