"""Finds the settings of a trainer's config that count as given, and makes the config with a plan's settings.

**A value that differs from TRL's default is given, and a plan never changes it; a value that equals the default may
change.** ``max_length`` always counts as given. ``AutoFit(pin=...)`` keeps a default, ``AutoFit(tune=...)`` allows a
setting to change.
"""

import copy
import difflib
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from autotrain_mem.settings.adapter_config import PEFT_CONFIG, arguments_of, canonical, says_more_than_flags
from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.settings.words import AUTO, CHECKPOINTING, MAX_LENGTH
from autotrain_mem.support import codec
from autotrain_mem.support.errors import UsageError
from autotrain_mem.trainers.script_call import Keywords, is_adapted, loading, quantization_of
from autotrain_mem.types import AutoFit, Knobs
from autotrain_mem.types.python_names import as_json

STEPS_OF_GENERATION = "steps_per_generation"
_DERIVED = (STEPS_OF_GENERATION, "generation_batch_size")
"""Configs of GRPO and RLOO take one and derive the other (``trl/trainer/grpo_config.py: __post_init__``)."""

_FOLLOWING = (
    *("do_eval", "eval_steps", "greater_is_better", "metric_for_best_model", "torch_compile_backend", "torch_compile"),
    *("loss_type", "use_transformers_continuous_batching", "vllm_importance_sampling_clip_max"),
)
"""Settings that a config may derive from others. A setting comes before those that it is derived from
(``transformers/training_args.py: __post_init__``, ``trl/trainer/sft_config.py, grpo_config.py, rloo_config.py``)."""

