"""Reports the missing bytes and the nearest settings that fit, if nothing allowed fits."""

from dataclasses import replace

from autotrain_mem.search.explore import at, fits_at_once, longest_rows
from autotrain_mem.search.levels import checkpointing_choices, levels, strongest
from autotrain_mem.search.memo import Memo
from autotrain_mem.search.shardings import least_shared, shardings
from autotrain_mem.search.space import Space
from autotrain_mem.settings.knobs import EVALUATED_ROWS, ROWS, STEPS
from autotrain_mem.settings.levers import FREE, LADDER, LEVERS, SWITCHES, pulled
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import METHODS, Estimate, Harm, Knobs, Phase

_PHASES = {
    Phase.LOAD: "while loading",
    Phase.GENERATE: "while generating",
    Phase.SCORE: "while scoring",
    Phase.FORWARD: "in the forward pass",
    Phase.BACKWARD: "in the backward pass",
    Phase.OPTIMIZER_STEP: "in the optimizer step",
    Phase.EVALUATE: "in evaluation",
    Phase.SAVE: "while saving",
}

FOLLOWING = {EVALUATED_ROWS: "eval_batch", "local_rollout_forward_batch_size": "rollout_batch"}
"""Batches that follow the micro-batch -> their levers. A suggestion names them if the job pins them."""

LENGTH_TURNS = 3
"""The most lengths to guess for a suggestion, which need not be the longest."""


def does_not_fit(space: Space, memo: Memo) -> DoesNotFitError:
    """Returns the error for a search that found nothing; rehearses a few more points to find a way out."""
    # The search rehearses no level whose weights alone exceed the card, but one of these may need least.
    memo.ask([strongest([level for level in levels(space) if not level.lengths]).least])
    least = min(reversed(memo.estimates), key=lambda estimate: estimate.required_bytes)
    fitting = confirmed(space, memo)
    adapter = {4: "QLoRA", 8: "LoRA on an 8-bit base"}.get(least.knobs.base_bits or 0, "LoRA")
    kind = adapter if least.knobs.use_peft else "full fine-tuning"
    message = "\n".join(
        (
            f"{space.model} with {kind} does not fit {least.hardware.name}.",
            f"{needs_line(least)},",
            f"          at the least demanding settings allowed: {_settings(space, least.knobs)}",
            budget_line(least),
            *([f"  base    {least.unquantized}"] if least.unquantized else []),
        )
    )
    if fitting is None:
        hint = "no change that is allowed makes it fit here"
    else:
        size = f"({format_bytes(fitting.required_bytes)}){fitting.segments}"
        hint = f"nearest that fits: {suggestion(space, fitting.knobs)}  {size}"
    elsewhere = memo.predictor.would_fit(least, rehearsed=True)
    where = f"\nthese settings would fit {' or '.join(elsewhere)}" if elsewhere else ""
    return DoesNotFitError(message, hint=hint + where)


def confirmed(space: Space, memo: Memo) -> Estimate | None:
    """Returns the nearest settings that fit, rehearsed on the whole model."""
    asked: set[Knobs] = set()
    fitting = nearest(space, memo)
    while fitting is not None and fitting.knobs not in asked:
        asked.add(fitting.knobs)
        memo.ask([fitting.knobs], whole=True)
        fitting = nearest(space, memo)
    return fitting


def nearest(space: Space, memo: Memo) -> Estimate | None:
    """Finds the settings of least harm that fit if pins and limits are lifted, and lifts as few of these as possible.
    Each level is first tried with all of them lifted. None if no level fits."""
    # Limits on batches and checkpointing are lifted last, one by one; all others at once.
    loose = replace(space, fit="all")
    for row in LADDER:
        if row.name not in FREE:
            loose = _without(loose, row.name, row.knobs)
    steps = [loose]
    for name in FREE:
        steps.append(_without(steps[-1], name, LEVERS[name].knobs))
    for level in levels(steps[-1]):
        is_too_large = memo.predictor.exceeds(level.least) or memo.weights_exceed(level.least)
        if is_too_large or not (memo(level.least).fits or fits_at_once(level, memo)):
            continue
        if level.lengths:
            return longest_rows(level, memo, turns=LENGTH_TURNS)
        # The fewest of a level's levers that fit, then as many pins on batches and checkpointing as possible
        accumulates, at_each_step = memo(level.least).fits, [replace(level, space=step) for step in steps]
        floors = [each.least if accumulates else each.at_once for each in at_each_step]
        settings = (least_shared(steps[-1], each) for each in level.settings)
        setting = next(each for each in settings if memo(at(each, floors[-1])).fits)
        tried = (memo(at(setting, floor)) for floor in floors)
        return next(estimate for estimate in tried if estimate.fits)
    return None


