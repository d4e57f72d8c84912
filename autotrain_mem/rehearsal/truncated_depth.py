"""Shortens a model to few layers for a rehearsal; ``estimator.depth`` extrapolates to the whole model.

A config gets fewer layers when the trainer reads it; a model object loses its last layers. A reference model from the
same checkpoint is shortened too, as are all models of PPO; others, such as a separate reward model, keep their layers.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from autotrain_mem.methods.interface import method_of
from autotrain_mem.trainers.script_call import keyword_of, model_of
from autotrain_mem.types import Job, LayerPattern

MOST_KINDS = 4
"""The longest period of layer kinds worth shortening: two copies of a longer period can be half of the model."""


@contextmanager
def with_layers(models: Collection[str], layers: int | None) -> Iterator[None]:
    """Within the block, configs of models with these names have only the first ``layers`` layers; None keeps all."""
    if layers is None:
        yield
        return
    with (
        patch.object(AutoConfig, "from_pretrained", _shortening(AutoConfig, models, layers)),
        patch.object(PreTrainedConfig, "from_pretrained", _shortening(PreTrainedConfig, models, layers)),
    ):
        yield


def _shortening(owner: Any, models: Collection[str], layers: int) -> Any:
    read = owner.__dict__["from_pretrained"].__func__

    def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        found = read(cls, path, *args, **kwargs)
        if str(path) in models:
            shorten(found[0] if isinstance(found, tuple) else found, layers)
        return found

    return classmethod(from_pretrained)


def shorten(config: Any, layers: int) -> None:
    """Cuts a language model's config, and every list in it with an item per layer, to the first ``layers`` layers."""
    text = config.get_text_config(decoder=True)
    whole = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == whole and whole > layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = min(whole, layers)


def shorten_model(model: Any, layers: int) -> None:
    """Cuts a model object with a :func:`model_pattern` to its first ``layers`` layers."""
    deep = _layers_of(model)
    assert deep is not None
    whole = len(deep)
    del deep[layers:]
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and _depth(config) == whole:
            shorten(config, layers)


def pattern_of(job: Job, config: Any) -> LayerPattern | None:
    """Describes how the layers of a job's model repeat, including their adapter; None if they do not, or if unknown.

    The pattern comes from the model itself, built without weights in 0.03 s. This model has no adapter, so the result
    is None if the adapter may apply to only some layers. It is also None if PPO's policy and value model, whose layers
    share names, differ in depth or in how their layers repeat. ``config`` is the model's config.
    """
    adapter = keyword_of(job, "peft_config")
    # TRL turns a list of one name into a string (trl/trainer/model_config.py: __post_init__), a regular expression.
    names = ("target_modules", "target_parameters", "modules_to_save")
    asked = {name: job.arguments.get(f"lora_{name}") for name in names}
    asked = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in asked.items()}
    if _tells_layers_apart(asked if adapter is None else vars(adapter)):
        return None
    if (given := model_of(job)) is not None:
        return _recomputed(model_pattern(given), job)
    configs = [config]
    for path in method_of(job.method).models_in_step(job.model, job.arguments)[1:]:
        try:
            configs.append(AutoConfig.from_pretrained(path))
        except (OSError, ValueError):  # reported when the model is loaded
            return None
    first, *others = map(_pattern_of_config, configs)
    return _recomputed(first, job) if all(other == first for other in others) else None


def _recomputed(pattern: LayerPattern | None, job: Job) -> LayerPattern | None:
    """Extends the pattern's period to a multiple of n if only every n-th layer is recomputed
    (``transformers/modeling_utils.py: _set_gradient_checkpointing``, which counts from the first layer)."""
    given = (job.arguments.get(f"{name}_checkpointing_kwargs") or {} for name in ("gradient", "activation"))
    options = (json.loads(each) if isinstance(each, str) else each for each in given)  # a flag's is still a text
    every = max(int(each.get("every_n_layers", 1)) for each in options)
    return None if pattern is None else replace(pattern, period=math.lcm(pattern.period, every))


def _pattern_of_config(config: Any) -> LayerPattern | None:
    """Builds the model without head and weights, and returns its pattern; None if it cannot be built."""
    if config is None or getattr(config, "auto_map", None):
        return None  # a model's own code is not run here
    try:
        with torch.device("meta"), no_init_weights():
            model = AutoModel.from_config(config.get_text_config(decoder=True))
    except (ValueError, ImportError):  # such a model is rehearsed whole
        return None
    return _pattern(_layers_of(model), config)


