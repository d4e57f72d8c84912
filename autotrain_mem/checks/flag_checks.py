"""Checks flags and keys against each other, without model, card and data.

``--fit`` never removes a setting: ``--fit lossless --use_peft`` trains an adapter. ``--forbid lora --use_peft`` fails.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotrain_mem.settings.adapter_config import PEFT_CONFIG, UNREHEARSED, kind_of, why_not_quantized
from autotrain_mem.settings.flag_verdicts import REFUSED, REFUSED_WHEN_OFF, Verdict, group_of
from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.settings.levers import EXPANDABLE, LEVERS
from autotrain_mem.settings.optimizer_verdicts import OF_TORCH, is_projecting, package_of
from autotrain_mem.settings.optimizer_verdicts import REFUSED as REFUSED_OPTIMIZERS
from autotrain_mem.settings.words import AUTO, MAX_LENGTH, is_maximized
from autotrain_mem.types import METHODS, Finding, Problems

_EXCLUSIVE: tuple[tuple[str, str, str, str], ...] = (
    (
        *("use_cpu", "gpu"),
        "--use_cpu and --gpu exclude each other.",
        "To try a card on the CPU: --gpu NAME --simulate.",
    ),
    (
        *("simulate", "plan_only"),
        "--simulate trains with a simulated card, and --plan_only stops before training.",
        "Remove one of them: a plan for --gpu NAME needs no --simulate.",
    ),
    (
        *("use_cpu", "tf32"),
        "--tf32 does not work with --use_cpu: transformers refuses it, since only GPUs have TF32.",
        "Remove --tf32.",
    ),
    (
        *("use_cpu", "activation_offloading"),
        "--activation_offloading does not work with --use_cpu: activations are on the host already.",
        "Remove --activation_offloading.",
    ),
    (
        *("use_cpu", "fp16"),
        "--fp16 does not work with --use_cpu: mixed precision on a CPU is in bfloat16.",
        "Give --bf16 true, or remove --fp16.",
    ),
    (
        *("fp16", "bf16"),
        "--fp16 and --bf16 exclude each other.",
        "Give --bf16 true for cards of compute capability 8.0 and newer, --fp16 for older ones; or neither.",
    ),
    (
        *("load_in_4bit", "load_in_8bit"),
        "--load_in_4bit and --load_in_8bit exclude each other.",
        "Give one of them: 4 bits need less memory.",
    ),
    (
        *("generation_batch_size", "steps_per_generation"),
        "--generation_batch_size and --steps_per_generation exclude each other: one follows from the other.",
        "Remove --steps_per_generation.",
    ),
    (
        *("use_vllm", EXPANDABLE),
        "--expandable_segments does not work together with vLLM on the same card: vLLM refuses it.",
        "Remove --expandable_segments.",
    ),
)
"""Two settings that exclude each other, the problem, and its cure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    method: str
    given: Mapping[str, Any]
    """The TRL arguments that the user gave."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Our own flags that the user gave, by name."""


def exclusive(flags: Flags) -> Problems:
    """Refuses two settings that exclude each other."""
    given = {**flags.given, **flags.own}
    yield from ((problem, cure) for one, other, problem, cure in _EXCLUSIVE if given.get(one) and given.get(other))


def device(flags: Flags) -> Problems:
    """Refuses several processes on the CPU, and a simulated card without a name."""
    given, own = flags.given, flags.own
    counts = own.get("gpus")
    several = isinstance(counts, (list, tuple)) or (counts or 1) > 1
    if given.get("use_cpu") and (several or (own.get("nodes") or 1) > 1):
        yield (
            "--use_cpu trains in one process, and --gpus or --nodes ask for several.",
            "Remove one of them. To try several GPUs on the CPU: --gpu NAME --gpus N --simulate.",
        )
    if own.get("simulate") and own.get("gpu") is None:
        yield "--simulate needs --gpu.", "Give --gpu NAME (autofit gpus lists them), or a size such as --gpu 6GiB."


def levers_of_a_gpu(flags: Flags) -> Problems:
    """Refuses levers that need a GPU to train on; a simulated card is enough only for flash-attention."""
    given, own = flags.given, flags.own
    if given.get("use_cpu") or own.get("simulate"):
        for name in filter(given.get, ("use_liger_kernel", "use_vllm")):
            yield f"--{name} needs a GPU to train on.", f"Remove --{name}, or plan for a card with --plan_only."
    if given.get("use_cpu") and "flash" in str(given.get("attn_implementation")):
        message = f"--attn_implementation {given['attn_implementation']} does not work with --use_cpu."
        yield message, "Give --attn_implementation sdpa."


def precision(flags: Flags) -> Problems:
    """Refuses fp16 with half-precision weights: see ``torch/amp/grad_scaler.py: _unscale_grads_``."""
    given = flags.given
    if given.get("fp16") and given.get("dtype") in ("float16", "bfloat16") and not given.get("use_peft"):
        yield (
            f"--fp16 does not work with --dtype {given['dtype']}: the scaler refuses gradients of this dtype.",
            "Give --dtype float32 with --fp16 (mixed precision), --bf16 true with --dtype bfloat16, or --use_peft, "
            "whose base may be in half precision.",
        )


