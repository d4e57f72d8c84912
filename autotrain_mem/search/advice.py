"""Lists a plan's questions (is more harm worth much more speed?), and advice on settings that only the user may change.

Proposals change the rows of a batch, their order or where they end, which a plan may not do by itself.
``--padding_free`` without packing is not proposed, since TRL then truncates no rows.
"""

import math
from collections.abc import Sequence

from autotrain_mem.methods.interface import method_of
from autotrain_mem.search.adapter import NEAR, SWEPT_ROWS, adapter_learning_rate
from autotrain_mem.search.levels import LEVELS, SHORTER_ROWS
from autotrain_mem.search.space import loses_updates
from autotrain_mem.settings.adapter_config import LORA, kind_of
from autotrain_mem.settings.levers import LADDER, LOST_ABOVE, ROUNDING, USUAL_WEIGHT, is_pulled
from autotrain_mem.settings.optimizer_verdicts import KEEPS_UPDATES
from autotrain_mem.types import METHODS, Candidate, DataProfile, Harm, Job, Knobs, ModelFacts, Proposal

MUCH_FASTER = 1.25
"""The speedup from which a more harmful level is offered: predicted speeds are off by up to 15 % either way."""


def questions(level: str, knobs: Knobs, alternatives: Sequence[Candidate]) -> tuple[Proposal, ...]:
    """Returns the flags for each level that does more harm than the plan's and is much faster, and how much faster.

    Example: ``--max_slowdown 1.2 --fit rounding``, with the reason "rounding (...) would be 1.3 x as fast".
    """
    proposals = []
    for each in alternatives:
        if not each.fits or (each.ratio or 0.0) < MUCH_FASTER or each.level in (level, SHORTER_ROWS):
            continue
        # With these flags the search passes over its choice and stops at this level.
        below = max(1.0, math.floor(10 * (each.ratio or 1.0) * 0.95) / 10)
        rounds = any(step.name == each.level and step.own == ROUNDING for step in LEVELS)
        harmful = [row for row in LADDER if row.harm >= Harm.ROUNDING]
        moved = [row.knobs[0] for row in harmful if is_pulled(row, each.knobs) and not is_pulled(row, knobs)]
        values = [(name, getattr(each.knobs, name)) for name in moved]
        differences = ", ".join(name if value is True else f"{name} {value}" for name, value in values)
        flags = f"--max_slowdown {below:g}{' --fit rounding' if rounds else ''}"
        why = f"{each.level} ({differences}) would be {each.ratio:.1f} x as fast"
        proposals.append(Proposal(flags=flags, why=why))
    return tuple(proposals)


