"""Runs a trainer on fake tensors, or on real ones for a simulated card, and records what CUDA would allocate."""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._device import _device_constructors
from transformers.utils import import_utils

from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.rehearsal.cuda.rules import cuda_semantics, not_imitated
from autotrain_mem.rehearsal.cuda.workspaces import workspaces
from autotrain_mem.rehearsal.fake_mode import QuickFakeMode
from autotrain_mem.rehearsal.generation import generation_by_its_ends
from autotrain_mem.rehearsal.known_values import KnownValues, numbers, numbers_in
from autotrain_mem.rehearsal.ranks.invariants import trained_in_full
from autotrain_mem.rehearsal.ranks.rank import RehearsedRank, real_rank
from autotrain_mem.rehearsal.ranks.recording import RankRecorder
from autotrain_mem.rehearsal.saving import rehearse_saving
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.rehearsal.vllm_stub import vllm_stand_in
from autotrain_mem.rehearsal.windows.at_once import windows_at_once
from autotrain_mem.trainers.model_support import unquantized_bytes
from autotrain_mem.trainers.phases import follow
from autotrain_mem.trainers.weightless import without_weights
from autotrain_mem.types import Capability, Knobs, Phase, Trace, Trained

Collate = Callable[[list[Any]], Any]
EditRows = Callable[[list[Any]], list[Any]]


@contextmanager
def fake_tensors() -> Iterator[QuickFakeMode]:
    """Within the block, new tensors have shape, dtype and device, but no bytes.

    transformers takes a fake tensor as a sign of tracing, and then ignores the values of masks
    (``transformers/utils/import_utils.py: is_tracing``). A rehearsal has these values, so ``is_fake_tensor`` returns
    False. A deep copy of a fake tensor (PEFT copies ``modules_to_save``) keeps this mode instead of copying it.
    """
    _device_constructors()  # fills torch's cache of functions that take a device, before torch.tensor is replaced
    with (
        QuickFakeMode() as mode,
        conversion_in_place(),
        patch.object(import_utils, "is_fake_tensor", lambda value: False),
        patch.object(FakeTensor, "numpy", numbers),
        patch.object(torch, "tensor", lambda data, make=torch.tensor, **options: make(numbers_in(data), **options)),
        patch.object(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode, create=True),
    ):
        yield mode


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """Describes how to build and run a trainer, in a rehearsal or in a real run that is compared with it."""

    build: Callable[[], Any]
    """Builds the trainer."""
    edit_rows: EditRows = list
    """Turns the rows that the sampler drew into the worst micro-batch."""
    patches: Callable[[Any], AbstractContextManager[None]] = nullcontext
    """Returns the patches that are active while the built trainer trains."""
    passes: int = 1
    """Number of optimizer steps that train on the same rows; a rehearsal runs one."""
    micro_steps_per_generation: int = 0
    """Number of micro-steps that train on one generation; a rehearsal runs a few."""
    saves: bool = True
    """Whether the trained model is saved, at the end or in checkpoints."""


def rehearse_trainer(
    spec: TrainerSpec,
    compute_capability: Capability = (8, 0),
    not_counted: tuple[str, ...] = (),
    rank: RehearsedRank | None = None,
) -> Trace:
    """Builds a trainer and runs its own ``train()`` on fake tensors; returns the trace. ``not_counted``: what this
    rehearsal leaves out beside what every one does. ``rank``: the rank to rehearse; None for a single process."""
    with ExitStack() as stack:
        mode = stack.enter_context(fake_tensors())
        stack.enter_context(without_weights(materialize))
        values = KnownValues(mode)
        kind = Recorder if rank is None else RankRecorder
        recorder = kind(values.run, workspace=workspaces(compute_capability))
        stack.enter_context(cuda_semantics(recorder, compute_capability))
        stack.enter_context(vllm_stand_in())
        if rank is not None:
            stack.enter_context(rank.rules(recorder, compute_capability))
        trained = train_on_fakes(spec, recorder, values)
    trace = recorder.trace((*not_counted, *not_imitated(compute_capability)))
    work = replace(trace.work, passes=spec.passes, micro_steps_per_generation=spec.micro_steps_per_generation)
    return replace(trace, work=work, trained=trained)


