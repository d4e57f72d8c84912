"""Checks what is asked for beside shards of the model (FSDP): what the libraries refuse, and what is not rehearsed.

The search combines none of these either; why a lever does not go with shards stands in its row (``planner.levers``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autotrain_mem.checks.collect import Problems
from autotrain_mem.checks.flags import Flags
from autotrain_mem.methods.table import METHODS
from autotrain_mem.planner.levers import LADDER

FSDP2 = ("fsdp2-no-reshard", "fsdp2", "hsdp")
FSDP = (*FSDP2, "fsdp1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """An argument that does not go with shards."""

    name: str
    values: str = ""
    """A pattern of the values that do not; empty for an argument that is on."""
    shardings: tuple[str, ...] = FSDP
    reason: str
    cure: str


REFUSED = (
    *(
        Refused(name=row.knobs[0], reason=row.not_sharded[0], cure=row.not_sharded[1])
        for row in LADDER
        if row.not_sharded
    ),
    Refused(  # its kernels are custom operators on pointers (bitsandbytes/backends/cuda/ops.py), unknown to DTensor
        name="optim",
        values=r".*(8bit|bnb|paged|ademamix|lion).*",
        shardings=FSDP2,
        reason="bitsandbytes' kernels do not know FSDP2's tensors",
        cure="--optim adamw_torch_fused keeps a share of its state on each GPU; or --sharding fsdp1, or ddp.",
    ),
    Refused(  # transformers/trainer.py: _build_accelerator_args and what follows refuse it with SHARDED_STATE_DICT
        name="save_only_model",
        reason="transformers writes checkpoints of shards with the optimizer's state, or none",
        cure="Remove --save_only_model, or give --save_strategy no: the trained model is written whole at the end.",
    ),
    # trl/generation/vllm_generation.py: _iter_fsdp1_params: its first summon_full_params makes a root of a unit, and
    # torch/distributed/fsdp/_runtime_utils.py: _share_state_and_init_handle_attrs refuses another root.
    Refused(
        name="use_vllm",
        shardings=("fsdp1",),
        reason="TRL gathers weights for vLLM before a first forward, and FSDP1 then refuses the forward",
        cure="Give --sharding fsdp2, or ddp; or remove --use_vllm.",
    ),
)
"""Each with the place in the installed libraries that its reason is from."""


def arguments(flags: Flags) -> Problems:
    """Arguments that do not go with the sharding that is asked for."""
    sharding = flags.given.get("sharding")
    for row in REFUSED:
        value = flags.given.get(row.name)
        is_meant = re.fullmatch(row.values, str(value)) is not None if row.values else bool(value)
        if value is not None and is_meant and sharding in row.shardings:
            asked = f"--{row.name} {value}" if row.values else f"--{row.name}"
            yield f"{asked} does not go with --sharding {sharding}: {row.reason}.", row.cure


def method(flags: Flags) -> Problems:
    """PPO calls the policy inside of what FSDP would wrap (``ppo_trainer.py: train``, ``unwrapped_model``)."""
    facts, sharding = METHODS[flags.method], flags.given.get("sharding")
    if facts.has_value_model and sharding in FSDP:
        yield (
            f"--sharding {sharding} does not work with {facts.title}: its trainer calls the policy and the value model "
            "by themselves, where FSDP gathers no weights.",
            "Give --sharding ddp: each GPU then holds all models. LoRA needs less: --use_peft.",
        )
