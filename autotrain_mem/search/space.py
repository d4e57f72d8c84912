"""Holds the search space: the requested settings, the pins, and the ways to split the effective batch.

Lengths are in tokens, batch sizes in rows. A micro-batch is for one device, the effective batch for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autotrain_mem.search.adapter import Adapter, adapter_for
from autotrain_mem.search.division import check_positive, divisors, either, multiples, nearest, rows_allowed
from autotrain_mem.settings.knobs import COMPLETION_KNOBS, EVALUATED_ROWS, ROWS, STEPS
from autotrain_mem.settings.levers import EXPANDABLE, LOST_ABOVE, USUAL_WEIGHT
from autotrain_mem.settings.words import MAX_LENGTH, MAX_SLOWDOWN, wished_share, without_maximized
from autotrain_mem.support.errors import BatchSplitError, ContextLengthError
from autotrain_mem.types import DataProfile, Fit, Job, Knobs, ModelFacts
from autotrain_mem.types.hardware import Capability, lacks_bf16

UNKNOWN_ROW_TOKENS = 1024
"""TRL 1.12's default ``max_length`` (``SFTConfig``), used to guide the search if nothing limits a row."""

FIXES_SHARDING = ("save_only_model", "deepspeed")
"""Arguments that forbid shards (``checks.sharding: REFUSED``), or set how the model is divided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Holds everything that the search needs to know about a job.

    Example: TRL's defaults and ``--effective_batch_size 12`` give ``base`` 6 x 2 (the largest divisor of 12 that is
    not above TRL's 8), and 12 x 1, 6 x 2, 4 x 3, 3 x 4, 2 x 6 and 1 x 12 as the splits to choose from.
    """

    base: Knobs
    """TRL's defaults with the user's arguments; its max_length is the requested one."""
    pinned: frozenset[str] = frozenset()
    """Names of the knobs that the user gave. ``max_length: auto`` is a request, not a pin."""
    effective_batch_size: int
    """The effective batch size of all processes."""
    fit: Fit = "all"
    forbid: frozenset[str] = frozenset()
    context_length: int | None = None
    is_quantized: bool = False
    """Whether the checkpoint is already quantized."""
    longest: int | None = None
    """Tokens of the longest row if the dataset was read; in online methods, of the longest prompt."""
    least_length: int = 0
    """The least ``max_length`` allowed, in tokens (``DataProfile.least_length``)."""
    rows_allowed: tuple[int, ...] | None = None
    """Micro-batches to choose from, largest first; None for all divisors."""
    max_slowdown: float = MAX_SLOWDOWN
    """A plan is passed over if it is this many times slower than the best plan of the next level."""
    method: str = "sft"
    nodes: int = 1
    """The number of machines."""
    may_shard: bool = True
    """Whether the search may divide the model."""
    shares_tokens: bool = False
    """Whether the model's layers allow several processes to share the tokens of a row."""
    model: str = "the model"
    """The model's name in messages."""
    adapter: Adapter | None = None
    """Settings that come with LoRA if the plan turns it on; None if the user turned it on."""
    checkpoint_dtype: str | None = None
    """The dtype of the saved weights; None if unknown."""

    @property
    def share(self) -> int:
        """Returns the rows of an optimizer step for each process, or for each group of processes that shares rows."""
        return self.effective_batch_size // self.base.data_parallel_size

    def row_tokens(self, knobs: Knobs) -> int:
        """Returns the tokens of the longest possible row: a packed block, or a prompt with its completion."""
        if self.base.completion_length:
            return (self.longest or UNKNOWN_ROW_TOKENS) + self.base.completion_length
        longest = self.longest if self.base.pads_rows else None
        known = [tokens for tokens in (knobs.max_length, longest, self.context_length) if tokens is not None]
        return min(known, default=UNKNOWN_ROW_TOKENS)

    def micro_batch_tokens(self, knobs: Knobs) -> int:
        """Returns the tokens of one micro-batch."""
        return knobs.per_device_train_batch_size * self.row_tokens(knobs)


