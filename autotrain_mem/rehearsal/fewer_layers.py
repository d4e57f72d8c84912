"""A model with fewer layers than it has, for rehearsals that are expanded to its whole depth (``estimator/expansion``).

Only what its config says of its depth is changed, as it is read, wherever the trainer reads it: so a reference that is
the same checkpoint is shortened alike, and another model, such as a reward model of its own, keeps its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from autotrain_mem.spec import Job
from autotrain_mem.spec.model import LayerPattern

MOST_KINDS = 4
"""Layers whose kinds repeat after more than these are not worth it: two copies of few periods would be half a model."""

_Function = Callable[..., Any]


@contextmanager
def with_layers(model: str, layers: int | None) -> Iterator[None]:
    """Inside, the config of one model has so many layers, the first ones of its own; None: all of them.

    Args:
        model: The folder or hub id under which it is loaded.
    """
    if layers is None:
        yield
        return
    from transformers import AutoConfig, PreTrainedConfig

    with (
        patch.object(AutoConfig, "from_pretrained", _shortening(AutoConfig, model, layers)),
        patch.object(PreTrainedConfig, "from_pretrained", _shortening(PreTrainedConfig, model, layers)),
    ):
        yield


def _shortening(owner: Any, model: str, layers: int) -> Any:
    read: _Function = owner.__dict__["from_pretrained"].__func__

    def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        found = read(cls, path, *args, **kwargs)
        if str(path) == model:
            shorten(found[0] if isinstance(found, tuple) else found, layers)
        return found

    return classmethod(from_pretrained)


def shorten(config: Any, layers: int) -> None:
    """Leave the first ``layers`` layers of a language model, and of every list that tells something of each of them."""
    text = config.get_text_config(decoder=True)
    whole = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == whole and whole > layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = min(whole, layers)


def layer_pattern(job: Job, config: Any) -> LayerPattern | None:
    """How the layers of a job's model repeat; None where they do not, or where that cannot be seen.

    PPO's four models may differ in depth, and share names: they are rehearsed whole.

    It is seen in the model itself, built without weights in 0.03 s: two layers are alike when all their modules and
    parameters are, and every plain value among their attributes, but for the layer's own number.
    """
    if job.method == "ppo" or getattr(config, "auto_map", None):
        return None  # a model's own code is not run for this
    layers = _layers(config)
    tables = [_table(layer) for layer in layers]
    for period in range(1, min(MOST_KINDS, len(tables) // 2) + 1):
        if all(_are_alike(tables[i - period], i - period, tables[i], i) for i in range(period, len(tables))):
            return LayerPattern(layers=len(tables), period=period)
    return None


def _layers(config: Any) -> list[Any]:
    """The modules that are the model's layers; none where there is not one list of so many."""
    import torch
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    text = config.get_text_config(decoder=True)
    try:
        with torch.device("meta"), no_init_weights():
            model = AutoModel.from_config(text)
    except (ValueError, ImportError):  # no such model without its head: it is rehearsed whole
        return []
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    deep = [module for module in lists if len(module) == text.num_hidden_layers]
    return list(deep[0]) if len(deep) == 1 else []


_Table = dict[tuple[str, str], Any]

_PLAIN = (bool, int, float, str, tuple, list, type(None))


def _table(layer: Any) -> _Table:
    """All that tells one layer from another."""
    table: _Table = {}
    for name, module in layer.named_modules():
        table[name, ""] = type(module)
        table |= {(name, key): value for key, value in vars(module).items() if isinstance(value, _PLAIN)}
    return table | {(name, "shape"): (value.shape, value.dtype) for name, value in layer.state_dict().items()}


def _are_alike(one: _Table, its_number: int, other: _Table, others_number: int) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        value == other[key] or (value == its_number and other[key] == others_number) for key, value in one.items()
    )
