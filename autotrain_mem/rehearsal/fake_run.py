"""Runs a trainer on fake tensors, or on real ones under a simulated card, and records what CUDA would allocate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers.utils import import_utils

from autotrain_mem.rehearsal.cuda.rules import cuda_semantics, not_imitated
from autotrain_mem.rehearsal.cuda.workspaces import workspaces
from autotrain_mem.rehearsal.generation import generation_by_its_ends
from autotrain_mem.rehearsal.known_values import KnownValues, numbers
from autotrain_mem.rehearsal.model.from_pretrained import without_weights
from autotrain_mem.rehearsal.model.materialize import conversion_in_place
from autotrain_mem.rehearsal.ranks.invariants import trained_in_full
from autotrain_mem.rehearsal.ranks.recording import RankRecorder
from autotrain_mem.rehearsal.ranks.rules import RehearsedRank, real_rank
from autotrain_mem.rehearsal.trace.ledger import Device
from autotrain_mem.rehearsal.trace.phases import follow
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.rehearsal.vllm_stub import vllm_stand_in
from autotrain_mem.spec import Knobs, Phase, Trace

Collate = Callable[[list[Any]], Any]
EditRows = Callable[[list[Any]], list[Any]]


_PLAIN = frozenset({int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format})
_PURE_NAMESPACES = frozenset({"bitsandbytes"})
"""Libraries whose operators' results follow from shapes and dtypes alone; torch caches only its own."""