SHORTEST = 64
FINE_GRID = 16
COARSE_GRID = 64
COARSE_FROM = 256
"""Lengths to try, in tokens: 64, 80, ... 256, 320, 384 and so on. Attention kernels work on tiles of 64 or 128 tokens,
so a finer grid gains little; below 256 a step of 64 would cut too much of a row."""


def lengths_below(longest: int, least: int) -> tuple[int, ...]:
    """Lists the lengths to try: at least ``least``, and shorter than the longest row."""
    fine, coarse = range(SHORTEST, min(COARSE_FROM, longest), FINE_GRID), range(COARSE_FROM, longest, COARSE_GRID)
    return tuple(length for length in (*fine, *coarse) if length >= least)


def micro_batches(space: Space) -> tuple[int, ...]:
    """Lists the micro-batches to choose from, largest first."""
    if space.pinned & {ROWS, STEPS}:
        return (space.base.per_device_train_batch_size,)
    return space.rows_allowed or tuple(divisors(space.share)[::-1])


def with_rows(knobs: Knobs, rows: int, effective_batch_size: int | None = None) -> Knobs:
    """Splits the effective batch, by default that of the knobs, into micro-batches of ``rows`` on each device."""
    steps = (effective_batch_size or knobs.effective_batch_size) // (rows * knobs.data_parallel_size)
    if (rows, steps) == (knobs.per_device_train_batch_size, knobs.gradient_accumulation_steps):
        return knobs
    return replace(knobs, per_device_train_batch_size=rows, gradient_accumulation_steps=steps)


def given_knobs(job: Job) -> dict[str, Any]:
    """Returns the knobs that the user gave."""
    names = {field.name for field in fields(Knobs)}
    given = {name: value for name, value in without_maximized(job.arguments).items() if name in names}
    return given | {name: tuple(value) for name, value in given.items() if isinstance(value, list)}


def make_space(
    defaults: Knobs,
    job: Job,
    facts: ModelFacts,
    *,
    longest: int | None,
    profile: DataProfile | None = None,
    nodes: int = 1,
) -> Space:
    """Returns the space of one job. ``longest`` and ``profile`` are None if the data were not read. Raises UsageError
    for numbers that are not positive integers, all in one message, BatchSplitError if the pinned sizes do not make up
    the effective batch, and ContextLengthError if the pinned max_length, or prompt and completion together, exceed the
    model's context."""
    given, context_length = given_knobs(job), facts.context_length
    counts = {name: given[name] for name in (*_COUNTS, "lora_r") if name in given}
    if given.get(MAX_LENGTH) is not None:
        counts[MAX_LENGTH] = given[MAX_LENGTH]
    if job.effective_batch_size is not None:
        counts["effective_batch_size"] = job.effective_batch_size
    check_positive(counts)
    used = defaults if job.is_evaluated else replace(defaults, per_device_eval_batch_size=None)
    overlaid = replace(used, **given)
    if overlaid.has_group or not (facts.takes_liger or overlaid.use_liger_kernel):
        overlaid = replace(overlaid, use_liger_kernel=given.get("use_liger_kernel"))
    if _keeps_reference(job, overlaid, profile) and not overlaid.precompute_ref_log_probs:
        overlaid = replace(overlaid, precompute_ref_log_probs=None)
    if job.effective_batch_size is not None:
        rows = _base_rows(defaults, job.effective_batch_size, given, nodes)
        overlaid = with_rows(overlaid, rows, job.effective_batch_size)
    if MAX_LENGTH in given:
        limit = given[MAX_LENGTH]
        if limit is not None and context_length is not None and limit > context_length:
            raise ContextLengthError(
                f"--max_length {limit} is beyond the model's context of {context_length} tokens",
                hint=f"use --max_length {context_length} or less, or --max_length auto",
            )
    elif not job.is_online:
        is_kept = job.method_facts.long_rows == "kept"
        if is_kept and longest is not None and context_length is not None and longest > context_length:
            raise ContextLengthError(
                f"The longest row has {longest} tokens, the model's context is {context_length}, and TRL's "
                f"{job.method_facts.trainer} cuts only answers, so a long prompt stays",
                hint="drop the longest rows from the data, or use a model with a longer context",
            )
        asked = None if profile is None else profile.asked_length(wished_share(job.arguments.get(MAX_LENGTH)))
        wanted = next((each for each in (asked, longest, defaults.max_length) if each is not None), None)
        within = [tokens for tokens in (wanted, context_length) if tokens is not None]
        overlaid = replace(overlaid, max_length=min(within, default=None))
    name, tokens, prompt = overlaid.completion_knob, overlaid.completion_length, longest or 0
    if tokens and context_length is not None and prompt + tokens > context_length:
        check_prompt(prompt, context_length)
        beside = f"the longest prompt ({prompt} tokens) and " if prompt else ""
        raise ContextLengthError(
            f"{beside}--{name} {tokens} are beyond the model's context of {context_length} tokens",
            hint=f"use --{name} {context_length - prompt} or less",
        )
    allowed = rows_allowed(job, overlaid)
    if allowed is not None and overlaid.per_device_train_batch_size not in allowed:
        smaller = [rows for rows in allowed if rows < overlaid.per_device_train_batch_size]
        overlaid = with_rows(overlaid, max(smaller, default=min(allowed)))
    # vLLM's sleep mode rejects expandable segments (``vllm/device_allocator/cumem.py: CuMemAllocator``).
    implied = {EXPANDABLE} if job.arguments.get("use_vllm") else set()
    return Space(
        base=overlaid,
        pinned=frozenset(given) | implied,
        effective_batch_size=overlaid.effective_batch_size,
        fit=job.fit,
        forbid=job.forbid,
        context_length=context_length,
        is_quantized=facts.is_quantized,
        longest=longest,
        least_length=0 if profile is None else profile.least_length,
        rows_allowed=allowed,
        max_slowdown=job.max_slowdown,
        nodes=nodes,
        may_shard=not any(job.arguments.get(name) for name in FIXES_SHARDING),
        shares_tokens=facts.shares_tokens,
        method=job.method,
        model=job.model,
        adapter=None if overlaid.use_peft else adapter_for(overlaid, job, facts, profile),
        checkpoint_dtype=facts.checkpoint_dtype,
    )


