"""Reads the parts of a PEFT config (``adapter_config.json``) that a plan needs, without importing PEFT."""

import json
from collections.abc import Mapping
from typing import Any

from autotrain_mem.settings.words import CHECKPOINTING

PEFT_CONFIG = "peft_config"
"""The name of the flag, of the field of AutoFit, of the knob, and of the argument of TRL's trainers."""

LORA = "LORA"
_PREFIX = "PREFIX_TUNING"

_OF_SAVING = frozenset(
    {"inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "runtime_config"}
)
"""Keys that PEFT adds when it saves an adapter, and that are ignored here. With the saved ``inference_mode: true``
(``peft/peft_model.py: save_pretrained``) nothing would be trained."""

_FLAGS = {
    "lora_r": ("r", 8),
    "lora_alpha": ("lora_alpha", 8),
    "lora_dropout": ("lora_dropout", 0.0),
    "lora_target_modules": ("target_modules", None),
    "lora_target_parameters": ("target_parameters", None),
    "lora_modules_to_save": ("modules_to_save", None),
    "use_rslora": ("use_rslora", False),
    "use_dora": ("use_dora", False),
}
"""TRL's LoRA flag (``trl/trainer/utils.py: get_peft_config``) -> PEFT's key and its default
(``peft/tuners/lora/config.py: LoraConfig``)."""
SAID = ("use_peft", *_FLAGS, "lora_task_type")
"""TRL's arguments that a PEFT config replaces."""

_NAMES = {
    **{LORA: "LoRA", "ADALORA": "AdaLoRA", "VERA": "VeRA", "LOHA": "LoHa", "LOKR": "LoKr", "IA3": "(IA)3"},
    **{"P_TUNING": "P-tuning", "PROMPT_TUNING": "prompt tuning", _PREFIX: "prefix tuning"},
}
"""PEFT's name of a well-known kind of adapter -> its spelling in the paper."""

_PLAIN_WEIGHTS = {
    "LOHA": "the product of its matrices is added to the weight itself",
    "LOKR": "the product of its matrices is added to the weight itself",
    "BOFT": "how it rotates packed weights is not rehearsed yet",
    "HRA": "it reflects the weight itself",
    "OSF": "it decomposes the weight itself",
    "DELORA": "it takes the norm of the weight itself",
    "SHIRA": "it changes some of the weight's own elements",
}
"""Kinds of adapters that are planned only on a base in 16 or 32 bits, and why (``peft/tuners/KIND/layer.py: forward,
update_layer``). PEFT treats a bitsandbytes layer as a plain one, and for most kinds the first forward fails because it
multiplies packed bytes."""
_MADE_OF_WEIGHTS = ("pissa", "olora", "loftq", "corda", "mica")
"""Prefixes of ``init_lora_weights`` with which LoRA's first values are computed from an unquantized weight
(``peft/tuners/lora/layer.py: pissa_init, olora_init``)."""

UNREHEARSED = {
    "SHIRA": "how many of a weight's elements it trains depends on the values of a random mask",
    "ADAPTION_PROMPT": "its layers replace the attention layers, which TRL's own loss does not support",
    "MULTITASK_PROMPT_TUNING": "it needs a task_id in each row, which TRL's rows do not have",
    "CPT": "its loss needs labels with types, which TRL's rows do not have",
    "POLY": "it needs a task_id in each row, which TRL's rows do not have",
    "XLORA": "it mixes adapters that are trained already",
    "FROD": "which parts of a weight it rotates depends on the weight's own values",
    "UNILORA": "it counts how often each of its shared values is drawn, and that depends on random values",
    "CARTRIDGE": "it consists of the keys and values of a text, which the model's weights compute",
}
"""Kinds of adapters that are not rehearsed, and why."""
_PREPARED = {"eva": "initialize_lora_eva_weights", "corda": "preprocess_corda", "lora_ga": "preprocess_loraga"}
"""Value of ``init_lora_weights`` -> PEFT's function that must be called with data first (``peft/tuners/lora``)."""


def canonical(content: Mapping[str, Any]) -> str:
    """Returns a config as one line of JSON, without the keys that saving adds. Equal adapters give equal lines.

    >>> canonical({"peft_type": "IA3", "inference_mode": True, "target_modules": None})
    '{"peft_type": "IA3"}'
    """
    kept = {name: value for name, value in content.items() if value is not None and name not in _OF_SAVING}
    return json.dumps(kept, sort_keys=True, ensure_ascii=False)


def kind_of(text: str | None) -> str:
    """Returns the kind of adapter under PEFT's name, such as ``IA3``; empty if there is no config."""
    return "" if text is None else str(json.loads(text).get("peft_type", "")).upper()


def name_of(text: str | None) -> str:
    """Returns the name of the kind for users; it is LoRA if there is no config.

    >>> name_of('{"peft_type": "IA3"}'), name_of('{"peft_type": "LORA", "use_dora": true}'), name_of(None)
    ('(IA)3', 'DoRA', 'LoRA')
    """
    if text is None:
        return _NAMES[LORA]
    kind = kind_of(text)
    is_dora = kind == LORA and json.loads(text).get("use_dora")
    return "DoRA" if is_dora else _NAMES.get(kind, kind.replace("_", " "))


def arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments that a config sets: ``peft_config``, ``use_peft``, and for LoRA also TRL's LoRA flags.

    If the kind cannot adapt a quantized base, quantization is turned off. Prefix tuning turns gradient checkpointing
    off: a prefix consists of keys and values, and a checkpointed layer gets none
    (``transformers/modeling_layers.py: GradientCheckpointingLayer.__call__``).
    """
    content, kind = json.loads(text), kind_of(text)
    said: dict[str, Any] = {PEFT_CONFIG: text, "use_peft": True}
    if kind == LORA:
        for name, (key, default) in _FLAGS.items():
            if isinstance(value := content.get(key, default), str):
                value = [value]
            elif isinstance(value, list):
                # TRL reads a single name as a regular expression (trl/trainer/model_config.py: __post_init__).
                value = sorted(value) if len(value) != 1 else [rf".*\.{value[0]}"]
            if value is not None and value is not False:
                said[name] = value
    if why_not_quantized(text):
        said |= {"load_in_4bit": False, "load_in_8bit": False}
    if kind == _PREFIX:
        said |= {CHECKPOINTING: False}
    return said


def why_not_quantized(text: str) -> str:
    """Explains why the base of an adapter with this config cannot be quantized; empty if it can."""
    if starts_from_weights(text):
        return f"init_lora_weights {_start(text)} computes the adapter from weights, which must not be quantized"
    return _PLAIN_WEIGHTS.get(kind_of(text), "")


def starts_from_weights(text: str | None) -> bool:
    """Returns whether LoRA is initialized from the base's weights, one weight after another."""
    return text is not None and kind_of(text) == LORA and _start(text).startswith(_MADE_OF_WEIGHTS)


def _start(text: str) -> str:
    return made if isinstance(made := json.loads(text).get("init_lora_weights"), str) else ""


def needs_data_first(text: str) -> str:
    """Returns PEFT's function that must be called with data before the adapter is created; empty if there is none."""
    return _PREPARED.get(_start(text), "")


def says_more_than_flags(text: str) -> bool:
    """Returns whether TRL's LoRA flags cannot express all of a config. The config must not hold PEFT's defaults."""
    known = {key for key, _ in _FLAGS.values()} | {"peft_type", "task_type"}
    return kind_of(text) != LORA or not json.loads(text).keys() <= known


def without_said(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's arguments without those that their PEFT config replaces."""
    if PEFT_CONFIG not in arguments:
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name not in SAID}
