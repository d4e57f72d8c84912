"""Formats single facts as text, for all views and progress lines."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from autotrain_mem.search.space import given_knobs
from autotrain_mem.settings.adapter_config import LORA, PEFT_CONFIG, kind_of, name_of, without_said
from autotrain_mem.settings.knobs import NOT_TRLS, knob_names
from autotrain_mem.settings.levers import HARM_FIRST, is_pulled
from autotrain_mem.settings.own import flag_words
from autotrain_mem.settings.words import CHECKPOINTING, MAX_LENGTH, MAX_SLOWDOWN
from autotrain_mem.support.units import brief, counted, duration, format_bytes, millions, percent, rate
from autotrain_mem.types import Candidate, Estimate, Hardware, Harm, Job, Knobs, Owner, Phase, Plan, StepTime, Trained
from autotrain_mem.types.methods_table import METHODS

OWNERS = {owner: str(owner).replace("_", " ") for owner in Owner} | {Owner.KV_CACHE: "KV cache"}
PHASES = {phase: str(phase).replace("_", " ") for phase in Phase}

HARMS = {
    Harm.NONE: "costs nothing",
    Harm.TIME: "costs time only",
    Harm.ROUNDING: "rounds numbers more coarsely",
    Harm.WHAT_IS_TRAINED: "changes what is trained",
    Harm.DATA: "cuts the data",
}

LEVELS = {
    "as given": "one configuration, without a search",
    "lossless": "the training you asked for, unchanged",
    "lossless, precomputed reference": "the training you asked for, with the reference's scores computed first",
    "lossless, offloading": "the training you asked for, with some tensors in host memory",
    "rounding": "numbers are rounded more coarsely, but the same weights are trained",
    "rounding, offloading": "numbers are rounded more coarsely, and some tensors are in host memory",
    "LoRA": "an adapter is trained, not the whole model",
    "LoRA, offloading": "an adapter is trained, with activations in host memory",
    "LoRA on an 8-bit base": "a LoRA adapter is trained on a base quantized to 8 bits",
    "LoRA on an 8-bit base, offloading": "a LoRA adapter is trained on an 8-bit base, with activations in host memory",
    "QLoRA": "a LoRA adapter is trained on a base quantized to 4 bits",
    "QLoRA, offloading": "a LoRA adapter is trained on a 4-bit base, with activations in host memory",
    "shorter rows": "rows are truncated",
    "smaller images": "images are downscaled",
}
"""Name of a level of harm (``search.levels``) -> its meaning; least harm first."""

SHARINGS = {
    "ddp": "DDP",
    "fsdp2-no-reshard": "FSDP2, no reshard",
    "fsdp2": "FSDP2, full shard",
    "hsdp": "HSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}
"""Value of ``sharding`` -> its name for users."""

BATCHES = {
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("per_device_eval_batch_size", "local_rollout_forward_batch_size"),
}
"""Settings that divide rows into batches."""

FLAG_LINE_WIDTH = 74
"""The width of a line of flags: with indent and ``\\`` it fits 80 columns, so that it can be copied."""


def cards(card: Hardware) -> str:
    """Returns ``rtx4090``, ``4 x rtx4090`` for several cards, or ``2 x 8 x h100`` for two machines."""
    devices, nodes = card.topology.devices, card.topology.nodes
    counts = [str(count) for count in (nodes, devices) if nodes > 1 or count > 1]
    return " x ".join([*counts, card.name])


def has_speed(time: StepTime) -> bool:
    """Returns whether the step time was computed from the device's own rates."""
    return not time.assumed and time.step_seconds > 0


def speed(time: StepTime) -> str:
    """Returns ``1,240 tokens/s, 6.6 s a step``, or why the speed is not known."""
    if has_speed(time):
        return f"{rate(time.tokens_per_second)} tokens/s, {brief(time.step_seconds)} a step"
    ranked = f": rates of {time.assumed} stand in for this device's, to rank plans only" if time.assumed else ""
    return f"not known{ranked}"


def run_time(plan: Plan) -> str:
    """Returns ``about 1 h 43 min`` for the whole training, or ``at most`` if only the longest rows or completions are
    known; empty if steps or speed are unknown."""
    if not plan.run_seconds:
        return ""
    is_bound = plan.job.bounds_time(is_counted=plan.data is not None)
    return f"{'at most' if is_bound else 'about'} {duration(plan.run_seconds)}"


def needs(estimate: Estimate) -> str:
    """Returns ``needs 12.4 GiB of 11.2 GiB (fixed-size segments), 1.20 GiB too much``."""
    missing_bytes = estimate.required_bytes - estimate.budget_bytes
    too_much = f", {format_bytes(missing_bytes)} too much" if missing_bytes > 0 else ""
    sizes = f"{format_bytes(estimate.required_bytes)} of {format_bytes(estimate.budget_bytes)}"
    return f"needs {sizes}{estimate.segments}{too_much}"