class QuickFakeMode(FakeTensorMode):  # type: ignore[misc]  # torch is untyped to mypy here
    """FakeTensorMode for static shapes, whose cache is cheaper to ask: its keys took half of a rehearsal's time.

    FakeTensorMode looks up every operator by the metadata of its arguments (``torch/_subclasses/fake_tensor.py:
    _cached_dispatch_impl``) and gathers them through a dataclass, field by field. Here the same facts are read
    directly. What is not an ordinary fake tensor or number goes the usual way, and a torch without these methods never
    calls them.
    """

    def _prep_args_for_hash(self, result: list[Any], args: Any, state: Any, id_hashed_objects: list[Any]) -> None:
        if isinstance(args, dict):
            for name, value in args.items():
                result.append(name)
                self._prep_args_for_hash(result, (value,), state, id_hashed_objects)
            return
        result.append(type(args))
        result.append(len(args))
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor and arg.fake_mode is self and arg.constant is None and arg.layout is torch.strided:
                result += _facts(arg)
            elif kind in _PLAIN:
                result += (kind, arg)
            elif kind is list or kind is tuple:
                self._prep_args_for_hash(result, arg, state, id_hashed_objects)
            else:
                super()._prep_args_for_hash(result, (arg,), state, id_hashed_objects)

    def _validate_cache_key(self, func: Any, args: Any, kwargs: Any) -> None:
        if func.namespace not in _PURE_NAMESPACES or func._schema.is_mutable:
            super()._validate_cache_key(func, args, kwargs)


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """``TensorMetadata`` of a strided tensor, without what follows from the rest."""
    return (
        FakeTensor,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.fake_device,
        tensor.requires_grad,
        tensor.is_inference(),
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_quantized,
    )


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Everything made inside has shape, dtype and device, and no bytes.

    transformers takes a fake tensor for a sign of tracing and then never looks at a mask's values
    (``transformers/utils/import_utils.py: is_tracing``). A rehearsal knows them, so it is told that none is fake.
    A copy of a fake tensor (PEFT copies the modules that are trained whole) stays in this mode: it would copy that too.
    """

    with (
        QuickFakeMode(allow_non_fake_inputs=True) as mode,
        conversion_in_place(),
        patch.object(import_utils, "is_fake_tensor", lambda value: False),
        patch.object(FakeTensor, "numpy", numbers),
        patch.object(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode, create=True),
    ):
        yield mode


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """A trainer and how it is to be driven: the same for a rehearsal and for a real run that is compared with it."""

    build: Callable[[], Any]
    """Makes the trainer."""
    edit_rows: EditRows = list
    """Makes the worst micro-batch of the rows that the sampler drew."""
    patches: Callable[[Any], AbstractContextManager[None]] = nullcontext
    """What must be arranged for the trainer while it trains, with the trainer built."""
    passes: int = 1
    """How often a training step goes over its rows, each time with an optimizer step; a rehearsal does so once."""
    micro_steps_per_generation: int = 0
    """How many micro-steps train on what is generated at once, of which a rehearsal runs a few."""


def rehearse_trainer(
    spec: TrainerSpec,
    compute_capability: tuple[int, int] = (8, 0),
    not_counted: tuple[str, ...] = (),
    rank: RehearsedRank | None = None,
) -> Trace:
    """Build a trainer and run its own ``train()`` on fake tensors; returns what it allocated.

    Args:
        not_counted: What this rehearsal leaves out, beside what no rehearsal imitates.
        rank: Which process of several this is, launched as such; None for a single one.
    """
    with ExitStack() as stack:
        mode = stack.enter_context(fake_tensors())
        stack.enter_context(without_weights())
        values = KnownValues(mode)
        kind = Recorder if rank is None else RankRecorder
        recorder = kind(values.run, workspace=workspaces(compute_capability))
        stack.enter_context(cuda_semantics(recorder, compute_capability))
        stack.enter_context(vllm_stand_in())
        if rank is not None:
            stack.enter_context(rank.rules(recorder))
        train_on_fakes(spec, recorder, values)
    trace = recorder.trace((*not_counted, *not_imitated(compute_capability)))
    work = replace(trace.work, passes=spec.passes, micro_steps_per_generation=spec.micro_steps_per_generation)
    return replace(trace, work=work)


def train_on_fakes(spec: TrainerSpec, recorder: Recorder, values: KnownValues) -> None:
    """Build the trainer and train it under a fake mode and under the rules of CUDA."""
    with generation_by_its_ends(recorder):
        trainer = spec.build()
        trainer.data_collator = _host_collator(trainer.data_collator, spec.edit_rows, values.arrive, recorder)
        whole = trained_in_full(trainer) if isinstance(recorder, RankRecorder) else nullcontext()
        with spec.patches(trainer), whole:
            _train(trainer, recorder)


class Watch:
    """Builds a trainer and runs its own ``train()`` on real CPU tensors, seen as a GPU would see it.

    Args:
        device: A simulated GPU; its out-of-memory error ends the training like a real one's.
        compute_capability: Of that GPU.
        knobs: Those of a process that was launched as one of several; None for a single one.
    """

    def __init__(
        self,
        device: Device | None = None,
        compute_capability: tuple[int, int] = (8, 0),
        knobs: Knobs | None = None,
    ) -> None:
        self._ranked = knobs if knobs is not None and knobs.processes > 1 else None
        kind = Recorder if self._ranked is None else RankRecorder
        self.recorder = kind(device=device, workspace=workspaces(compute_capability))
        self._compute_capability = compute_capability

    @property
    def phase(self) -> Phase:
        """Tells where the run is, or where it ended."""
        return self.recorder.phase

    @contextmanager
    def cuda_semantics(self) -> Iterator[None]:
        """Inside, a trainer may be built and trained."""
        process = nullcontext() if self._ranked is None else real_rank(self.recorder, self._ranked)
        with cuda_semantics(self.recorder, self._compute_capability, "real cpu"), process:
            yield

    def train(self, trainer: Any, edit_rows: EditRows = list, **options: Any) -> None:
        """``trainer.train(**options)``, watched; call it inside :meth:`cuda_semantics`.

        Args:
            edit_rows: Changes the rows of each micro-batch; for tests that compare with a rehearsal.
        """
        trainer.data_collator = _host_collator(trainer.data_collator, edit_rows, dict, self.recorder)
        _train(trainer, self.recorder, **options)


def _train(trainer: Any, recorder: Recorder, **train: Any) -> None:
    follow(trainer, recorder)
    with recorder.recording():
        trainer.train(**train)


def _host_collator(
    collate: Collate,
    edit_rows: Callable[[list[Any]], list[Any]],
    arrive: Callable[[dict[str, Any]], dict[str, Any]],
    recorder: Recorder,
) -> Collate:
    """Collation happens on the host, with real values and unseen; the batch is born on the device as it arrives."""

    def collate_on_host(rows: list[Any]) -> Any:
        with torch._C._DisableTorchDispatch():
            collated = collate(edit_rows(rows))
            if isinstance(collated, list):
                return collated  # prompts: they become tensors when they are tokenized
            # A copy to a device takes what a view shows, not the storage behind it.
            batch = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in collated.items()
            }
        batch = arrive(batch)
        recorder.adopt_batch(value for value in batch.values() if isinstance(value, torch.Tensor))
        return batch

    return collate_on_host
