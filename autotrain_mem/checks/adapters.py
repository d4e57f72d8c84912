"""Checks which modules and experts LoRA adapts in the model that the trainer will build."""

from collections import Counter
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

from autotrain_mem.checks.model_files import model_without_weights
from autotrain_mem.checks.preflight_checks import Setup
from autotrain_mem.methods.configs import has_experts, peft_config, trusts_remote_code
from autotrain_mem.settings.words import CHECKPOINTING
from autotrain_mem.types.findings import Finding, Problems

NAMED_AT_MOST = 12
"""The most module names that an error lists; the usual transformer layer has seven linear modules."""


def unmatched_targets(setup: Setup) -> Problems:
    """Yields an error if ``--lora_target_modules`` matches nothing, and a warning if only some names match nothing.

    Mixtures of experts are not checked, since a name may refer to fused experts, which PEFT adapts as parameters.
    """
    job, filled = setup.job, setup.filled
    if job.python_call is not None:
        return  # PEFT uses the script's config and model
    asked = filled.model.lora_target_modules if job.arguments.get("use_peft") else None
    if not asked or asked == "all-linear" or has_experts(setup.config):
        return
    import torch
    from peft.tuners.tuners_utils import check_target_module_exists
    from transformers.pytorch_utils import Conv1D

    # Layers that LoRA can adapt (``peft/tuners/lora/model.py: _create_new_module``).
    forms = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, Conv1D)
    layers = {name: each for name, each in model_without_weights(job).named_modules() if isinstance(each, forms)}
    lora = peft_config(filled.model, job.model, own=filled.adapter, trust_remote_code=trusts_remote_code(filled))
    names = [asked] if isinstance(asked, str) else list(asked)  # a regular expression is one name
    missing = []
    for name in names:
        one = copy(lora)
        one.target_modules = name if isinstance(lora.target_modules, str) else {name}
        if not any(check_target_module_exists(one, layer) for layer in layers):  # PEFT's rule; falsy if excluded
            missing.append(name)
    if not missing:
        return
    none = len(missing) == len(names)
    # ``["q_proj", "k_proj", ...]``: names that repeat in every layer; for a single layer all but the embeddings.
    ends = Counter(name.split(".")[-1] for name, layer in layers.items() if not isinstance(layer, torch.nn.Embedding))
    often = [name for name, times in ends.items() if times > 1] or list(ends)
    *first, last = kinds = often[:NAMED_AT_MOST]
    cure = f"Give at least two of {', '.join(first)} and {last}; all-linear takes them all."
    if len(missing) == 1 and missing[0] in kinds:  # trl/trainer/model_config.py: __post_init__ unpacks a single name
        cure = f"Give '.*{missing[0]}': a single name is a regular expression for a module's whole name.\n{cure}"
    yield Finding(
        kind="error" if none else "warning",
        message=f"--lora_target_modules {' '.join(missing)} {'match' if len(missing) > 1 else 'matches'} no module of "
        f"{job.model}{'' if none else '; only the others are adapted'}.",
        cure=cure,
    )


CHUNKED = "chunked_nll"
"""TRL's name for its default loss, which processes the tokens in chunks."""


def fused_experts(model: Any) -> tuple[str, ...]:
    """Returns the names of fused experts that repeat in every layer: experts.down_proj, experts.gate_up_proj."""
    fused = (name for name, weight in model.named_parameters() if weight.dim() == 3)
    return tuple(sorted({".".join(name.split(".")[-2:]) for name in fused}))


