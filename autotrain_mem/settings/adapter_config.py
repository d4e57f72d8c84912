"""Reads a PEFT config, as ``adapter_config.json`` holds it, without importing PEFT; only what a plan needs."""

import json
from collections.abc import Mapping
from typing import Any

from autotrain_mem.settings.words import CHECKPOINTING

PEFT_CONFIG = "peft_config"
"""Name of the flag, the field of AutoFit, the knob, and the argument of TRL's constructors."""

LORA = "LORA"
_PREFIX = "PREFIX_TUNING"

_OF_SAVING = frozenset(
    {"inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "runtime_config"}
)
"""Keys that saving adds, and that do not change the adapter: ``peft/peft_model.py: save_pretrained`` writes
``inference_mode: true``, with which nothing would be trained."""

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
"""TRL's arguments that such a config replaces."""

_NAMES = {
    **{LORA: "LoRA", "ADALORA": "AdaLoRA", "VERA": "VeRA", "LOHA": "LoHa", "LOKR": "LoKr", "IA3": "(IA)3"},
    **{"P_TUNING": "P-tuning", "PROMPT_TUNING": "prompt tuning", _PREFIX: "prefix tuning"},
}
"""PEFT's name of a well-known kind -> its spelling in the paper."""

_PLAIN_WEIGHTS = {
    "LOHA": "its product is added to the weight itself",
    "LOKR": "its product is added to the weight itself",
    "BOFT": "how it rotates packed weights is not rehearsed yet",
    "HRA": "it reflects the weight itself",
    "OSF": "it decomposes the weight itself",
    "DELORA": "it takes the norm of the weight itself",
    "SHIRA": "it changes some of the weight's own elements",
}
"""Kinds that are planned only on weights in 16 or 32 bits, and why (``peft/tuners/KIND/layer.py: forward,
update_layer``): PEFT takes a bitsandbytes layer for a plain one, and for most kinds the first forward fails on a
product of packed bytes."""
_MADE_OF_WEIGHTS = ("pissa", "olora", "loftq", "corda", "mica")
"""Prefixes of ``init_lora_weights`` with which LoRA's first values are computed from a plain weight
(``peft/tuners/lora/layer.py: pissa_init, olora_init``)."""

UNREHEARSED = {
    "SHIRA": "how many of a weight's elements it trains is drawn by their values",
    "ADAPTION_PROMPT": "its layers replace attention's, and TRL's own loss does not know them",
    "MULTITASK_PROMPT_TUNING": "it needs a task_id in each row, which TRL's rows do not have",
    "CPT": "its loss needs labels with types, which TRL's rows do not have",
    "POLY": "it needs a task_id in each row, which TRL's rows do not have",
    "XLORA": "it mixes adapters that are trained already",
    "FROD": "which parts of a weight it turns is found out by the weight's own values",
    "UNILORA": "it counts how often each of its shared values is used, by drawing them",
    "CARTRIDGE": "it is made of a text's keys and values, which are computed by the weights",
}
"""Kinds of adapters that are not rehearsed, and why."""
_PREPARED = {
    "eva": "initialize_lora_eva_weights",
    "corda": "preprocess_corda",
    "lora_ga": "preprocess_loraga",
}
"""``init_lora_weights`` -> PEFT's function that must see data first (``peft/tuners/lora``)."""


def canonical(content: Mapping[str, Any]) -> str:
    """Returns a config as one line, the same for equal adapters, without the keys that saving adds.

    >>> canonical({"peft_type": "IA3", "inference_mode": True, "target_modules": None})
    '{"peft_type": "IA3"}'
    """
    kept = {name: value for name, value in content.items() if value is not None and name not in _OF_SAVING}
    return json.dumps(kept, sort_keys=True, ensure_ascii=False)


def kind_of(text: str | None) -> str:
    """Returns PEFT's name of a config's kind of adapter: ``IA3``; empty for None."""
    return "" if text is None else str(json.loads(text).get("peft_type", "")).upper()


def name_of(text: str | None) -> str:
    """Returns the name of the kind for users: LoRA without a config; variants of LoRA have their own names.

    >>> name_of('{"peft_type": "IA3"}'), name_of('{"peft_type": "LORA", "use_dora": true}'), name_of(None)
    ('(IA)3', 'DoRA', 'LoRA')
    """
    if text is None:
        return _NAMES[LORA]
    kind = kind_of(text)
    if kind == LORA and json.loads(text).get("use_dora"):
        return "DoRA"
    return _NAMES.get(kind, kind.replace("_", " "))


def arguments_of(text: str) -> dict[str, Any]:
    """Returns TRL's arguments that correspond to a config, and the config itself; for LoRA they are its flags.

    A base that the kind cannot adapt is not quantized. Prefix tuning has no gradient checkpointing: a checkpointed
    layer gets no keys and values (``transformers/modeling_layers.py: GradientCheckpointingLayer.__call__``), of which a
    prefix consists.
    """
    content, kind = json.loads(text), kind_of(text)
    said: dict[str, Any] = {PEFT_CONFIG: text, "use_peft": True}
    if kind == LORA:
        for name, (key, default) in _FLAGS.items():
            value = content.get(key, default)
            if isinstance(value, str):
                value = [value]
            elif isinstance(value, list):
                # TRL takes a single name for a regular expression (trl/trainer/model_config.py: __post_init__).
                value = sorted(value) if len(value) != 1 else [rf".*\.{value[0]}"]
            if value is not None and value is not False:
                said[name] = value
    if why_not_quantized(text):
        said |= {"load_in_4bit": False, "load_in_8bit": False}
    if kind == _PREFIX:
        said |= {CHECKPOINTING: False}
    return said


def why_not_quantized(text: str) -> str:
    """Explains why the base of such an adapter cannot be quantized; empty if it can."""
    if starts_from_weights(text):
        return f"init_lora_weights {_start(text)} makes the adapter of weights: of quantized ones that is not rehearsed"
    return _PLAIN_WEIGHTS.get(kind_of(text), "")


def starts_from_weights(text: str | None) -> bool:
    """Returns whether LoRA is initialized from the base's weights, one weight after another."""
    return text is not None and kind_of(text) == LORA and _start(text).startswith(_MADE_OF_WEIGHTS)


def _start(text: str) -> str:
    made = json.loads(text).get("init_lora_weights")
    return made if isinstance(made, str) else ""


def why_unrehearsed(text: str) -> str:
    """Explains why such an adapter is not rehearsed; empty if it is."""
    return UNREHEARSED.get(kind_of(text), "")


def needs_data_first(text: str) -> str:
    """Returns PEFT's function that must see data before such an adapter is made; empty if there is none."""
    return _PREPARED.get(_start(text), "")


def says_more_than_flags(text: str) -> bool:
    """Returns whether TRL's LoRA flags lose part of a config, which holds no defaults of PEFT."""
    known = {key for key, _ in _FLAGS.values()} | {"peft_type", "task_type"}
    return kind_of(text) != LORA or not json.loads(text).keys() <= known


def without_said(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's arguments without those that their PEFT config replaces."""
    if PEFT_CONFIG not in arguments:
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name not in SAID}