_SCORES_LATER = ("sync_ref_model", "dataset_streaming", "streaming", "bf16_full_eval", "fp16_full_eval")
"""Arguments with which TRL refuses to precompute the reference's scores (``trl/trainer/dpo_trainer.py: __init__,
_precompute_ref_logps``), or transformers leaves the model on the host until training (``trainer.py: __init__``)."""


def _keeps_reference(job: Job, knobs: Knobs, profile: DataProfile | None) -> bool:
    """Returns whether a reference must score the rows as they are trained on. TRL does so for images. A script may hold
    a reference of its own, or evaluate other rows later. Outside autocast, flash-attention takes no float32."""
    shows_images = bool(job.images) or (profile is not None and profile.images is not None)
    is_flash = "flash" in str(job.arguments.get("attn_implementation")) and knobs.dtype not in HALF
    is_given = job.python_call is not None or any(job.arguments.get(name) for name in _SCORES_LATER)
    return shows_images or is_flash or is_given


_COUNTS = (ROWS, STEPS, EVALUATED_ROWS, *COMPLETION_KNOBS, "num_generations", "local_rollout_forward_batch_size")


def check_prompt(prompt: int, context_length: int) -> None:
    """Raises ContextLengthError if the longest prompt leaves no token for a completion."""
    if context_length <= prompt:
        raise ContextLengthError(
            f"The longest prompt has {prompt} tokens, and the model's context is {context_length}.",
            hint="TRL truncates no prompt: drop the longest ones from the data, or use a model with a longer context.",
        )