def train_on_fakes(spec: TrainerSpec, recorder: Recorder, values: KnownValues) -> Trained:
    """Builds and trains the trainer; returns its parameter counts. Call it under a fake mode and CUDA's rules."""
    with generation_by_its_ends(recorder):
        trainer = spec.build()
        trained = count_trained(trainer.model)
        recorder.unquantized_bytes = unquantized_bytes(trainer.model)
        trainer.data_collator = _host_collator(trainer.data_collator, spec.edit_rows)
        whole = trained_in_full(trainer) if isinstance(recorder, RankRecorder) else nullcontext()
        with spec.patches(trainer), whole, _arrivals(values.arrive, recorder), windows_at_once(trainer.model, recorder):
            follow(trainer, recorder)
            with recorder.recording():
                trainer.train()
                if spec.saves:
                    rehearse_saving(trainer, recorder)
    return trained


def count_trained(model: Any) -> Trained:
    """Counts a model's parameters; a quantized weight counts its elements before quantization."""
    counts: dict[torch.dtype, int] = {}
    frozen = 0
    for parameter in model.parameters():
        quantized = getattr(parameter, "quant_state", None)
        elements = parameter.numel() if quantized is None else math.prod(quantized.shape)
        if parameter.requires_grad:
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + elements
        else:
            frozen += elements
    most = max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
    trained = sum(counts.values())
    return Trained(parameters=trained, of_parameters=trained + frozen, dtype=str(most).removeprefix("torch."))


class Watch:
    """Records what a GPU would allocate while a trainer is built and trained on real CPU tensors.

    Args:
        device: A simulated GPU; its out-of-memory error ends training like a real one's.
        compute_capability: The compute capability of that GPU.
        knobs: The plan's knobs, which determine if this process is one of several ranks; None for a single process.
    """

    def __init__(
        self, device: SimulatedGpu | None = None, compute_capability: Capability = (8, 0), knobs: Knobs | None = None
    ) -> None:
        self._ranked = knobs if knobs is not None and knobs.has_group else None
        kind = Recorder if self._ranked is None else RankRecorder
        self.recorder = kind(device=device, workspace=workspaces(compute_capability))
        self._compute_capability = compute_capability

    @property
    def phase(self) -> Phase:
        """Returns the run's current phase, or the one in which it ended."""
        return self.recorder.phase

    @contextmanager
    def cuda_semantics(self) -> Iterator[None]:
        """Within the block, CPU tensors behave as CUDA's: build and train the trainer there."""
        process = (
            nullcontext() if self._ranked is None else real_rank(self.recorder, self._ranked, self._compute_capability)
        )
        with cuda_semantics(self.recorder, self._compute_capability, are_fake=False), process:
            yield

    def train(self, trainer: Any, edit_rows: EditRows = list, **options: Any) -> None:
        """Records ``trainer.train(**options)``; call it inside :meth:`cuda_semantics`. Tests that compare with a
        rehearsal edit the rows of each micro-batch."""
        trainer.data_collator = _host_collator(trainer.data_collator, edit_rows)
        follow(trainer, self.recorder)
        with _arrivals(_copied, self.recorder), self.recorder.recording():
            trainer.train(**options)


class _HostBatch(dict[str, Any]):
    """Marks a batch that is still on the host."""


def _host_collator(collate: Collate, edit_rows: Callable[[list[Any]], list[Any]]) -> Collate:
    """Wraps a collator so that it runs on real values and is not recorded, as on the host."""

    def collate_on_host(rows: list[Any]) -> Any:
        with torch._C._DisableTorchDispatch():
            if isinstance(collated := collate(edit_rows(rows)), list):
                return collated  # prompts: they become tensors when they are tokenized
            # A copy to a device has only the elements of a view, not the storage behind it.
            return _HostBatch(_copied(collated))

    return collate_on_host


