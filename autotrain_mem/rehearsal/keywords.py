"""The keyword arguments of TRL's constructors: with what a plan adds to them, and as a rehearsal has them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from autotrain_mem.rehearsal.configs import Configs, loading_arguments, model_arguments, peft_config
from autotrain_mem.rehearsal.fewer_layers import shorten_model
from autotrain_mem.rehearsal.handed import Call, Keywords, read, substitution
from autotrain_mem.rehearsal.methods.dpo import scores_at_hand
from autotrain_mem.rehearsal.methods.reward import LORA_TASK
from autotrain_mem.rehearsal.rewards import rehearsed_reward
from autotrain_mem.spec import Job, Knobs


def call_again(
    job: Job, knobs: Knobs, filled: Configs, train_dataset: Any, eval_dataset: Any, tokenizer: Any, layers: int | None
) -> Any:
    """The script's own trainer, built as the script builds it, on the stage.

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
        with scores_at_hand():
            trainer = call.trainer(*call.args, **call.kwargs)
    finally:
        substitution.reset(before)
    return _with_optimizer(trainer, call.keywords)


def _shorten(call: Call, layers: int) -> None:
    """The model, and a reference that is as deep as it is and of its kind."""
    model = call.model
    if isinstance(model, str):
        return
    whole = model.config.get_text_config(decoder=True).num_hidden_layers
    for each in {id(value): value for value in call.keywords.values() if type(value) is type(model)}.values():
        if each.config.get_text_config(decoder=True).num_hidden_layers in (whole, layers):
            shorten_model(each, layers)


def with_knobs(keywords: Keywords, method: str, arguments: Mapping[str, Any]) -> Keywords:
    """What a plan asks for beside the config, where the script does not hand it: LoRA, and a quantized base.

    Args:
        arguments: The job's, with the plan's knobs over them.
    """
    from trl import get_quantization_config

    changed, model = dict(keywords), keywords["model"]
    asked = model_arguments({**(LORA_TASK if method == "reward" else {}), **arguments})
    if keywords.get("peft_config") is None and not is_adapted(model):
        trust = bool(arguments.get("trust_remote_code"))
        changed["peft_config"] = peft_config(asked, model, trust_remote_code=trust)
    if isinstance(model, str) and keywords.get("quantization_config") is None:
        changed["quantization_config"] = get_quantization_config(asked)
    return {name: value for name, value in changed.items() if value is not None or name in keywords}


def is_adapted(model: Any) -> bool:
    """Whether an adapter is on a model object already."""
    return getattr(model, "peft_config", None) is not None


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

    Callbacks, metrics and the learning rate's schedule are left out.
    """
    changed = with_knobs(keywords, job.method, {**job.arguments, **knobs.to_json()}) | {
        "args": _arguments(keywords.get("args"), filled, loads=isinstance(keywords["model"], str)),
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "processing_class": tokenizer,
    }
    if "reward_funcs" in keywords:
        changed |= _rewards(keywords["reward_funcs"], tokenizer)
    return {name: value for name, value in changed.items() if name not in _ONLY_FOR_REAL}


_ONLY_FOR_REAL = ("callbacks", "compute_metrics", "preprocess_logits_for_metrics", "formatting_func", "optimizers")
"""A formatting function makes texts of rows, which are tokens already; metrics keep an evaluation's logits, of which a
rehearsal has two batches (``NOT_COUNTED``)."""


def not_counted(keywords: Keywords) -> tuple[str, ...]:
    """What of this call a rehearsal leaves out, in sentences for the estimate."""
    facts = []
    if keywords.get("compute_metrics") is not None:
        facts.append(
            "compute_metrics: the logits of a whole evaluation, which the trainer keeps on the card unless "
            "eval_accumulation_steps moves them away"
        )
    if keywords.get("callbacks"):
        facts.append("callbacks of the script's own")
    return tuple(facts)


def _arguments(asked: Any, filled: Configs, *, loads: bool) -> Any:
    """The rehearsal's config, of the script's own class and with all that the script put on it.

    Args:
        loads: The trainer loads the model by its name.
    """
    made = filled.training
    own = getattr(asked, "model_init_kwargs", None) or {}
    if hasattr(made, "model_init_kwargs"):
        made.model_init_kwargs = {**own, **loading_arguments(filled)} if loads else None
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


def _with_optimizer(trainer: Any, keywords: Mapping[str, Any]) -> Any:
    """An optimizer made by the script holds its own model's parameters: one of its class is made for the fake ones."""
    optimizer = (keywords.get("optimizers") or (None, None))[0]
    if optimizer is not None:
        trainer.optimizer_cls_and_kwargs = (type(optimizer), dict(optimizer.defaults))
    return trainer