def quantization(flags: Flags) -> Problems:
    """Refuses quantized weights without an adapter, and adapters that are not rehearsed or need an unquantized base."""
    given, text = flags.given, flags.given.get(PEFT_CONFIG)
    if (quantized := [name for name in BASE_BITS if given.get(name)]) and not given.get("use_peft"):
        yield (
            f"--{quantized[0]} without LoRA would train nothing: quantized weights cannot be trained.",
            f"Add --use_peft to train an adapter on the quantized base, or remove --{quantized[0]}.",
        )
    if text is not None and (why := UNREHEARSED.get(kind_of(text))):
        message = f"--{PEFT_CONFIG} {kind_of(text)} is not supported yet: {why}."
        yield message, "LoRA, DoRA, VeRA, IA3 and OFT are rehearsed."
    if text is not None and quantized and (why := why_not_quantized(text)):
        message = f"--{quantized[0]} does not work with {kind_of(text)}: {why}."
        yield message, f"Remove --{quantized[0]}, or use plain LoRA."


def effective_batch(flags: Flags) -> Problems:
    """Refuses an effective batch that is not rows x steps x processes. The number of processes is still unknown if all
    GPUs of this machine are used; then rows x steps must divide the effective batch."""
    given, own = flags.given, flags.own
    is_one = own.get("gpu") is not None and own.get("gpus") in (None, 1) and own.get("nodes") in (None, 1)
    rows, steps = given.get("per_device_train_batch_size"), given.get("gradient_accumulation_steps")
    effective = own.get("effective_batch_size")
    if rows is None or steps is None or effective is None:
        return
    if (is_one or given.get("use_cpu") or effective % (rows * steps)) and rows * steps != effective:
        yield Finding(
            kind="error",
            error="BatchSplitError",
            message=f"--per_device_train_batch_size {rows} times --gradient_accumulation_steps {steps} is "
            f"{rows * steps}, not the effective batch size {effective}.",
            cure=f"Use --effective_batch_size {rows * steps} with both flags, or --effective_batch_size {effective} "
            "alone.",
        )


def prompt_length(flags: Flags) -> Problems:
    """Refuses a prompt length for a method whose data are not prompts."""
    method, own = flags.method, flags.own
    if (tokens := own.get("prompt_length")) is not None and not METHODS[method].is_online:
        online = [name for name, row in METHODS.items() if row.is_online]
        yield (
            f"--prompt_length is for {', '.join(online)}, whose data are prompts; {method} has none.",
            "Give --max_length, the largest length of a row.",
        )
    elif tokens is not None and tokens < 1:
        yield f"--prompt_length {tokens} is not a number of tokens.", "Give 1 or more."


def row_limit(flags: Flags) -> Problems:
    """Refuses to search for ``max_length`` if the trainer keeps longer rows, or samples completions."""
    wanted, facts = flags.given.get(MAX_LENGTH), METHODS[flags.method]
    limits_both = facts.is_online and MAX_LENGTH in facts.knobs
    if limits_both and MAX_LENGTH in flags.given and (wanted is None or is_maximized(wanted)):
        yield (
            f"--max_length {str(wanted).lower()} does not work here: TRL needs a number for prompt plus completion.",
            "Give a number: prompts are truncated on the left to make room for completions.",
        )
    if facts.long_rows == "kept" and is_maximized(wanted) and wanted != AUTO:
        yield (
            f"--max_length {wanted} would truncate rows, but TRL's {facts.trainer} truncates only answers.",
            "Give a number, or --max_length auto for the length of the longest row.",
        )


def forbidden_levers(flags: Flags) -> Problems:
    """Refuses a setting whose lever is forbidden."""
    given, own = flags.given, flags.own
    for lever in sorted(set(own.get("forbid", ())) & LEVERS.keys()):
        name, value = LEVERS[lever].knobs[0], LEVERS[lever].to
        if value is not None and given.get(name) == value:
            asked = f"--{name}" if value is True else f"--{name} {value}"
            yield (
                f"--forbid {lever} and {asked} contradict each other.",
                f"Remove {asked}, or remove {lever} from --forbid.",
            )


def offloaded_optimizer(flags: Flags) -> Problems:
    """Refuses optimizers and trainers that cannot keep the optimizer's state on the host."""
    method, given = METHODS[flags.method], flags.given
    if given.get("optimizer_offload") and method.builds_early:
        yield (
            f"--optimizer_offload does not work with {method.title}, whose trainer creates its optimizer too early.",
            "Remove it; --optim adamw_8bit needs a quarter of the memory for its state.",
        )
    elif given.get("optimizer_offload") and given.get("optim", "adamw_torch_fused") not in OF_TORCH:
        yield (
            f"--optimizer_offload does not support --optim {given['optim']}.",
            f"It supports --optim {', '.join(OF_TORCH)}.",
        )