def _copied(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a batch, which can be freed before the host's batch: GKD replaces tensors in its copy."""
    with torch._C._DisableTorchDispatch():
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _arrivals(arrive: Callable[[dict[str, Any]], dict[str, Any]], recorder: Recorder) -> AbstractContextManager[Any]:
    """Records a batch when accelerate sends it to the device. By then, to detect the last batch, accelerate has
    collated the next one, which is still on the host (``accelerate/data_loader.py: DataLoaderShard.__iter__``)."""
    from accelerate import data_loader

    send = data_loader.send_to_device

    def send_and_see(batch: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(batch, _HostBatch):
            return send(batch, *args, **options)
        arrived = arrive(batch)
        recorder.adopt_batch(value for value in arrived.values() if isinstance(value, torch.Tensor))
        return arrived

    return patch.object(data_loader, "send_to_device", send_and_see)


def materialize(model: torch.nn.Module) -> torch.nn.Module:
    """Replaces every meta tensor with a fake one (call it under a fake mode); a tied parameter stays one parameter."""
    if getattr(model, "hf_quantizer", None) is not None:
        stand_in(model)
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None or old.device.type != "meta":
                    continue
                if id(old) not in fakes:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    is_parameter = isinstance(old, torch.nn.Parameter)
                    fakes[id(old)] = torch.nn.Parameter(new, old.requires_grad) if is_parameter else new
                table[name] = fakes[id(old)]
    return model


def conversion_in_place() -> AbstractContextManager[Any]:
    """Makes ``module.to()`` give fake parameters new data, as it does with real ones. By default it would call
    swap_tensors, which rejects fake tensors. A parameter shared by two modules stays shared."""

    def apply(module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(convert)
        for parameter in module._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    new = convert(parameter)
                if new is not parameter:
                    parameter.data = new
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
        return module

    return patch.object(torch.nn.Module, "_apply", apply)


def stand_in(model: Any) -> None:
    """Replaces the weights of bitsandbytes layers by fake quantized ones; call it under a fake mode."""
    import bitsandbytes

    quantize = functools.cache(_quantize)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = module.weight
            packed, described = quantize(
                (module.out_features, module.in_features),
                # The weights of an already quantized checkpoint are packed; they are dequantized to the model's dtype.
                model.config.dtype if model.hf_quantizer.pre_quantized else weight.dtype,
                blocksize=weight.blocksize,
                compress_statistics=weight.compress_statistics,
                quant_type=weight.quant_type,
                quant_storage=weight.quant_storage,
            )
            state = _quant_state(described)
            _exchange(module, _like(packed), quant_state=state, bnb_quantized=True)
            module.quant_state = state
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            # bitsandbytes/nn/modules.py: Int8Params._quantize makes int8 rows, and one float32 scale for each.
            rows = torch.empty((module.out_features, module.in_features), dtype=torch.int8)
            _exchange(module, rows, CB=rows, SCB=torch.empty(module.out_features))


def _quantize(shape: tuple[int, int], dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, Any]:
    """Quantizes on the meta device (``bitsandbytes/functional.py: quantize_4bit``). bitsandbytes computes its code
    table from values and caches it for the whole process, so a table without values replaces it here."""
    from bitsandbytes import functional
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), patch.dict(functional.name2qmap, {"dynamic": torch.empty(256, device="meta")}):
        packed, state = functional.quantize_4bit(torch.empty(shape, dtype=dtype, device="meta"), **options)
    return packed, state


def _exchange(linear: Any, stored: torch.Tensor, **attributes: Any) -> None:
    weight = torch.nn.Parameter(stored, requires_grad=False)
    for name, value in {**linear.weight.__dict__, **attributes}.items():
        setattr(weight, name, value)
    linear.weight = weight


def _quant_state(described: Any) -> Any:
    from bitsandbytes.functional import QuantState

    return QuantState(
        absmax=_like(described.absmax),
        shape=described.shape,
        code=_like(described.code),
        blocksize=described.blocksize,
        quant_type=described.quant_type,
        dtype=described.dtype,
        offset=_like(described.offset) if described.nested else None,
        state2=_quant_state(described.state2) if described.nested else None,
    )


def _like(described: torch.Tensor) -> torch.Tensor:
    return torch.empty(described.shape, dtype=described.dtype)
