"""Says among how many GPUs the tokens of a row may be shared (context parallelism), and where that is tried."""

from __future__ import annotations

from autotrain_mem.methods.table import METHODS
from autotrain_mem.planner.division import ROWS, STEPS, divisors
from autotrain_mem.planner.levers import SHARDING, SHARED_TOKENS
from autotrain_mem.planner.shardings import WITH_SHARED_TOKENS
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Job

LONG_ROW_TOKENS = 32768
"""From here on a plan without harm may share tokens. With checkpointing a row of 32,768 keeps 8.6 GB of an 8B model's
activations (32 layers x 4096 x 2 bytes a token): shorter ones mostly fit by that, and GPUs that share none are faster.
"""

NOT_WITH_SHARED_TOKENS: dict[str, tuple[str, str]] = {
    "packing": ("the mask that keeps packed rows apart is dropped", "--packing false"),
    "eval_packing": ("the mask that keeps packed rows apart is dropped", "--eval_packing false"),
    "padding_free": ("the mask that keeps rows apart is dropped", "--padding_free false"),
    "use_liger_kernel": ("its loss over shared tokens is not rehearsed yet", "--use_liger_kernel false"),
    "load_in_8bit": ("8-bit weights cannot be sharded", "--load_in_4bit"),
    "fp16": ("float16's scaler beside it is not rehearsed yet", "--bf16"),
    "assistant_only_loss": ("it is not rehearsed beside shared tokens yet", "--assistant_only_loss false"),
}
"""Argument -> why it does not go with context parallelism, and what does. accelerate attends causally, whatever mask a
layer is given (``accelerate/big_modeling.py: _attach_context_parallel_hooks``), and TRL refuses packing for it
(``trl/trainer/sft_trainer.py: __init__``)."""


def degrees(space: Space, job: Job) -> tuple[int, ...]:
    """Lists by how many GPUs a row may be shared, fewest first: 2, 4 and 8 of 8; none where it is not to be tried.

    Rows must be long, the model's layers attend to all that came before, and nothing that the user said forbid it.
    """
    given = job.arguments
    is_said = not space.pinned.isdisjoint((SHARED_TOKENS, "dp_replicate_size")) or SHARED_TOKENS in space.forbid
    others = (
        space.pinned >= {ROWS, STEPS},
        not space.shares_tokens,
        not METHODS[space.method].shares_tokens,
        not space.may_shard,
        SHARDING in space.forbid,
        job.accelerate is not None,
        job.python_call is not None,
        job.maximized is not None,
        given.get("sharding") not in (None, *WITH_SHARED_TOKENS),
        given.get("attn_implementation") not in (None, "sdpa"),
        given.get("bf16") is False,
        "pad_to_multiple_of" in given,
        any(given.get(name) for name in NOT_WITH_SHARED_TOKENS),
        space.row_tokens(space.base.max_length) < LONG_ROW_TOKENS,
    )
    if is_said or any(others):
        return ()
    return tuple(each for each in divisors(space.base.processes) if each > 1)