_MIRRORED = {
    CHECKPOINTING: "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""transformers 5.23 keeps these settings under two names (``training_args.py: __post_init__``)."""

_PLACED = ("use_cpu", "bf16", "fp16")
"""The default config for comparison takes these from the script's config: some machines reject TRL's own values."""

_SKIPPED = frozenset(
    {"hub_token", "push_to_hub_token", "model_init_kwargs", "fsdp", "fsdp_config", "parallelism_config", "deepspeed"}
    | {*_MIRRORED.values()}
)
"""Secrets, and settings that are read elsewhere (``launched`` reads how the processes share the model)."""

_LOADING = {"dtype": "dtype", "attn_implementation": "attn_implementation"} | {
    "revision": "model_revision",
    "trust_remote_code": "trust_remote_code",
}
"""Keys of ``model_init_kwargs`` -> TRL's flags for them."""
_HARMLESS = frozenset(
    {"device_map", "use_cache", "low_cpu_mem_usage", "use_safetensors", "local_files_only", "cache_dir", "token"}
)
"""Keys of ``model_init_kwargs`` that do not affect training; the trainer places the model itself."""


def default_config(config_class: type, keywords: Keywords, name: str) -> Any:
    """Returns the config that TRL makes if none is given (``trl/trainer/sft_trainer.py: __init__``)."""
    model = keywords["model"]
    path = model if isinstance(model, str) else model.config._name_or_path
    return config_class(f"{path.split('/')[-1]}-{name}")


def given_arguments(keywords: Keywords, config_class: type, autofit: AutoFit) -> dict[str, Any]:
    """Returns the settings in a trainer's keywords that count as given: TRL's names of flags -> JSON values. Raises
    UsageError if ``pin`` or ``tune`` names a setting that no plan decides.

    Example: ``SFTConfig("out", learning_rate=1e-4)`` gives ``{"output_dir": "out", "learning_rate": 1e-4, "max_length":
    1024}``. Raises UsageError if ``pin`` or ``tune`` names a setting that no plan decides."""
    config, of_model = keywords["args"], _of_model(keywords)
    given = {"output_dir": config.output_dir} | _differing(config, config_class)
    if hasattr(config, MAX_LENGTH) and (MAX_LENGTH in given or autofit.plan is None):
        given[MAX_LENGTH] = config.max_length
    given = given | _of_adapter(keywords) | of_model
    optimizer = (keywords.get("optimizers") or (None, None))[0]
    if optimizer is not None or keywords.get("optimizer_cls_and_kwargs") is not None:
        given |= {"optim": _plain(config.optim), "optimizer_offload": False}
    if optimizer is not None:  # a script's optimizer stays on its device and trains what it was made for
        given["use_peft"] = keywords.get(PEFT_CONFIG) is not None or is_adapted(keywords["model"])
    known = [field.name for field in fields(Knobs)]
    if unknown := sorted({*autofit.pin, *autofit.tune} - {*known}):
        near = [guess for name in unknown for guess in difflib.get_close_matches(name, known, n=1)]
        meant = f"Did you mean {', '.join(near)}?\n" if near else ""
        raise UsageError(f"No plan decides {', '.join(unknown)}.", hint=f"{meant}pin and tune take {', '.join(known)}.")
    for name in autofit.pin:
        default = "float32" if name == "dtype" else Knobs.__dataclass_fields__[name].default
        given[name] = _plain(getattr(config, name) if hasattr(config, name) else of_model.get(name, default))
    given |= autofit.pins
    for name in autofit.tune:
        given.pop(name, None)
    if MAX_LENGTH in autofit.tune:
        given[MAX_LENGTH] = AUTO
    return given


def _differing(config: Any, config_class: type) -> dict[str, Any]:
    placed = {name: getattr(config, name) for name in ("output_dir", *_PLACED)}
    default, skipped = _construct(config_class, placed), _SKIPPED | _derived(config)
    given = {
        name: getattr(config, name)
        for name in _names(config_class)
        if _plain(getattr(config, name)) != _plain(getattr(default, name)) and name not in skipped
    }
    if hasattr(config, STEPS_OF_GENERATION) and "generation_batch_size" not in skipped:
        given["generation_batch_size"] = config.generation_batch_size
    for name in filter(given.__contains__, _FOLLOWING):
        others = {other: value for other, value in given.items() if other != name}
        if getattr(_construct(config_class, others | placed), name) == given[name]:
            given = others
    # TRL's default is bf16, unless fp16 is asked for (``trl/trainer/base_config.py: __post_init__``).
    if config.fp16 or not config.bf16:
        given |= {"fp16": True} if config.fp16 else {"bf16": False}
    return {name: _plain(value) for name, value in given.items()}


def _derived(config: Any) -> frozenset[str]:
    """Returns the names of generation sizes that a plan may derive again: both if a generation serves one optimizer
    step; otherwise only ``steps_per_generation``, which follows from the script's ``generation_batch_size``."""
    if not hasattr(config, STEPS_OF_GENERATION):
        return frozenset()
    follows = config.steps_per_generation == config.gradient_accumulation_steps
    return frozenset(_DERIVED if follows else {STEPS_OF_GENERATION})


def _of_model(keywords: Keywords) -> dict[str, Any]:
    """Returns the settings with which the model is, or was, loaded."""
    if not isinstance(model := keywords["model"], str):
        adapted = {"use_peft": True} if is_adapted(model) else {}
        return {"dtype": main_dtype(model), **dict.fromkeys(BASE_BITS, False), **adapted}
    options = dict(getattr(keywords["args"], "model_init_kwargs", None) or {})
    if "torch_dtype" in options:
        raise UsageError(
            "model_init_kwargs: TRL reads dtype, and ignores torch_dtype.",
            hint=f'Write model_init_kwargs={{"dtype": "{_plain(options["torch_dtype"])}"}}.',
        )
    quantization = quantization_of(keywords)
    settings = quantization if isinstance(quantization, Mapping) else vars(quantization) if quantization else {}
    quantized = {name: True for name in BASE_BITS if settings.get(name) or settings.get(f"_{name}")}
    if "load_in_4bit" in quantized:  # the script's own quantization is loaded as it is
        quantized["use_bnb_nested_quant"] = bool(settings.get("bnb_4bit_use_double_quant"))
    options.pop("quantization_config", None)
    given = {flag: _plain(options.pop(name)) for name, flag in _LOADING.items() if name in options}
    rest = {name: _plain(value) for name, value in options.items() if name not in _HARMLESS}
    defaults = {"dtype": "float32", "model_revision": "main", "attn_implementation": None, "trust_remote_code": False}
    given = {name: value for name, value in given.items() if value is not None and value != defaults[name]}
    return given | quantized | ({"model_init_kwargs": rest} if rest else {})


def main_dtype(model: Any) -> str:
    """Returns the dtype of most of a model's weights: ``bfloat16``."""
    elements: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            elements[_plain(parameter.dtype)] = elements.get(_plain(parameter.dtype), 0) + parameter.numel()
    return max(elements, key=lambda name: elements[name], default="float32")


def _of_adapter(keywords: Keywords) -> dict[str, Any]:
    """Returns an adapter as TRL's flags, and also as PEFT's config if the flags cannot express it."""
    if (adapter := keywords.get(PEFT_CONFIG)) is None:
        return {}
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(adapter)
    }
    named = {name: _plain(value) for name, value in adapter.to_dict().items()}
    text = canonical({name: value for name, value in named.items() if value != _plain(defaults.get(name))})
    flags = arguments_of(text)
    return flags if says_more_than_flags(text) else {name: flags[name] for name in flags if name != PEFT_CONFIG}