def _base_rows(defaults: Knobs, effective: int, given: dict[str, Any], nodes: int) -> int:
    rows, steps, processes = given.get(ROWS), given.get(STEPS), defaults.data_parallel_size
    if effective % processes:
        groups, fewer = f"{defaults.processes} GPUs", _dividing(effective, defaults.processes, nodes)
        if defaults.token_shards > 1:
            groups = f"{processes} groups of {defaults.token_shards} GPUs"
            fewer = f"another --{'cp_size' if defaults.cp_size > 1 else 'sp_size'}"
        raise BatchSplitError(
            f"{groups} do not divide the effective batch size {effective}: each must have equally many rows",
            hint=f"use --effective_batch_size {either(multiples(processes, effective))}, or {fewer}",
        )
    if rows and steps and rows * steps * processes != effective:
        product, of_all = rows * steps * processes, f" times {processes} GPUs" if processes > 1 else ""
        raise BatchSplitError(
            f"--{ROWS} {rows} times --{STEPS} {steps}{of_all} is {product}, not the effective batch size {effective}",
            hint=f"use --effective_batch_size {product} with both flags, or --effective_batch_size {effective} alone",
        )
    share = effective // processes
    for name in (ROWS, STEPS):
        if (value := given.get(name)) and share % value:
            whole = " or ".join(f"--effective_batch_size {each}" for each in multiples(value * processes, effective))
            of_all = f" on {processes} GPUs" if processes > 1 else ""
            smaller = either(nearest(divisors(share), value))
            raise BatchSplitError(
                f"--{name} {value}{of_all} does not divide the effective batch size {effective}",
                hint=f"keep --{name} {value} and use {whole},\n"
                f"or keep --effective_batch_size {effective} and use --{name} {smaller}",
            )
    if rows:
        return int(rows)
    if steps:
        return share // int(steps)
    # TRL's micro-batch if it divides the effective batch, else the next smaller one that does
    return max(rows for rows in divisors(share) if rows <= defaults.per_device_train_batch_size)


def _dividing(effective: int, processes: int, nodes: int) -> str:
    counts, devices = divisors(effective), processes // nodes
    if nodes == 1:
        return f"--gpus {either(nearest(counts, processes))}"
    if whole := [each for each in counts if each % devices == 0]:
        return f"--gpus {devices} --nodes {either([each // devices for each in nearest(whole, processes)])}"
    return f"another number of GPUs in all: {either(nearest(counts, processes))}"


HALF = ("float16", "bfloat16")


def precise_for(base: Knobs, arguments: Mapping[str, Any], compute_capability: Capability) -> Knobs:
    """Returns the base of a search with ``fp16`` on cards without bfloat16, unless the user's settings forbid it.

    TRL's default is bfloat16 everywhere (``trl/trainer/base_config.py: __post_init__``). A card before Ampere emulates
    it (``torch/cuda/__init__.py: is_bf16_supported``), without tensor cores and without a fused attention kernel.
    """
    precise = replace(base, fp16=True)
    if lacks_bf16(compute_capability) and not {"bf16", "fp16"} & arguments.keys() and can_scale(precise):
        return precise
    return base


def half_of(knobs: Knobs) -> str:
    """Returns the half-precision dtype for a frozen base: that of autocast, so that no weight is cast."""
    return "float16" if knobs.fp16 else "bfloat16"


def loses_nothing(base: Knobs, checkpoint_dtype: str | None) -> bool:
    """Returns whether the base is frozen and already saved in half precision, so that rounding loses nothing. PEFT
    keeps the adapter in float32 (``peft/tuners/tuners_utils.py: cast_adapter_dtype``)."""
    return base.use_peft and checkpoint_dtype == half_of(base)


def loses_updates(knobs: Knobs) -> bool:
    """Returns whether the trained weights are bfloat16 and mostly too large for Adam's steps to change them. A step is
    about as large as the learning rate. Sharded weights have float32 copies (``search.shardings``), and so have those
    that are stepped on the host (``trainers.host_optimizer``)."""
    is_half = knobs.dtype == "bfloat16" and not knobs.use_peft and not knobs.is_sharded
    loses = knobs.is_adam and not (knobs.sums_up_rounding or knobs.optimizer_offload)
    return is_half and loses and (knobs.learning_rate or 1.0) * LOST_ABOVE < USUAL_WEIGHT


def can_scale(knobs: Knobs) -> bool:
    """Returns whether the gradient scaler of ``fp16`` accepts the trained weights: it rejects half-precision gradients
    (``torch/amp/grad_scaler.py: _unscale_grads_``). An adapter is float32."""
    return not knobs.fp16 or knobs.use_peft or knobs.dtype not in HALF
