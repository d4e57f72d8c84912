"""Says among how many GPUs the tokens of a row may be shared, in which way, and where that is tried."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autotrain_mem.search.division import divisors
from autotrain_mem.search.shardings import WITH_SHARED_TOKENS
from autotrain_mem.search.space import Space
from autotrain_mem.settings.knobs import ROWS, STEPS, ZEROS
from autotrain_mem.settings.levers import SHARDING
from autotrain_mem.settings.own import SHARE_TOKENS, Sharding
from autotrain_mem.types import Job
from autotrain_mem.types.methods_table import METHODS

LONG_ROW_TOKENS = 32768
"""From here on a plan without harm may share tokens. With checkpointing a row of 32,768 keeps 8.6 GB of an 8B model's
activations (32 layers x 4096 x 2 bytes a token): shorter ones mostly fit by that, and GPUs that share none are faster.
"""

_NOT_WITH: dict[str, tuple[str, str]] = {
    "packing": ("the mask that keeps packed rows apart is dropped", "--packing false"),
    "eval_packing": ("the mask that keeps packed rows apart is dropped", "--eval_packing false"),
    "padding_free": ("the mask that keeps rows apart is dropped", "--padding_free false"),
    "use_liger_kernel": ("its loss over shared tokens is not rehearsed yet", "--use_liger_kernel false"),
    "load_in_8bit": ("8-bit weights cannot be sharded", "--load_in_4bit"),
    "fp16": ("float16's scaler beside it is not rehearsed yet", "--bf16"),
    "assistant_only_loss": ("it is not rehearsed beside shared tokens yet", "--assistant_only_loss false"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTokens:
    """One way for several processes to hold a row together."""

    name: str
    """The knob that counts them."""
    shardings: tuple[Sharding, ...]
    """What it goes with; the last divides most."""
    owner: str
    """Why nothing else."""
    not_with: Mapping[str, tuple[str, str]]
    """Argument -> why it does not go with it, and what does."""
    attention: str
    """A pattern of values of ``attn_implementation``."""
    attends: str
    """Why no other."""
    in_half_precision: bool
    """Runs the kernels of half precision alone, which need a card of compute capability 8.0
    (``rehearsal.cuda.attention_kernels``)."""
    parts: int
    """Into how many parts a row is cut for each process."""


WAYS = {
    # accelerate attends causally, whatever mask a layer is given (accelerate/big_modeling.py:
    # _attach_context_parallel_hooks), and TRL refuses packing for it (trl/trainer/sft_trainer.py: __init__).
    "cp_size": SharedTokens(
        name="cp_size",
        shardings=WITH_SHARED_TOKENS,
        owner="torch has context parallelism under FSDP2 only",
        not_with=_NOT_WITH,
        attention="sdpa",
        attends="transformers shares the tokens of sdpa only",
        in_half_precision=True,
        parts=2,
    ),
    # DeepSpeed gives no mask either (deepspeed/runtime/sequence_parallel/ulysses_sp.py: uattn_wrapper), and takes other
    # kernels too (accelerate/utils/dataclasses.py: DeepSpeedSequenceParallelConfig).
    "sp_size": SharedTokens(
        name="sp_size",
        shardings=ZEROS,
        owner="sequence parallelism is DeepSpeed's",
        not_with=_NOT_WITH,
        attention="sdpa|flash_attention_[23]",
        attends="DeepSpeed's sequence parallelism goes around sdpa and flash attention only",
        in_half_precision=False,
        parts=1,
    ),
}


def way_of(job: Job) -> SharedTokens:
    """Returns the way that goes with the sharding that the user asked for; torch's, where nothing is said."""
    return WAYS["sp_size" if job.arguments.get("sharding") in ZEROS else "cp_size"]


def degrees(space: Space, job: Job) -> tuple[int, ...]:
    """Lists by how many GPUs a row may be shared, fewest first: 2, 4 and 8 of 8; none where it is not to be tried.

    Rows must be long, the model's layers attend to all that came before, and nothing that the user said forbid it.
    """
    given, way = job.arguments, way_of(job)
    is_said = not space.pinned.isdisjoint((*SHARE_TOKENS, "dp_replicate_size")) or way.name in space.forbid
    others = (
        space.pinned >= {ROWS, STEPS},
        not space.shares_tokens,
        not METHODS[space.method].shares_tokens,
        not space.may_shard,
        SHARDING in space.forbid,
        job.accelerate is not None,
        job.python_call is not None,
        job.maximized is not None,
        given.get("sharding") not in (None, *way.shardings),
        re.fullmatch(way.attention, str(given.get("attn_implementation") or "sdpa")) is None,
        way.in_half_precision and given.get("bf16") is False,
        "pad_to_multiple_of" in given,
        any(given.get(name) for name in way.not_with),
        space.row_tokens(space.base.max_length) < LONG_ROW_TOKENS,
    )
    if is_said or any(others):
        return ()
    return tuple(each for each in divisors(space.base.processes) if each > 1)
