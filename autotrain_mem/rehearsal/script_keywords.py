"""Calls a script's trainer again as a rehearsal has it: the keyword arguments of TRL's constructor, exchanged."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from autotrain_mem.methods.configs import Configs, with_knobs
from autotrain_mem.methods.reward_functions import rehearsed_reward
from autotrain_mem.rehearsal.model.truncated_depth import shorten_model
from autotrain_mem.support import codec
from autotrain_mem.trainers.script_call import EVALUATED, Call, Keywords, loading, read, substitution
from autotrain_mem.types import Job, Knobs


def call_again(
    job: Job, knobs: Knobs, filled: Configs, train_dataset: Any, eval_dataset: Any, tokenizer: Any, layers: int | None
) -> Any:
    """The script's own trainer, built as the script builds it, on fake tensors.

    Args:
        layers: Of the models; None for all that they have.
    """
    call = read(job)
    if layers is not None:
        _shorten(call, layers)

    def substitute(keywords: Keywords) -> Keywords:
        rows = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        return rehearsed(keywords, job, knobs, filled, tokenizer=tokenizer, **rows)

    before = substitution.set(substitute)
    try:
        return call.trainer(*call.args, **call.kwargs)
    finally:
        substitution.reset(before)


def _shorten(call: Call, layers: int) -> None:
    """The model, and a reference that is as deep as it is and of its kind."""
    model = call.model
    if isinstance(model, str):
        return
    whole = model.config.get_text_config(decoder=True).num_hidden_layers
    for each in {id(value): value for value in call.keywords.values() if type(value) is type(model)}.values():
        if each.config.get_text_config(decoder=True).num_hidden_layers in (whole, layers):
            shorten_model(each, layers)


def rehearsed(
    keywords: Keywords,
    job: Job,
    knobs: Knobs,
    filled: Configs,
    *,
    train_dataset: Any,
    eval_dataset: Any,
    tokenizer: Any,
) -> Keywords:
    """The same call on fake models and worst rows, without what only a real run needs.

    An optimizer of the script's own comes along, with the fake parameters of the model that it was made for.
    """
    changed = with_knobs(keywords, job.method, {**job.arguments, **codec.to_json(knobs)}) | {
        "args": _arguments(keywords.get("args"), filled, knobs, loads=isinstance(keywords["model"], str)),
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "processing_class": tokenizer,
    }
    if "reward_funcs" in keywords:
        changed |= _rewards(keywords["reward_funcs"], tokenizer)
    return {name: value for name, value in changed.items() if name not in _ONLY_FOR_REAL}


_ONLY_FOR_REAL = ("callbacks", "compute_metrics", "preprocess_logits_for_metrics", "formatting_func")
"""A formatting function makes texts of rows, which are tokens already; metrics keep an evaluation's logits, of which a
rehearsal has two batches (:func:`left_out`)."""


def left_out(job: Job) -> tuple[str, ...]:
    """Says what of a script's call a rehearsal leaves out, in sentences for the estimate."""
    if job.python_call is None:
        return ()
    keywords, facts = read(job).keywords, []
    if keywords.get("compute_metrics") is not None:
        is_less = keywords.get("preprocess_logits_for_metrics") is not None
        kept = "what preprocess_logits_for_metrics leaves of the logits" if is_less else "the logits"
        facts.append(
            f"compute_metrics: {kept} of a whole evaluation{_rows(keywords.get(EVALUATED))}, which the trainer keeps "
            "on the card, twice while a batch is joined to them, unless eval_accumulation_steps moves them away"
        )
    if callbacks := keywords.get("callbacks"):
        names = sorted({getattr(each, "__name__", type(each).__name__) for each in callbacks})
        facts.append(f"tensors that callbacks of the script's own hold on the card: {', '.join(names)}")
    return tuple(facts)


def _rows(evaluated: Any) -> str:
    """``, 1,000 rows x tokens x vocabulary``; nothing where their number is not known."""
    return f", {len(evaluated):,} rows x tokens x vocabulary" if hasattr(evaluated, "__len__") else ""


def _arguments(asked: Any, filled: Configs, knobs: Knobs, *, loads: bool) -> Any:
    """The rehearsal's config, of the script's own class and with all that the script put on it.

    Args:
        loads: The trainer loads the model by its name.
    """
    made = filled.training
    if hasattr(made, "model_init_kwargs"):
        own = getattr(asked, "model_init_kwargs", None)
        made.model_init_kwargs = loading(own, knobs.dtype) if loads else own
    if asked is None or type(asked) is type(made):
        return made
    made = copy.copy(made)
    if isinstance(asked, type(made)):
        made.__class__ = type(asked)
    for name, value in vars(asked).items():
        if name not in vars(made):
            setattr(made, name, value)
    return made


def _rewards(rewards: Any, tokenizer: Any) -> Keywords:
    """A reward function is a stand-in, a reward model is rehearsed and reads the rehearsal's tokens."""
    asked = list(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    judged = [each if _is_model(each) else rehearsed_reward for each in asked]
    return {
        "reward_funcs": judged,
        "reward_processing_classes": [tokenizer if _is_model(each) else None for each in asked],
    }


def _is_model(reward: Any) -> bool:
    import torch

    return isinstance(reward, str | torch.nn.Module)