def _without(space: Space, lever: str, knobs: tuple[str, ...]) -> Space:
    return replace(space, pinned=space.pinned.difference(knobs), forbid=space.forbid - {lever})


def suggestion(space: Space, knobs: Knobs) -> str:
    """Returns the flags that lead from the job to these knobs: ``--use_peft --dtype bfloat16 --max_length 512``. If
    the effective batch replaces a pinned micro-batch, the text ends in ``, without`` and the flags that pin it."""
    base = space.base
    batch, effective = "", f"--effective_batch_size {space.effective_batch_size}"
    if knobs.per_device_train_batch_size != base.per_device_train_batch_size:
        if "micro_batch" in space.forbid:
            batch = f"--{ROWS} {knobs.per_device_train_batch_size} --{STEPS} {knobs.gradient_accumulation_steps}"
        elif space.pinned & {ROWS, STEPS}:
            batch = effective
    flags = [batch] if batch else []
    moved = {name for name in FOLLOWING if getattr(knobs, name) != getattr(base, name)}
    kept = [name for name, lever in FOLLOWING.items() if name in space.pinned or lever in space.forbid]
    flags += [f"--{name} {getattr(knobs, name)}" for name in kept if name in moved]
    if knobs.recomputes not in checkpointing_choices(space):
        flags.append(f"--gradient_checkpointing {str(knobs.recomputes).lower()}")
    if knobs.sharding not in shardings(space):
        flags.append(f"--sharding {knobs.sharding}")
    flags += [f"--{name}" for name in SWITCHES if getattr(knobs, name) and not getattr(base, name)]
    flags += [
        f"--{name} {getattr(knobs, name)}"
        for name in ("dtype", "optim", "max_length")
        if getattr(knobs, name) != getattr(base, name)
    ]
    left_out = [f"--{name}" for name in (ROWS, STEPS) if name in space.pinned and batch == effective]
    return " ".join(flags) + (f", without {' and '.join(left_out)}" if left_out else "")


def needs_line(least: Estimate) -> str:
    """Returns the line that splits the required bytes: tensors at the peak, the cache, and bytes outside torch."""
    memory = least.memory
    parts = {owner.value.replace("_", " "): size for owner, size in memory.owners_at_peak.items()}
    parts |= {"cached": least.cached_bytes, "outside torch": least.hardware.non_torch_bytes}
    parts |= {"NCCL": least.communicators_bytes, "vLLM's share": least.vllm_share_bytes}
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return f"  needs   {format_bytes(least.required_bytes)}{least.segments} {_PHASES[memory.peak_phase]} ({listed})"


def _settings(space: Space, knobs: Knobs) -> str:
    noun = METHODS[space.method].noun(knobs.effective_batch_size)
    if knobs.completion_length:
        rows = f"{noun} of {knobs.completion_length} tokens"
    else:
        rows = f"{noun}, {'untruncated rows' if knobs.max_length is None else f'max_length {knobs.max_length}'}"
    settings = [
        f"{knobs.per_device_train_batch_size} x {knobs.gradient_accumulation_steps} {rows}",
        *([f"{knobs.processes} GPUs ({knobs.sharding})"] if knobs.processes > 1 else []),
        f"{'with' if knobs.recomputes else 'without'} gradient checkpointing",
        *(row.words for row in pulled(knobs) if row.words and row.harm <= Harm.TIME),
        *(knobs.dtype, knobs.optim),
    ]
    return ", ".join(settings)


def budget_line(least: Estimate) -> str:
    """Returns the line that splits the device's memory into the budget and what the run may not use."""
    hardware = least.hardware
    others = hardware.total_bytes - hardware.free_bytes
    parts = [f"{format_bytes(hardware.total_bytes)} total"]
    parts += [f"{format_bytes(others)} used by others"] if others else []
    parts += [f"{format_bytes(hardware.free_bytes - least.budget_bytes)} headroom"]
    missing = least.required_bytes - least.budget_bytes
    is_close = missing > 0 and format_bytes(least.required_bytes) == format_bytes(least.budget_bytes)
    short = f", {format_bytes(missing)} too little" if is_close else ""
    return f"  budget  {format_bytes(least.budget_bytes)} ({', '.join(parts)}){short}"
