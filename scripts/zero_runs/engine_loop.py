"""Rehearses a bare loop around DeepSpeed's engine: no trainer, one group of parameters, DeepSpeed's own optimizer.

The model is loaded whole and handed to ``deepspeed.initialize``, which moves it to the device and divides it there; the
trace begins before that. A loop of TRL's differs: under ZeRO-3 no process ever holds the whole model
(``transformers/integrations/deepspeed.py: HfTrainerDeepSpeedConfig``), and its optimizer has two groups, of which only
one decays (``transformers/trainer.py: get_optimizer_grouped_parameters``).
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from autotrain_mem.rehearsal.cuda import triton_kernels
from autotrain_mem.rehearsal.cuda.rules import cuda_semantics
from autotrain_mem.rehearsal.cuda.workspaces import workspaces
from autotrain_mem.rehearsal.fake_run import fake_tensors, materialize
from autotrain_mem.rehearsal.known_values import KnownValues
from autotrain_mem.rehearsal.ranks.rank import rehearsed_rank
from autotrain_mem.rehearsal.ranks.recording import RankRecorder
from autotrain_mem.trainers.weightless import without_weights
from autotrain_mem.types import Knobs, Owner, Phase, Trace

STEPS = 3
"""ZeRO-3 learns the order of its modules in the first, makes its optimizer's state there, and fetches ahead from then
on (``deepspeed/runtime/zero/partitioned_param_coordinator.py``): the third is as all others."""
ADAMW = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8}}


@dataclass(frozen=True, kw_only=True, slots=True)
class BareRun:
    """A run of DeepSpeed's engine without a trainer."""

    model: pathlib.Path
    """A folder with a config.json."""
    zero: dict[str, Any]
    """DeepSpeed's ``zero_optimization``."""
    length: int
    """Tokens of each micro-batch's one row, none of them padding."""
    recomputes: bool
    """Whether activations are checkpointed, without reentrance."""
    liger: str | None
    """The version of Liger, whose layers and fused loss stand in for the model's own; None for the model's own."""
    processes: int
    attention: str
    """The attention that transformers is asked for."""
    compute_capability: tuple[int, int]

    @property
    def knobs(self) -> Knobs:
        """What of it the rules for processes look at."""
        offload = {name: self.zero.get(name, {}).get("device") for name in ("offload_optimizer", "offload_param")}
        return Knobs(
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing=self.recomputes,
            use_peft=False,
            dtype="bfloat16",
            optim="adamw_torch_fused",
            max_length=self.length,
            processes=self.processes,
            sharding=("zero1", "zero2", "zero3")[self.zero["stage"] - 1],
            offload_optimizer_device=offload["offload_optimizer"],
            offload_param_device=offload["offload_param"],
        )

    @property
    def config(self) -> dict[str, Any]:
        """What DeepSpeed is given."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": ADAMW,
            "zero_optimization": self.zero,
        }


def rehearse_loop(run: BareRun) -> Trace:
    """Rehearse the first process of a run, from the moment at which the model is on the host; returns its trace."""
    rank = rehearsed_rank(run.knobs)
    assert rank is not None, "a run of one process divides nothing"
    with ExitStack() as stack:
        stack.enter_context(rank.launched())
        mode = stack.enter_context(fake_tensors())
        stack.enter_context(without_weights(materialize))
        values = KnownValues(mode)
        recorder = RankRecorder(values.run, workspace=workspaces(run.compute_capability))
        stack.enter_context(cuda_semantics(recorder, run.compute_capability))
        stack.enter_context(rank.rules(recorder, run.compute_capability))
        stack.enter_context(_fused_adam())
        stack.enter_context(
            patch.object(triton_kernels, "installed_versions", lambda names: dict.fromkeys(names, run.liger))
        )
        model = _loaded(run)
        with recorder.recording():
            _train(run, model, recorder, values)
    return recorder.trace()


def _loaded(run: BareRun) -> Any:
    from transformers import AutoModelForCausalLM, trainer

    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.bfloat16, attn_implementation=run.attention)
    if run.liger:
        trainer.apply_liger_kernel(model, None)
    if run.recomputes:
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _train(run: BareRun, model: Any, recorder: RankRecorder, values: KnownValues) -> None:
    import deepspeed

    deepspeed.init_distributed()
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=run.config)
    optimizer.optimizer.register_step_post_hook(lambda inner, *_: _own(inner, recorder))
    for _ in range(STEPS):
        batch = _batch(run.length, model.config.vocab_size, recorder, values)
        recorder.enter_phase(Phase.FORWARD)
        loss = engine(**batch).loss
        recorder.enter_phase(Phase.BACKWARD)
        engine.backward(loss)
        recorder.enter_phase(Phase.OPTIMIZER_STEP)
        engine.step()


def _batch(length: int, vocabulary: int, recorder: RankRecorder, values: KnownValues) -> dict[str, torch.Tensor]:
    """Makes a row of random tokens, which are its labels too."""
    with torch._C._DisableTorchDispatch():
        row = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    ids = values.arrive({"input_ids": row})["input_ids"]
    recorder.adopt_batch([ids])
    return {"input_ids": ids, "labels": ids}


def _own(optimizer: Any, recorder: RankRecorder) -> None:
    """The optimizer's state on the device is known as such."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (recorder.host is None or value not in recorder.host):
                recorder.mark(value, Owner.OPTIMIZER_STATE, str(name))


@contextmanager
def _fused_adam() -> Iterator[None]:
    """DeepSpeed's Adam for GPUs without its compiled step, which takes nothing beside what it is given
    (``csrc/adam/multi_tensor_adam.cu``)."""
    from deepspeed.ops.adam import fused_adam

    builder = SimpleNamespace(load=lambda: SimpleNamespace(multi_tensor_adam=lambda *_: None))
    with patch.object(fused_adam, "FusedAdamBuilder", lambda: builder):
        yield
