"""Wires all that a process of several needs beside the rules of CUDA: for a rehearsal, and for a simulated one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from autotrain_mem.parallel.config import accelerate_config
from autotrain_mem.parallel.environment import launch_environment
from autotrain_mem.rehearsal.ranks.collectives import Collectives
from autotrain_mem.rehearsal.ranks.ddp import ddp_rules
from autotrain_mem.rehearsal.ranks.fsdp1 import fsdp1_rules
from autotrain_mem.rehearsal.ranks.fsdp2 import fsdp2_rules
from autotrain_mem.rehearsal.ranks.group import Place, fake_group, on_gpus, real_group
from autotrain_mem.rehearsal.ranks.offload import fsdp2_offload
from autotrain_mem.rehearsal.ranks.recording import RankRecorder
from autotrain_mem.rehearsal.ranks.ring_attention import ring_attention
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Knobs
from autotrain_mem.types.hardware import Capability

_LOADED_BY_ALL = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_SYNC_MODULE_STATES": "false"}
"""A rehearsal loads nothing: shards come out the same, whoever read the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedRank:
    """One process of several that are not there."""

    knobs: Knobs
    config: Mapping[str, Any]
    """The content of accelerate's config."""
    rank: int = 0

    def launched(self) -> AbstractContextManager[None]:
        """Inside, this process finds itself among the others, as accelerate would have launched it."""
        return fake_group(self._place, {**launch_environment(self.config), **_LOADED_BY_ALL})

    def rules(self, recorder: Recorder, compute_capability: Capability) -> AbstractContextManager[None]:
        """Inside, a recorded trainer trains as this process would."""
        assert isinstance(recorder, RankRecorder)
        recorder.collectives = Collectives(self._place.devices, is_fake=True)
        return _sharding(recorder, self.knobs, compute_capability, is_fake=True)

    @property
    def _place(self) -> Place:
        nodes = int(self.config.get("num_machines") or 1)
        return Place(rank=self.rank, processes=self.knobs.processes, nodes=nodes)


def rehearsed_rank(
    knobs: Knobs, accelerate: Mapping[str, Any] | None = None, rank: int = 0, *, attention: str | None = None
) -> RehearsedRank | None:
    """Return the process to rehearse; None for a single one without a group.

    Args:
        accelerate: The user's own config; None for ours.
        attention: ``attn_implementation``; None for the model's own.
    """
    if not knobs.has_group:
        return None
    # HSDP's groups of shards are ours to place, one on each node; where others lie changes the speed alone.
    nodes = knobs.dp_replicate_size or 1
    config = accelerate_config(knobs, nodes=nodes, attention=attention) if accelerate is None else accelerate
    return RehearsedRank(knobs=knobs, config=config, rank=rank)


@contextmanager
def real_rank(recorder: Recorder, knobs: Knobs, compute_capability: Capability) -> Iterator[None]:
    """Inside, this process of several that are there trains on CPU tensors that stand for a GPU's.

    Its environment is a launched process's already; they talk through gloo.
    """
    assert isinstance(recorder, RankRecorder)
    recorder.collectives = Collectives(knobs.processes, is_fake=False)
    with real_group(), on_gpus(), _sharding(recorder, knobs, compute_capability, is_fake=False):
        yield


@contextmanager
def _sharding(recorder: RankRecorder, knobs: Knobs, compute_capability: Capability, *, is_fake: bool) -> Iterator[None]:
    recorder.shards, recorder.offloads = knobs.is_sharded, knobs.fsdp_offload_params
    with ExitStack() as stack:
        if knobs.zero_stage:
            from autotrain_mem.rehearsal.ranks.zero import zero_rules  # DeepSpeed takes seconds to import

            stack.enter_context(zero_rules(recorder, knobs, is_fake=is_fake))
            if knobs.sp_size > 1:
                from autotrain_mem.rehearsal.ranks.sequence import shared_sequences

                stack.enter_context(shared_sequences(recorder, is_fake=is_fake))
        elif not knobs.is_sharded:
            stack.enter_context(ddp_rules(recorder, is_fake=is_fake))
        elif knobs.sharding == "fsdp1":
            stack.enter_context(fsdp1_rules(recorder))
        else:
            stack.enter_context(fsdp2_rules(recorder, knobs.shards))
            if knobs.cp_size > 1:
                stack.enter_context(ring_attention(compute_capability))
            if knobs.fsdp_offload_params:
                stack.enter_context(fsdp2_offload(recorder))
        yield