def of_budget(size_bytes: int, budget_bytes: int | None) -> str:
    """Returns ``10.8 of 11.2 GiB``, or ``98.0 MiB`` without a budget."""
    size = format_bytes(size_bytes)
    if budget_bytes is None:
        return size
    budget, (number, unit) = format_bytes(budget_bytes), size.split()
    return f"{number if budget.endswith(f' {unit}') else size} of {budget}"


def value(setting: Any) -> str:
    """Writes a setting as TRL's command line reads it: ``true``, ``none``, ``1024``, ``q_proj v_proj``."""
    if isinstance(setting, tuple | list):  # a list if a plan's change was read from its file
        return " ".join(map(value, setting))
    return str(setting).lower() if isinstance(setting, bool) or setting is None else str(setting)


def settings(knobs: Knobs, names: Sequence[str] | None = None) -> str:
    """Writes the settings of these ``names``, or all: ``4 x 16 rows, max_length 1024, checkpointing on, ...``."""
    parts = {
        "per_device_train_batch_size": rows(knobs),
        "max_length": "rows not truncated" if knobs.max_length is None else f"max_length {knobs.max_length}",
        CHECKPOINTING: f"checkpointing {'on' if knobs.recomputes else 'off'}",
        "packing": "packing on" if knobs.packing else "",
        "sharding": sharing(knobs),
        "use_peft": name_of(knobs.peft_config) if knobs.use_peft else "full fine-tuning",
        "dtype": knobs.dtype,
        "fp16": "computed in float16" if knobs.fp16 else "",
        "optim": knobs.optim,
        "lora_r": f"rank {knobs.lora_r}" if names is not None and knobs.use_peft else "",
        **{row.knobs[0]: row.words if is_pulled(row, knobs) else "" for row in HARM_FIRST if row.words},
        "num_generations": f"groups of {knobs.num_generations}" if knobs.num_generations else "",
    }
    if knobs.local_rollout_forward_batch_size is not None:
        parts["local_rollout_forward_batch_size"] = f"generated {knobs.local_rollout_forward_batch_size} at a time"
    if knobs.per_device_eval_batch_size is not None:
        parts["per_device_eval_batch_size"] = f"evaluated {knobs.per_device_eval_batch_size} at a time"
    if knobs.completion_length:
        parts["max_length"] = f"{knobs.completion_knob} {knobs.completion_length}"
    return ", ".join(text for name, text in parts.items() if text and (names is None or name in names))


def trains(knobs: Knobs, trained: Trained | None) -> str:
    """Returns ``LoRA of rank 16, alpha 32, on all linear layers: 8.80 M of 503 M parameters (1.7 %), in float32``."""
    name = name_of(knobs.peft_config)
    if not knobs.use_peft:
        what = "the whole model"
    elif kind_of(knobs.peft_config) not in ("", LORA):
        what = f"{name}, defined by --{PEFT_CONFIG}"
    else:
        targets = knobs.lora_target_modules
        named = () if targets is None else ("all linear layers" if targets == ("all-linear",) else value(targets),)
        where = " ".join((*named, *(knobs.lora_target_parameters or ()))) or "PEFT's default layers"
        what = f"{name} of rank {knobs.lora_r}, alpha {knobs.lora_alpha}, on {where}"
    if trained is None:
        return what
    count = f"{millions(trained.parameters)} of {millions(trained.of_parameters)}"
    return f"{what}: {count} parameters ({percent(trained.share)}), in {trained.dtype}"


def schedule(knobs: Knobs, name: str = "", *, steps: int | None = None, step_rows: str = "", step_tokens: float) -> str:
    """Returns ``learning rate 0.0002, linear; 1,403 steps of 8 rows, about 2,100 tokens each``.

    Args:
        name: The schedule's name; empty if unknown.
        steps: Optimizer steps; None if unknown.
        step_rows: The rows of a step in words; by default its micro-batches, as in :func:`rows`.
    """
    rate = "TRL's learning rate" if knobs.learning_rate is None else f"learning rate {knobs.learning_rate:g}"
    rate += f", {name}" if name else ""
    count = "steps" if steps is None else counted(steps, "step")
    return f"{rate}; {count} of {step_rows or rows(knobs)}, about {step_tokens:,.0f} tokens each"


def sharing(knobs: Knobs) -> str:
    """Returns ``FSDP2, full shard``; empty for a single process."""
    tokens = f", {knobs.token_shards} GPUs share each row" if knobs.token_shards > 1 else ""
    return SHARINGS[knobs.sharding] + tokens if knobs.sharding is not None else ""


