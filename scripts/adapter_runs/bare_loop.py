"""Rehearses a bare loop around a model of PEFT's: no trainer, the model's own loss, torch's AdamW.

So are the runs of PEFT's method comparison made (``method_comparison/MetaMathQA/run.py: train``). Their batches are
sorted within buckets of 20 batches, the longest first, and the cache is emptied every 10 steps: the longest batch of a
bucket always finds it empty.
"""

from __future__ import annotations

import pathlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from autotrain_mem.rehearsal.cuda.rules import cuda_semantics
from autotrain_mem.rehearsal.cuda.workspaces import workspaces
from autotrain_mem.rehearsal.fake_run import fake_tensors, materialize
from autotrain_mem.rehearsal.known_values import KnownValues
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.trainers.weightless import without_weights
from autotrain_mem.types import Owner, Phase, Trace

STEPS = 2
"""The optimizer makes its state in the first; the second is as all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BareRun:
    """A run without a trainer, in bfloat16 and without checkpointing."""

    model: pathlib.Path
    """A folder with a config.json."""
    adapter: dict[str, Any] | None
    """PEFT's config; None where all weights are trained."""
    rows: int
    length: int
    """Tokens of the longest row of a batch; the last row has one less, since rows of one length need no mask."""
    keeps_adapter_dtype: bool
    """Whether the adapter stays in the model's dtype, where PEFT makes it float32."""
    compute_capability: tuple[int, int]


def rehearse_loop(run: BareRun) -> Trace:
    """Rehearse a run from the moment at which its model is loaded; returns its trace."""
    batch = _batch(run)
    with ExitStack() as stack:
        mode = stack.enter_context(fake_tensors())
        stack.enter_context(without_weights(materialize))
        values = KnownValues(mode)
        recorder = Recorder(values.run, workspace=workspaces(run.compute_capability))
        stack.enter_context(cuda_semantics(recorder, run.compute_capability))
        model = _loaded(run)
        recorder.adopt_model(model)
        with recorder.recording():
            _train(model, batch, recorder, values)
    return recorder.trace()


def _loaded(run: BareRun) -> Any:
    from peft import PeftConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.bfloat16)
    if run.adapter is None:
        return model.train()
    config = PeftConfig.from_peft_type(**run.adapter)
    return get_peft_model(model, config, autocast_adapter_dtype=not run.keeps_adapter_dtype).train()


def _train(model: Any, rows: dict[str, torch.Tensor], recorder: Recorder, values: KnownValues) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    optimizer.register_step_post_hook(lambda *_: _own(optimizer, recorder))
    tokens = int(rows["attention_mask"].sum())
    for _ in range(STEPS):
        recorder.empty_cache()
        batch = dict(values.arrive(rows))
        recorder.adopt_batch(batch.values())
        optimizer.zero_grad()
        recorder.enter_phase(Phase.FORWARD)
        output = model(**batch, num_items_in_batch=tokens)
        recorder.enter_phase(Phase.BACKWARD)
        output.loss.backward()
        recorder.enter_phase(Phase.OPTIMIZER_STEP)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _batch(run: BareRun) -> dict[str, torch.Tensor]:
    """Makes rows of one token, which are their labels too, padded to the longest."""
    ids = torch.ones((run.rows, run.length), dtype=torch.int64)
    mask = ids.clone()
    mask[-1, -1] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def _own(optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """The optimizer's state on the device is known as such."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                recorder.mark(value, Owner.OPTIMIZER_STATE, str(name))
