"""Describes how several processes may share a model, or the tokens of a row, and what each of them then holds."""

import re
from dataclasses import dataclass, replace

from autotrain_mem.search.division import divisors
from autotrain_mem.search.space import Space
from autotrain_mem.settings.knobs import ROWS, STEPS, ZEROS
from autotrain_mem.settings.levers import LEVERS, SHARDING, SHARED_SEQUENCE, SHARED_TOKENS, pulled
from autotrain_mem.settings.optimizer_verdicts import OPTIMIZERS_OF_BITSANDBYTES
from autotrain_mem.settings.own import SHARE_TOKENS, Sharding
from autotrain_mem.types import METHODS, Job, Knobs

FASTEST_FIRST: tuple[Sharding, ...] = ("ddp", "fsdp2-no-reshard", "fsdp2", "hsdp")
"""Shardings that a search tries; the first of equally fast ones wins. DeepSpeed is used only if the user asks."""

WITH_SHARED_TOKENS: tuple[Sharding, ...] = ("fsdp2-no-reshard", "fsdp2")
"""Shardings for context parallelism: torch supports it in FSDP2 only, and with HSDP it is not rehearsed."""

LEAST_FIRST: tuple[Sharding | None, ...] = (
    *("fsdp2", "zero3", "hsdp", "fsdp2-no-reshard", "zero2", "zero1", "ddp", None),
)
"""Shardings by the bytes that a process holds, fewest first."""

SAVES: dict[Sharding | None, frozenset[str]] = {
    "fsdp2-no-reshard": frozenset({"shards", "all nodes"}),
    "hsdp": frozenset({"shards", "reshards"}),
    "fsdp2": frozenset({"shards", "reshards", "all nodes"}),
}
"""Sharding -> what it saves. If it saves only a part of what another one saves, it needs more memory."""


def shardings(space: Space) -> tuple[Sharding | None, ...]:
    """Returns the shardings that this job allows, fastest first."""
    row = LEVERS[SHARDING]
    suits = row.suits(METHODS[space.method])
    is_fixed = not space.pinned.isdisjoint(row.knobs) or row.name in space.forbid or not suits
    if space.base.processes == 1 or is_fixed or not space.may_shard or space.base.sp_size > 1:
        return (space.base.sharding,)
    if space.base.cp_size > 1:
        return WITH_SHARED_TOKENS
    return tuple(each for each in FASTEST_FIRST if each != "hsdp" or space.nodes > 1)


def shared(space: Space, setting: Knobs) -> tuple[Knobs, ...]:
    """Returns the setting with every sharding that it supports."""
    if not space.base.has_group:
        return (setting,)
    groups = space.base.dp_replicate_size or space.nodes  # each node has a whole set of HSDP's shards
    ways = [
        replace(setting, sharding=each, dp_replicate_size=groups if each == "hsdp" else None)
        for each in shardings(space)
    ]

    def goes_together(way: Knobs) -> bool:
        """Returns whether the levers of ``way`` work with its sharding. FSDP makes trained parameters float32 under
        mixed precision, whatever the dtype (``accelerate/utils/fsdp_utils.py: fsdp2_prepare_model``)."""
        is_cast = way.is_sharded and not way.zero_stage
        casts_weights = is_cast and not way.use_peft and way.dtype != space.base.dtype
        # bitsandbytes' optimizers need whole parameters.
        needs_whole = way.is_sharded and OPTIMIZERS_OF_BITSANDBYTES.search(way.optim)
        needs = [need for row in pulled(way) for need in row.needs.items()]
        return not (casts_weights or needs_whole) and all(getattr(way, name) in values for name, values in needs)

    return tuple(way for way in ways if way == space.base or goes_together(way))


def least_shared(space: Space, setting: Knobs) -> Knobs:
    """Returns the setting with the sharding that needs the least memory."""
    return min(shared(space, setting), key=lambda way: LEAST_FIRST.index(way.sharding))


LONG_ROW_TOKENS = 32768
"""The shortest row that a plan divides among GPUs. With checkpointing, 32,768 tokens keep 8.6 GB of an 8B model's
activations (32 layers x 4096 x 2 bytes a token); shorter rows mostly fit, and are faster whole."""

NOT_WITH: dict[str, tuple[str, str]] = {
    "packing": ("the mask that keeps packed rows apart is dropped", "--packing false"),
    "eval_packing": ("the mask that keeps packed rows apart is dropped", "--eval_packing false"),
    "padding_free": ("the mask that keeps rows apart is dropped", "--padding_free false"),
    "use_liger_kernel": ("its loss over divided rows is not rehearsed yet", "--use_liger_kernel false"),
    "load_in_8bit": ("8-bit weights cannot be sharded", "--load_in_4bit"),
    "fp16": ("float16's gradient scaler is not rehearsed with divided rows yet", "--bf16"),
    "assistant_only_loss": ("it is not rehearsed with divided rows yet", "--assistant_only_loss false"),
}
"""Argument -> why it does not work with context or sequence parallelism, and the flag to use instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTokens:
    """Describes one way for several processes to share the tokens of a row."""

    name: str
    """The knob that sets how many processes share a row."""
    shardings: tuple[Sharding, ...]
    """Supported shardings; the last divides most. ``owner`` says why there are no others."""
    owner: str
    attention: str
    """Pattern of the supported ``attn_implementation`` values. ``attends`` says why there are no others."""
    attends: str
    in_half_precision: bool
    """Whether its kernels need half precision and compute capability >= 8.0 (``rehearsal.cuda.attention_kernels``)."""
    parts: int
    """The number of parts of each row that a process holds."""


WAYS = {
    # accelerate attends causally, whatever mask a layer is given (accelerate/big_modeling.py:
    # _attach_context_parallel_hooks), and TRL refuses packing for it (trl/trainer/sft_trainer.py: __init__).
    SHARED_TOKENS: SharedTokens(
        name=SHARED_TOKENS,
        shardings=WITH_SHARED_TOKENS,
        owner="torch supports context parallelism only under FSDP2",
        attention="sdpa",
        attends="transformers supports context parallelism with sdpa only",
        in_half_precision=True,
        parts=2,
    ),
    # DeepSpeed gives no mask either (deepspeed/runtime/sequence_parallel/ulysses_sp.py: uattn_wrapper), and takes other
    # kernels too (accelerate/utils/dataclasses.py: DeepSpeedSequenceParallelConfig).
    SHARED_SEQUENCE: SharedTokens(
        name=SHARED_SEQUENCE,
        shardings=ZEROS,
        owner="sequence parallelism needs DeepSpeed",
        attention="sdpa|flash_attention_[23]",
        attends="DeepSpeed's sequence parallelism wraps sdpa and flash attention only",
        in_half_precision=False,
        parts=1,
    ),
}


def way_of(job: Job) -> SharedTokens:
    """Returns the way that the user's sharding supports; context parallelism if no sharding is given."""
    return WAYS[SHARED_SEQUENCE if job.arguments.get("sharding") in ZEROS else SHARED_TOKENS]


def degrees(space: Space, job: Job) -> tuple[int, ...]:
    """Lists the numbers of GPUs that may share a row, fewest first: 2, 4 and 8 of 8; none if settings rule it out."""
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
        any(given.get(name) for name in NOT_WITH),
        space.row_tokens(space.base) < LONG_ROW_TOKENS,
    )
    if is_said or any(others):
        return ()
    return tuple(each for each in divisors(space.base.processes) if each > 1)