def asked_for(job: Job, defaults: Knobs, attempts: Sequence[Candidate]) -> Knobs:
    """Returns TRL's ``defaults`` with the user's arguments; if no length is among them, with the first attempt's."""
    length = {MAX_LENGTH: attempts[0].knobs.max_length} if attempts else {}
    return replace(defaults, **length | given_knobs(job))


def attempt(tried: Candidate, asked: Knobs, *, has_copies: bool) -> str:
    """Describes how an attempt differs from ``asked``, apart from its batch: ``checkpointing off, LoRA, whole model``.
    ``has_copies``: whether other attempts were rehearsed on copies of few layers."""
    return difference(tried.knobs, asked) + (", whole model" if has_copies and tried.rehearsed_layers is None else "")


def difference(knobs: Knobs, asked: Knobs) -> str:
    """Names what differs from the settings in ``asked``: ``LoRA, bfloat16, 4-bit base, activations offloaded``.

    Batches are left out: they have a column of their own. Sharding is always named, since users do not ask for it.
    """
    changed = {*differing([knobs, asked])} - BATCHES
    rows_at_once = knobs.local_rollout_forward_batch_size or 0
    if rows_at_once > knobs.per_device_train_batch_size:
        changed.add("local_rollout_forward_batch_size")
    if knobs.completion_length != asked.completion_length:
        changed.add("max_length")
    words = settings(knobs, ["sharding", *changed])
    if asked.expandable_segments and not knobs.expandable_segments:
        words = ", ".join(filter(None, [words, knobs.segments]))
    return words or "as asked for"


def batch(knobs: Knobs) -> str:
    """Returns ``4 x 16`` (micro-batch x gradient accumulation), or ``4 x 2 x 8`` (also x data-parallel size)."""
    of_one = f"{knobs.per_device_train_batch_size} x {knobs.gradient_accumulation_steps}"
    return of_one if knobs.processes == 1 else f"{of_one} x {knobs.data_parallel_size}"


def rows(knobs: Knobs) -> str:
    """Returns ``4 x 16 rows`` or ``1 x 1 row``; for methods that sample, completions or prompts."""
    noun = "row" if not knobs.completion_length else "prompt" if knobs.max_new_tokens else "completion"
    return f"{batch(knobs)} {noun}{'s' if knobs.effective_batch_size > 1 else ''}"


def differing(knobs: Sequence[Knobs]) -> list[str]:
    """Returns the names of the settings in which these knobs differ, in the order of Knobs."""
    return [field.name for field in fields(Knobs) if len({getattr(each, field.name) for each in knobs}) > 1]


def flag_lines(method: str, knobs: Knobs) -> list[str]:
    """Writes the settings as flags of TRL's own command, in lines that end in a backslash."""
    lines = [""]
    for name in knob_names(METHODS[method].knobs, knobs):
        is_peft = name == "lora_target_modules" and knobs.lora_target_modules is None  # PEFT's default has no flag
        if is_peft or name in NOT_TRLS:
            continue
        flag = f"--{name} {value(getattr(knobs, name))}"
        if lines[-1] and len(lines[-1]) + 1 + len(flag) > FLAG_LINE_WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {flag}".strip()
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def command_line(words: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Writes a command with its flags, quoted for a shell.

    >>> command_line(["plan", "sft"], {"model": "my model", "optimizer_offload": True, "report_to": ["none"]})
    "autofit plan sft --model 'my model' --optimizer_offload --report_to none"
    """
    return shlex.join(["autofit", *words, *flag_words(settings)])


def command_of(plan: Plan, *, trains: bool) -> str:
    """Writes the command that makes a plan again, or, if ``trains``, the one that trains its job."""
    hardware, topology = plan.estimate.hardware, plan.estimate.hardware.topology
    device = {
        "gpu": hardware.name if hardware.origin in ("named", "imagined") else None,
        "gpus": topology.devices if topology.devices > 1 else None,
        "nodes": topology.nodes if topology.nodes > 1 else None,
    }
    return job_command(plan.job, device, trains=trains)


def job_command(job: Job, ours: Mapping[str, Any], unsaid: Sequence[str] = (), *, trains: bool = False) -> str:
    """Writes the command for a job. ``ours``: more of our flags, such as the device; flags whose value is None are left
    out. ``unsaid``: arguments of the job to leave out."""
    flags = {
        "model": job.model,
        "dataset": job.dataset,
        "effective_batch_size": job.effective_batch_size,
        "prompt_length": job.prompt_length,
        "image_sizes": ",".join(job.images) or None,
        "fit": None if job.fit == "all" else job.fit,
        "forbid": ",".join(sorted(job.forbid)) or None,
        "max_slowdown": None if job.max_slowdown == MAX_SLOWDOWN else job.max_slowdown,
        **ours,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    left_out = ("model_name_or_path", *unsaid)
    trls = {name: value for name, value in without_said(job.arguments).items() if name not in left_out}
    return command_line([job.method] if trains else ["plan", job.method], given | trls)