def advice(job: Job, knobs: Knobs, facts: ModelFacts, profile: DataProfile | None) -> tuple[Proposal, ...]:
    """Lists better values of settings that only the user may change. ``profile`` is None if the data were not read."""
    offers, rate = [], knobs.learning_rate
    is_lora = knobs.use_peft and kind_of(knobs.peft_config) in ("", LORA)
    wanted, source = adapter_learning_rate(knobs, job, facts, profile)
    if is_lora and knobs.is_adam and rate is not None and not wanted / NEAR < rate < wanted * NEAR:
        is_given = "learning_rate" in job.arguments
        whose = f"the given {rate:g}" if is_given else f"TRL's {rate:g} is meant for full fine-tuning, and"
        why = f"{whose} is {'low' if rate < wanted else 'high'} for an adapter: {source}"
        offers.append(Proposal(flags=f"--learning_rate {wanted:g}", why=why))
    rows, share = knobs.effective_batch_size, knobs.data_parallel_size
    fewer = max(SWEPT_ROWS // share, 1) * share
    if is_lora and method_of(job.method).learns_tokens and fewer < rows:
        why = (
            f"with {rows:,} rows a step an adapter learns less than full fine-tuning does, at any rank (LoRA Without "
            f"Regret; TRL advises fewer than 32), and its best learning rate was measured with {SWEPT_ROWS}"
        )
        offers.append(Proposal(flags=f"--effective_batch_size {fewer}", why=why))
    names_targets = knobs.lora_target_modules is not None or knobs.peft_config is not None
    if is_lora and not names_targets and facts.adapted is not None and isinstance(facts.lora_targets, tuple):
        # PEFT's own list is often two layers of seven.
        adapted = facts.adapted if facts.adapted.replace("-", "").isalnum() else f"'{facts.adapted}'"
        why = (
            f"PEFT adapts {' and '.join(facts.lora_targets)} of this architecture if no targets are named, and that "
            "learns less at any rank"
        )
        offers.append(Proposal(flags=f"--lora_target_modules {adapted}", why=why))
    if loses_updates(knobs):
        step = rate or 0.0
        why = (
            f"weights in bfloat16 lose small updates: a step of Adam is about {step:g}, which leaves weights above "
            f"{step * LOST_ABOVE:.2g} unchanged, and most are about {USUAL_WEIGHT:g}; float32 weights keep updates, "
            f"as does --optim {KEEPS_UPDATES}, which adds up what is lost (Kahan summation)"
        )
        offers.append(Proposal(flags=f"--optim {KEEPS_UPDATES}", why=why))
    return tuple(offers)


PADDING_PAYS = 0.1
"""The least share of a step's computation that is worth saving; less is within the error of a predicted step time."""
WORST_BATCH_PAYS = 0.2
"""The least share by which the worst batch has to shrink: with 4 rows or more, that is room for another row."""
SHARES = (0.999, 0.99)
"""The percentiles of row length that can be proposed as ``max_length``, as shares; the gentlest first."""

FLASH_ATTENTION = (
    *("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2", "kernels-community/flash-attn3"),
    "kernels-community/vllm-flash-attn3",
)
"""Attention that keeps packed rows apart: with any other, TRL warns (sft_trainer.py: FLASH_ATTENTION_VARIANTS)."""

MEGA_BATCHES = 50
"""Optimizer steps whose rows are sorted together (transformers/trainer_pt_utils.py: get_length_grouped_indices)."""


def proposals(profile: DataProfile, knobs: Knobs, job: Job, *, flash_attention: str | None) -> tuple[Proposal, ...]:
    """Lists the proposals that the data suggest, unless the user has decided on them. ``flash_attention`` is the
    command that installs it, empty if it is installed, or None if the card, dtype or model does not support it."""
    if job.is_online or not knobs.pads_rows:
        return ()
    offers, limit, given = [], job.row_limit(knobs), job.arguments
    padding = profile.padding_fraction(knobs.per_device_train_batch_size, limit)
    is_padded = job.method_facts.is_packable and padding >= PADDING_PAYS
    is_open = flash_attention is not None and given.keys().isdisjoint(("packing", "padding_free"))
    if is_padded and is_open and limit is not None:
        in_use = given.get("attn_implementation") in FLASH_ATTENTION
        flags = "--packing" if in_use else f"--packing --attn_implementation {FLASH_ATTENTION[0]}"
        rows, step = limit / (profile.kept_tokens(limit) / profile.rows), knobs.effective_batch_size
        why = (
            f"{_percent(padding)} of what a step computes is padding, and packed blocks have none; a block of "
            f"{limit} tokens holds {rows:.1f} rows on average, so a step trains on about {rows * step:.0f} rows "
            f"in place of {step}{flash_attention and f'; first {flash_attention}'}"
        )
        offers.append(Proposal(flags=flags, why=why))
    left = _padding_of_groups(profile, knobs, limit or profile.longest) if is_padded else padding
    if padding - left >= PADDING_PAYS and "train_sampling_strategy" not in given:
        why = (
            f"{_percent(padding)} of what a step computes is padding; batches of rows of similar length leave about "
            f"{_percent(left)}, but change the order of rows"
        )
        offers.append(Proposal(flags="--train_sampling_strategy group_by_length", why=why))
    if job.method_facts.long_rows == "kept" or job.pins_length:
        return tuple(offers)
    # The gentlest percentile that pays.
    planned = min(limit or profile.longest, max(profile.longest, profile.longest_evaluated))
    percentiles = [(share, profile.percentile(share)) for share in SHARES]
    for share, length in [each for each in percentiles if each[1] <= (1 - WORST_BATCH_PAYS) * planned][:1]:
        rows, tokens = profile.truncated_rows(length), profile.truncated_tokens_fraction(length)
        verb, noun = "drops" if profile.drops else "cuts", job.method_facts.row_noun
        why = (
            f"the worst batch gets {_percent(1 - length / planned)} smaller, {length} tokens a row instead of "
            f"{planned}; that {verb} {rows:,} of {profile.rows:,} {noun}, {_percent(tokens)} of the tokens"
        )
        offers.append(Proposal(flags=f"--max_length p{100 * share:g}", why=why))
    return tuple(offers)


def _padding_of_groups(profile: DataProfile, knobs: Knobs, limit: int) -> float:
    """Estimates the padding in batches of similar lengths, each padded to the longest row of its sorted slice."""
    steps = min(MEGA_BATCHES, profile.rows // (knobs.effective_batch_size * 4)) or 1
    slices = min(MEGA_BATCHES, steps * knobs.gradient_accumulation_steps)
    ends = [min(limit, profile.percentile((index + 1) / slices)) for index in range(slices - 1)]
    ends.append(round(profile.expected_longest(steps * knobs.effective_batch_size, limit)))
    return max(0.0, 1 - profile.kept_tokens(limit) / profile.rows / (sum(ends) / len(ends)))


def context_cut(profile: DataProfile, context_length: int | None, method: str) -> str | None:
    """Describes the rows that the model's context cuts; None if there are none."""
    if not (rows := profile.truncated_rows(context_length)) or context_length is None:
        return None
    noun, lost = METHODS[method].row_noun, "drops them, with" if profile.drops else "cuts"
    tokens = profile.truncated_tokens_fraction(context_length)
    return (
        f"{rows:,} of {profile.rows:,} {noun} ({_percent(rows / profile.rows)}) are longer than the model's context of "
        f"{context_length:,} tokens (the longest has {profile.longest:,}): that {lost} {_percent(tokens)} of all tokens"
    )


def _percent(share: float) -> str:
    """Formats a share with two significant digits: ``38 %``, ``0.019 %``."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
