"""Records the allocations that loading a model onto a GPU would make.

transformers 5.23 loads a model with a device map in this order:

- If the map is "auto", accelerate puts one number on each GPU to read its free memory (``accelerate/utils/modeling.py:
  get_max_memory``); the segment of that number stays cached.
- A warm-up block for all bytes to load, less the bytes already cached, is allocated and immediately freed. The weights
  are carved from its segment (``transformers/modeling_utils.py: caching_allocator_warmup, get_total_byte_count``).
- Each tensor of the checkpoint follows, in the natural order of the names (``core_model_loading.py:
  convert_and_load_state_dict_in_model``), in its final dtype, since a blocking copy to a GPU converts on the host
  (``aten/src/ATen/native/cuda/Copy.cu: copy_kernel_cuda``). A tensor that bitsandbytes quantizes arrives in the model's
  dtype and is freed once quantized.
- Tensors that no checkpoint holds, such as rotary frequencies, are last (``_move_missing_keys_from_meta_to_device``).

TRL loads with ``device_map="auto"`` on a GPU, and with None in distributed training (``trl/trainer/utils.py:
create_model_from_path`` and its callers); quantizers set a map of their own (``quantizers/quantizer_bnb_4bit.py:
update_device_map``). Without a map the trainer moves the model later, parameter by parameter.

LoRA's layers are created on the device in the weights' dtype and then converted to float32
(``peft/tuners/tuners_utils.py: _move_adapter_to_device_of_base_layer, cast_adapter_dtype``).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTuner
from transformers import PreTrainedModel, modeling_utils
from transformers.core_model_loading import dot_natural_key
from transformers.integrations.mxfp4 import dequantize_convertops
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from trl.trainer import utils as trl_utils

from autotrain_mem.rehearsal.cuda.rules import CudaRule
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.support.units import MIB
from autotrain_mem.trainers.model_support import waits_on_host
from autotrain_mem.types import Owner

NOT_COUNTED = (
    "loading in special cases: tensors that are merged as they arrive (the experts of a mixture), weights that the "
    "checkpoint lacks, threads that load in another order, and a smaller warm-up block for the weights, because the "
    "card has less than 1.2 GiB besides them or because memory is already cached when a second model is loaded",
)
"""The warm-up block depends on the card's memory and on the bytes already cached; a rehearsal has neither."""

WARM_UP = "caching_allocator_warmup"
ASKED_FREE = "get_max_memory"
SMALL_SEGMENT_BYTES = 2 * MIB
"""The cached bytes of accelerate's number: one small segment or page (``c10/core/AllocatorConfig.h: kSmallBuffer``)."""
FLOAT, HALF = 4, 2

_Function = Callable[..., Any]
_GPU = torch.device("cuda")


@dataclass(kw_only=True, slots=True)
class _Loading:
    """Facts of a model that are known before its weights are loaded."""

    names: list[str] = field(default_factory=list)
    """The names of the checkpoint's tensors, in loading order."""
    warm_up_bytes: int = 0
    packed: frozenset[str] = frozenset()
    """Names of mxfp4 weights that are dequantized on the device."""
    source_bytes: int = 0
    """Bytes per element of a weight before it is quantized; 0 if none is quantized while loading."""


@contextmanager
def cuda_loading(recorder: Recorder) -> Iterator[None]:
    """Within the block, loaded models are recorded as they would arrive on a GPU."""
    load = PreTrainedModel.__dict__["from_pretrained"].__func__
    read = PreTrainedModel.__dict__["_load_pretrained_model"].__func__
    underway: list[_Loading] = []

    def from_pretrained(cls: Any, /, path: Any, *args: Any, device_map: Any = None, **kwargs: Any) -> Any:
        underway.append(_Loading())
        try:
            loaded = load(cls, path, *args, device_map=None, **kwargs)
        finally:
            loading = underway.pop()
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        quantizer = getattr(model, "hf_quantizer", None)
        if device_map is not None or (quantizer is not None and not waits_on_host(quantizer)):
            _arrive(model, loading, recorder, is_automatic=device_map == "auto")
        return loaded

    def watched_read(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *more: Any) -> Any:
        if underway:  # by now the model is on the meta device, with quantized layers if it has a quantizer
            quantizer = load_config.hf_quantizer
            names = list(model.state_dict())
            total = modeling_utils.get_total_byte_count(model, dict.fromkeys(names, _GPU), quantizer)[_GPU]
            dequantizes = isinstance(quantizer, Mxfp4HfQuantizer) and quantizer.quantization_config.dequantize
            underway[-1] = _Loading(
                packed=frozenset(name for name in names if dequantizes and name.endswith(_PACKED)),
                names=sorted((name for name in names if name not in model.all_tied_weights_keys), key=dot_natural_key),
                warm_up_bytes=HALF * int(total // HALF),
                source_bytes=0 if quantizer is None or quantizer.pre_quantized else load_config.dtype.itemsize,
            )
        return read(model, state_dict, checkpoint_files, load_config, *more)

    with (
        patch.object(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)),
        patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(watched_read)),
        patch.object(trl_utils, "PartialState", _StateOnGpu, create=True),  # TRL 1.9 does not use it
        _adapters_beside_weights(recorder),
    ):
        yield


