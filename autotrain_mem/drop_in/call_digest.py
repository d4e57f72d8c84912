"""Identifies the objects of a script's call, so that its next run finds what was rehearsed and read before."""

import functools
import hashlib
import inspect
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from autotrain_mem.trainers.script_call import EVALUATED, Call, quantization_of

OUR_LIBRARIES = frozenset(
    {"autotrain_mem", "trl", "transformers", "peft", "bitsandbytes", "accelerate", "torch", "builtins"}
)
"""Libraries whose version identifies their code; nothing that depends on other code is kept."""

_OF_ROWS = ("train_dataset", EVALUATED, "processing_class", "formatting_func")
"""Keywords that decide which rows there are; a rehearsal gets only their lengths, by the job."""
_OF_RUN = frozenset(
    {"args", "callbacks", "compute_metrics", "reward_processing_classes", "preprocess_logits_for_metrics", *_OF_ROWS}
)
"""Keywords that affect a rehearsal only through the job's arguments."""


def digest_of(call: Call) -> str:
    """Returns a digest of a rehearsal's objects; empty if they include the user's code."""
    relevant = {name: value for name, value in call.keywords.items() if name not in _OF_RUN}
    rewards = relevant.get("reward_funcs")
    rewards = rewards if isinstance(rewards, list | tuple) else [rewards]
    # A rehearsal replaces reward functions by stand-ins, so only their number matters.
    relevant["reward_funcs"] = ["a function" if inspect.isroutine(each) else each for each in rewards]
    return _digest(relevant | {"quantization": quantization_of(call.keywords), "class": call.trainer})


def identity_of(call: Call) -> str:
    """Returns a digest of a rehearsal's objects, the rows and the tokenizer; empty if one of them is unknown: the
    user's code, or a stream."""
    digest = digest_of(call)
    return _digest({"digest": digest} | {name: call.keywords.get(name) for name in _OF_ROWS}) if digest else ""


def _digest(values: Mapping[str, Any]) -> str:
    text = _text_of(values)
    return "" if text is None else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text_of(value: Any) -> str | None:
    """Returns a text that identifies a value completely; None if that is impossible, as for the user's own classes.
    The values of a model's tensors do not count: no rehearsal has them."""
    import torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    if value is None or isinstance(value, str | int | float | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        # A closure may hold the user's objects.
        is_plain = _is_known(value) and not getattr(value, "__closure__", None)
        return f"{value.__module__}.{value.__qualname__}" if is_plain else None
    if isinstance(value, functools.partial):
        return _text_of(["partial", value.func, value.args, value.keywords])
    if isinstance(value, Mapping):
        return _text_of([*value, *value.values()])
    if isinstance(value, list | tuple | set | frozenset):
        inner = [_text_of(each) for each in value]
        if None in inner:
            return None
        return repr(sorted(map(str, inner)) if isinstance(value, set | frozenset) else inner)
    if isinstance(value, Dataset):  # a format of the user's own makes other rows of it
        return None if value.format["type"] == "custom" else value._fingerprint
    if not _is_known(type(value)):
        return None
    if isinstance(value, torch.Tensor):
        own = None if type(value) not in (torch.Tensor, torch.nn.Parameter) else _text_of(vars(value))
        return own and f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.requires_grad} {own}"
    if isinstance(value, torch.nn.Module):
        return _text_of_modules(value)
    if isinstance(value, PreTrainedTokenizerBase):
        return None if any(map(inspect.isroutine, vars(value).values())) else _text_of_files(value)
    if hasattr(value, "to_dict"):
        return json.dumps(
            value.to_dict(),
            sort_keys=True,
            default=lambda each: sorted(each) if isinstance(each, set | frozenset) else str(each),
        )
    return None


def _text_of_modules(model: Any) -> str | None:
    """Describes a model's modules with their attributes, hooks and tensors; a tensor that several share is named by
    its first place."""
    places: dict[int, str] = {}
    texts: list[str | None] = []
    for path, module in model.named_modules():
        if not _is_known(type(module)):
            return None
        attributes = dict(vars(module))
        children = attributes.pop("_modules")
        for name, tensor in {**attributes.pop("_parameters"), **attributes.pop("_buffers")}.items():
            attributes[f"tensor {name}"] = places.get(id(tensor), tensor)
            places.setdefault(id(tensor), f"{path}.{name}")
        shared = {name: "the model's" for name, each in attributes.items() if each is getattr(model, "config", None)}
        texts.append(_text_of([path, type(module), [*children], attributes | (shared if module is not model else {})]))
    return None if None in texts else repr(texts)


def _text_of_files(tokenizer: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return repr([(path.name, hashlib.blake2b(path.read_bytes()).hexdigest()) for path in files])


def _is_known(kind: Any) -> bool:
    return str(kind.__module__).split(".")[0] in OUR_LIBRARIES