_OF_LAYERS = ("layers_to_transform", "layer_replication", "rank_pattern", "alpha_pattern", "num_layers")
"""Fields of PEFT's configs that select layers by number or by a name pattern (``peft/tuners/lora/config.py:
LoraConfig``, ``peft/config.py: PromptLearningConfig``)."""
_NAMES = ("target_modules", "exclude_modules", "target_parameters", "modules_to_save", "feedforward_modules")
_NUMBERED = re.compile(r"(^|\.)\d+(\.|$)")
_PERHAPS_NUMBERED = re.compile(r"\d|\\d")
"""Matches a digit in a regular expression (a string, not a list): ``.*layers.[0-9].mlp.*`` selects the first ten."""


def _tells_layers_apart(adapter: Mapping[str, Any]) -> bool:
    """Returns whether an adapter's config may select only some layers, as ``["layers.7.mlp.up_proj"]`` does."""
    if any(adapter.get(name) for name in _OF_LAYERS) or adapter.get("layers_to_transform") == 0:
        return True
    for names in map(adapter.get, _NAMES):
        if isinstance(names, str):
            if _PERHAPS_NUMBERED.search(names):
                return True
        elif any(_NUMBERED.search(name) for name in names or ()):
            return True
    return False


def model_pattern(model: Any) -> LayerPattern | None:
    """Describes how the layers of a model object repeat, including adapters and frozen layers; None as in
    :func:`pattern_of`, or if a module around the layers has the user's own code, which might rely on all layers."""
    if (layers := _layers_of(model)) is None:
        return None
    path = next(name for name, module in model.named_modules() if module is layers).split(".")
    around = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
    # A trainer may have replaced the class's forward.
    homes = [type(module).__module__ for module in around] + [module.forward.__module__ for module in around]
    known = all(home.split(".")[0] in _LIBRARIES for home in homes)
    return _pattern(layers, model.config) if known else None


_LIBRARIES = frozenset({"torch", "transformers", "peft", "trl"})
"""Libraries whose models run their layers one by one, however many there are."""


def _layers_of(model: Any) -> Any:
    """Returns the ModuleList of the model's layers; None unless exactly one list has the config's depth."""
    depth = next((_depth(module.config) for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return deep[0] if len(deep := [module for module in lists if len(module) == depth]) == 1 else None


def _depth(config: Any) -> int | None:
    return getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)


def _pattern(layers: Any, config: Any) -> LayerPattern | None:
    """Finds the period of the layers. Two layers are equal if all their modules, tensors and plain attributes are."""
    if layers is None:
        return None
    own = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    if len(set().union(*own)) < sum(map(len, own)):
        return None  # layers share a parameter, so weights do not grow with the number of layers
    tables = [_table(layer) for layer in layers]
    for period in range(1, min(MOST_KINDS, len(tables) // 2) + 1):
        if all(_are_alike(tables[i - period], i - period, tables[i], i) for i in range(period, len(tables))):
            vision = getattr(config, "vision_config", None)
            tower = int(getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", None) or 0)
            # A mixture's router loss makes the first and last layer differ: its sums begin with the first, and are
            # kept for the backward pass from the last (``transformers/models/mixtral/modeling_mixtral.py:
            # load_balancing_loss_func``). TRL enables it by default (``trl/trainer/sft_trainer.py: aux_loss_enabled``).
            has_router_loss = getattr(config.get_text_config(decoder=True), "output_router_logits", None) is not None
            # Each of Qwen3-VL's first layers gets one feature tensor of the vision tower; later layers get none
            # (``models/qwen3_vl/modeling_qwen3_vl.py: Qwen3VLTextModel.forward, deepstack_visual_embeds``).
            least = (2 if has_router_loss else 1) + len(getattr(vision, "deepstack_visual_indexes", None) or ())
            return LayerPattern(layers=len(tables), period=period, least=least, tower=tower)
    return None


_Table = dict[tuple[str, str], Any]


def _table(layer: Any) -> _Table:
    """Returns everything that distinguishes one layer from another, except its number."""
    table: _Table = {}
    for name, module in layer.named_modules():
        table[name, ""] = type(module)
        table |= {(name, key): value for key, value in vars(module).items() if _is_plain(value)}
        table |= {(name, key): len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
    tensors = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    return table | {(name, "tensor"): (value.shape, value.dtype, value.requires_grad) for name, value in tensors}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (bool, int, float, str, type(None)))


def _are_alike(one: _Table, its_number: int, other: _Table, others_number: int) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        value == other[key] or (type(value) is int and value == its_number and other[key] == others_number)
        for key, value in one.items()
    )