def arguments(flags: Flags) -> Problems:
    """Refuses arguments that a rehearsal ignores or fails on."""
    given = flags.given
    refused = {name: f"--{name}" for name in REFUSED if given.get(name)}
    refused |= {name: f"--{name} false" for name in REFUSED_WHEN_OFF if given.get(name) is False}
    if refused:
        cures = {**REFUSED, **REFUSED_WHEN_OFF}
        yield (
            f"{', '.join(refused.values())} {'is' if len(refused) == 1 else 'are'} not supported yet.",
            "\n".join(f"{asked}  {cures[name]}" for name, asked in refused.items()),
        )


def padding_free(flags: Flags) -> Problems:
    """Refuses padding-free batches without packing: TRL does not limit the length of their sequence."""
    given = flags.given
    group = group_of(flags.method, "padding_free")
    is_refused = group is not None and group.verdict is Verdict.REFUSED  # the method's own check reports it
    if given.get("padding_free") and not given.get("packing") and not is_refused:
        yield (
            "--padding_free without --packing is not supported yet: `max_length` is not enforced then.",
            "Give --packing true, which is padding-free with its default strategy.",
        )


_GRAPHS = {"torch_compile_mode": ("reduce-overhead", "max-autotune"), "torch_compile_backend": ("cudagraphs",)}
"""Argument -> its values that record CUDA graphs (``torch/_inductor/__init__.py: list_mode_options``)."""


def compiled_graphs(flags: Flags) -> Problems:
    """Refuses CUDA graphs: they have their own memory pools, so they may need more than an uncompiled rehearsal."""
    for name, values in _GRAPHS.items():
        if (value := flags.given.get(name)) in values:
            yield (
                f"--{name} {value} is not supported yet: CUDA graphs keep a memory pool for each length of rows.",
                "Give --torch_compile_mode max-autotune-no-cudagraphs, or --torch_compile true alone.",
            )


def generation_cache(flags: Flags) -> Problems:
    """Refuses caches whose layers are offloaded to the host, or quantized by a package (``transformers/cache_utils.py:
    DynamicLayer.offload, QuantizedLayer``)."""
    name = str(flags.given.get("cache_implementation") or "")
    if ("offloaded" in name or name == "quantized") and not flags.given.get("use_vllm"):
        yield (
            f"--cache_implementation {name} is not supported yet: its memory on the card is unknown.",
            "Give --cache_implementation dynamic or static, or remove it.",
        )


def rows(flags: Flags) -> Problems:
    """Refuses options whose batches may be larger than the planned worst batch."""
    given = flags.given
    packing, eval_packing = bool(given.get("packing")), given.get("eval_packing")
    evaluates = str(given.get("eval_strategy", "no")) != "no"
    if evaluates and eval_packing is not None and bool(eval_packing) is not packing:
        yield (
            "--eval_packing must equal --packing: plans assume that evaluation rows are packed like training rows.",
            "Remove --eval_packing: it follows --packing.",
        )
    options = given.get("dataset_kwargs")
    if isinstance(options, Mapping) and options.get("skip_prepare_dataset"):
        yield (
            "--dataset_kwargs skip_prepare_dataset is not supported: TRL does not truncate unprepared rows.",
            "Remove it; tokenized rows (input_ids) are used as they are.",
        )
    if given.get("train_sampling_strategy") == "batch_rebalance":
        yield (
            "--train_sampling_strategy batch_rebalance makes micro-batches larger than a plan assumes.",
            "--train_sampling_strategy random or group_by_length keeps --per_device_train_batch_size rows.",
        )
    facts = METHODS[flags.method]
    if given.get("train_sampling_strategy") == "group_by_length" and not (facts.is_packable or facts.is_online):
        yield (  # transformers/trainer_pt_utils.py: LengthGroupedSampler
            "--train_sampling_strategy group_by_length would fail when training starts: it needs input_ids, which the "
            f"rows of {facts.title}'s trainer lack.",
            "Remove it.",
        )


def optimizer(flags: Flags) -> Problems:
    """Refuses optimizers that cannot be rehearsed, or whose arguments or package are missing."""
    given, name = flags.given, str(flags.given.get("optim") or "")
    if refused := REFUSED_OPTIMIZERS.get(name):
        why, cure = refused
        yield f"--optim {name} is not supported yet: {why}.", f"{cure}. Other choices: lion_8bit, rmsprop_bnb_8bit."
    elif (package := package_of(name)) and importlib.util.find_spec(package[0]) is None:
        yield Finding(
            kind="error",
            error="MissingExtraError",
            message=f"--optim {name} needs the package {package[0]}, which is not installed.",
            cure=f"pip install {package[1]}, or give another --optim.",
        )
    if is_projecting(name) and not refused and not given.get("optim_target_modules"):
        yield (
            f"--optim {name} needs --optim_target_modules: the layers whose gradients it projects.",
            "Give --optim_target_modules all-linear, or names such as attn mlp.",
        )