def _names(config_class: type) -> list[str]:
    return [field.name for field in fields(config_class) if field.init]


def _plain(value: Any) -> Any:
    """Returns a value as JSON: a dataclass as its fields, any other object as its text."""

    def other(each: Any) -> Any:
        if is_dataclass(each) and not isinstance(each, type):
            return {field.name: _plain(getattr(each, field.name)) for field in fields(each)}
        return str(each)

    return as_json(value, other)


def planned_config(config: Any, knobs: Knobs, *, loads: bool) -> Any:
    """Returns a new config of the same class with a plan's knobs; the script's own config is unchanged. ``loads``:
    whether the trainer loads the model by its name."""
    planned = {name: value for name, value in codec.to_json(knobs).items() if hasattr(config, name)}
    changed = {name: value for name, value in planned.items() if _plain(getattr(config, name)) != value}
    if "fp16" in changed:
        changed["bf16"] = not knobs.fp16 and config.bf16
    twice = {_MIRRORED[name]: value for name, value in changed.items() if name in _MIRRORED}
    changed = changed | {name: value for name, value in twice.items() if hasattr(config, name)}
    if loads and hasattr(config, "model_init_kwargs"):
        changed["model_init_kwargs"] = loading(config.model_init_kwargs, knobs.dtype)
    skipped = _derived(config) - changed.keys()
    values = {name: getattr(config, name) for name in _names(type(config)) if name not in skipped}
    for name, value in values.items():
        if isinstance(value, dict | list) or (is_dataclass(value) and not isinstance(value, type)):
            values[name] = copy.deepcopy(value)  # TRL or a plan may write into it
    merged = _construct(type(config), {**values, **changed})
    for name, value in vars(config).items():
        if name not in vars(merged):
            setattr(merged, name, value)
    return merged


def _construct(config_class: type, values: Mapping[str, Any]) -> Any:
    """Makes a config, and undoes its reset of accelerate's state, which the script may use."""
    from accelerate.state import AcceleratorState, PartialState

    shared = [(state._shared_state, dict(state._shared_state)) for state in (AcceleratorState, PartialState)]
    try:
        with warnings.catch_warnings(action="ignore"):  # the script's own config has warned already
            return config_class(**values)
    finally:
        for state, before in shared:
            if before:
                state.clear()
                state.update(before)