class _StateOnGpu:
    """Replaces the process's state with one whose device is a GPU."""

    device = _GPU

    def __getattr__(self, name: str) -> Any:
        return getattr(PartialState(), name)


def _arrive(model: Any, loading: _Loading, recorder: Recorder, *, is_automatic: bool) -> None:
    warm_up_bytes = loading.warm_up_bytes
    if is_automatic:
        recorder.touch(torch.int64.itemsize, Owner.TEMPORARY, ASKED_FREE)
        is_more = warm_up_bytes - SMALL_SEGMENT_BYTES > SMALL_SEGMENT_BYTES
        warm_up_bytes = HALF * ((warm_up_bytes - SMALL_SEGMENT_BYTES) // HALF) if is_more else 0
    if warm_up_bytes:
        recorder.touch(warm_up_bytes, Owner.TEMPORARY, WARM_UP)
    for name in loading.names:
        if name in loading.packed:
            _dequantize_mxfp4(model, name, recorder)
        _load(model, name, loading.source_bytes, recorder)
    for name, buffer in model.named_buffers():
        if recorder.block_of(buffer) is None:
            recorder.mark(buffer, Owner.WEIGHTS, name)


def _load(model: Any, name: str, source_bytes: int, recorder: Recorder) -> None:
    tensor: Any = model.get_parameter_or_buffer(name)
    if (state := getattr(tensor, "quant_state", None)) is None and getattr(tensor, "SCB", None) is None:
        recorder.mark(tensor, Owner.WEIGHTS, name)
        return
    elements = tensor.numel() if state is None else state.shape.numel()
    with ExitStack() as sources:
        if source_bytes:
            sources.enter_context(recorder.taken(elements * source_bytes, Owner.TEMPORARY, name))
        if state is None:
            # The weight goes to the host (transformers/integrations/bitsandbytes.py: Bnb8bitQuantize) and back as
            # float16 (bitsandbytes/nn/modules.py: Int8Params._quantize; backends/cuda/ops.py: int8_vectorwise_quant).
            with recorder.taken(elements * HALF, Owner.TEMPORARY, name) if source_bytes else nullcontext():
                recorder.mark(tensor.SCB, Owner.WEIGHTS, f"{name}.SCB")
                recorder.mark(tensor, Owner.WEIGHTS, name)
            return
        layer = model.get_submodule(name.rpartition(".")[0])
        if source_bytes and issubclass(getattr(layer, "source_cls", torch.nn.Linear), Conv1D):
            # GPT-2's weights are made contiguous first (bitsandbytes/nn/modules.py: Params4bit._quantize).
            sources.enter_context(recorder.taken(elements * source_bytes, Owner.TEMPORARY, name))
        _quantize_4bit(tensor, state, name, recorder, is_new=bool(source_bytes))


_PACKED = (".experts.gate_up_proj", ".experts.down_proj")
"""The weights that a checkpoint stores in mxfp4 (``transformers/quantizers/quantizer_mxfp4.py``)."""
_GROUP, _PACKED_BYTES = 32, 16
"""The number of mxfp4 elements that share a scale, and their bytes."""


def _dequantize_mxfp4(model: Any, name: str, recorder: Recorder) -> None:
    """Replaces a weight by the result of transformers' own conversion (``transformers/integrations/mxfp4.py:
    Mxfp4Dequantize``). Its fallback to the host, when the device is out of memory, is not imitated."""
    module, _, attribute = name.rpartition(".")
    owner = model.get_submodule(module)
    weight = getattr(owner, attribute)
    experts, inner, outer = weight.shape
    groups = (experts, outer, inner // _GROUP)
    with recorder, torch.no_grad():
        blocks = torch.zeros((*groups, _PACKED_BYTES), dtype=torch.uint8)
        scales = torch.zeros(groups, dtype=torch.uint8)
        dequantized = dequantize_convertops(blocks, scales, weight.dtype)
    dequantized.data.copy_(weight.data)
    dequantized.requires_grad_(weight.requires_grad)
    setattr(owner, attribute, dequantized)


def _quantize_4bit(weight: Any, state: Any, name: str, recorder: Recorder, *, is_new: bool) -> None:
    """Records the allocations of ``bitsandbytes/functional.py: quantize_4bit`` with ``backends/cuda/ops.py``. If the
    checkpoint is already quantized (``is_new=False``), only its tensors are recorded."""
    if (nested := state.state2) is None:
        recorder.mark(state.absmax, Owner.WEIGHTS, f"{name}.absmax")
    with ExitStack() as scales:
        scale_bytes = state.absmax.numel() * FLOAT
        if nested is not None and is_new:
            scales.enter_context(recorder.taken(scale_bytes, Owner.TEMPORARY, name))
        recorder.mark(weight, Owner.WEIGHTS, name)
        recorder.mark(state.code, Owner.WEIGHTS, f"{name}.code")
        if nested is None:
            return
        recorder.mark(state.offset, Owner.WEIGHTS, f"{name}.offset")
        if is_new:  # absmax - offset
            scales.enter_context(recorder.taken(scale_bytes, Owner.TEMPORARY, name))
        recorder.mark(nested.absmax, Owner.WEIGHTS, f"{name}.state2.absmax")
        recorder.mark(state.absmax, Owner.WEIGHTS, f"{name}.absmax")
        recorder.mark(nested.code, Owner.WEIGHTS, f"{name}.state2.code")


@contextmanager
def _adapters_beside_weights(recorder: Recorder) -> Iterator[None]:
    inject, cast = BaseTuner.inject_adapter, BaseTuner._cast_adapter_dtype

    def watched_inject(tuner: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = inject(tuner, model, *args, **kwargs)
        _adopt_new(model, recorder)
        return result

    def watched_cast(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        _adopt_new(tuner.model, recorder)  # copies of modules_to_save
        if not _is_on_device(tuner.model, recorder):
            return cast(tuner, *args, **kwargs)
        with recorder:
            return cast(tuner, *args, **kwargs)

    def watched_start(start: _Function) -> _Function:
        def started(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.block_of(layer.get_base_layer().weight) is None:
                return start(layer, *args, **kwargs)
            with recorder:
                result = start(layer, *args, **kwargs)
            for name, parameter in layer.named_parameters():  # the weight's residual is a new tensor
                if recorder.block_of(parameter) is not None:
                    recorder.mark(parameter, Owner.WEIGHTS, name)
            return result

        return started

    starts: dict[str, Any] = {name: watched_start(getattr(LoraLayer, name)) for name in _STARTED}
    with (
        patch.multiple(BaseTuner, inject_adapter=watched_inject, _cast_adapter_dtype=watched_cast),
        patch.multiple(LoraLayer, **starts),
    ):
        yield


_STARTED = ("pissa_init", "olora_init")
"""Methods that decompose a weight on the device in float32 (``peft/tuners/lora/layer.py``)."""


def _is_on_device(model: torch.nn.Module, recorder: Recorder) -> bool:
    return any(recorder.block_of(parameter) is not None for parameter in model.parameters())


def _adopt_new(model: torch.nn.Module, recorder: Recorder) -> None:
    if _is_on_device(model, recorder):
        for name, parameter in model.named_parameters():
            if recorder.block_of(parameter) is None:
                recorder.mark(parameter, Owner.WEIGHTS, name)


RULES = (CudaRule(lambda recorder, card: cuda_loading(recorder), not_counted=lambda card: NOT_COUNTED),)