def adapted_experts(setup: Setup) -> Problems:
    """Yields an error if PEFT refuses to adapt the experts as asked, and a warning if an adapter leaves them unchanged.

    transformers 5 fuses a layer's experts into one parameter, which ``target_parameters`` adapts. In some families PEFT
    also accepts ``all-linear``, and the names of the layers before they were fused, such as ``gate_proj``
    (``peft/utils/transformers_weight_conversion.py: _convert_peft_config_moe``).
    """
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers,
        get_model_conversion_mapping,
    )

    job, asked_for = setup.job, setup.filled.model
    if job.python_call is not None or not has_experts(setup.config):
        return  # PEFT uses the script's config and model
    if not job.arguments.get("use_peft"):
        if not job.arguments.get("lora_target_parameters"):
            return
        asked_for = replace(asked_for, use_peft=True)  # a plan may turn it on
    lora = peft_config(asked_for, job.model, trust_remote_code=trusts_remote_code(setup.filled))
    model = model_without_weights(job)
    fused = {name: weight.numel() for name, weight in model.named_parameters() if weight.dim() == 3}
    if not fused:
        return
    converted = deepcopy(lora)
    try:  # as PEFT does before it looks for layers (``peft/tuners/tuners_utils.py: inject_adapter``)
        conversions = get_model_conversion_mapping(model)
        convert_peft_config_for_transformers(converted, model=model, conversions=conversions)
    except ValueError as error:  # only one of two fused projections is named
        yield f"PEFT refuses --lora_target_modules: {error}", "Name gate_proj, up_proj and down_proj together."
        return
    names = [name for name, _ in model.named_parameters()]
    experts_flag = " ".join(fused_experts(model))
    asked = sorted(converted.target_parameters or ())
    if missing := [name for name in lora.target_parameters or () if not _matched(names, [name])]:
        yield (
            f"--lora_target_parameters {' '.join(missing)} {'match' if len(missing) > 1 else 'matches'} no parameter "
            f"of {job.model}.",
            f"Give --lora_target_parameters {experts_flag} for its experts.",
        )
    elif _matched(names, asked):  # ``peft/tuners/lora/layer.py: ParamWrapper.__init__``
        if lora.lora_dropout:
            yield (
                f"--lora_dropout {lora.lora_dropout} cannot be applied to parameters, and LoRA adapts "
                f"{', '.join(asked)} (PEFT: ParamWrapper does not work with lora_dropout != 0).",
                "Give --lora_dropout 0, or adapt attention only: --lora_target_modules q_proj k_proj v_proj o_proj",
            )
        if lora.use_dora:
            yield "--use_dora does not work with experts, which are adapted as parameters.", "Remove --use_dora."
    if job.arguments.get("use_peft") and not _matched(list(fused), asked):
        experts, parameters = sum(fused.values()), sum(weight.numel() for weight in model.parameters())
        share = f"{experts / 1e9:.3g} B of {parameters / 1e9:.3g} B parameters"
        yield Finding(
            kind="warning",
            message=f"LoRA does not adapt the experts, {share}: they are fused parameters, not layers.",
            cure=f"--lora_target_parameters {experts_flag} --lora_dropout 0 adapts them; PEFT then copies each "
            "adapted weight in every forward pass.",
        )


def router_loss(setup: Setup) -> Problems:
    """Refuses mixtures of experts whose routers' loss fails in the first step.

    TRL's chunked loss reads the config's ``num_experts`` (``trl/trainer/sft_trainer.py: _chunked_ce_forward``). While
    GKD generates with a KV cache, the loss multiplies one token's logits by the mask of the whole row
    (``transformers/models/qwen3_moe/modeling_qwen3_moe.py: load_balancing_loss_func``).
    """
    job, training, text = setup.job, setup.filled.training, setup.config.get_text_config()
    if getattr(text, "output_router_logits", None) is None or not getattr(training, "router_aux_loss_coef", 0):
        return
    without = "--router_aux_loss_coef 0 trains without this loss."
    if getattr(training, "lmbda", 0) and not job.arguments.get(CHECKPOINTING):
        yield (
            "The loss of the routers fails while GKD generates with a KV cache.",
            f"--{CHECKPOINTING} true generates without a cache; {without}",
        )
    is_chunked = job.method_facts.has_chunked_loss and job.python_call is None and training.loss_type == CHUNKED
    if is_chunked and not hasattr(text, "num_experts"):
        yield (
            f"TRL's loss of the routers needs num_experts, which the config of {text.model_type} lacks: the first step "
            "would fail.",
            without,
        )


def _matched(names: Sequence[str], targets: Sequence[str]) -> bool:
    """Returns whether a target names a parameter, as ``peft/tuners/tuners_utils.py: _inject_parameters`` decides."""
    return any(name == target or name.endswith(f".{target}") for name in names for target in targets)
