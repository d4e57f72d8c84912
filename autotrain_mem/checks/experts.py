"""Checks what LoRA makes of a mixture's experts, whose weights are parameters of all experts of a layer at once."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from autotrain_mem.checks.collect import Problems
from autotrain_mem.checks.model import model_without_weights
from autotrain_mem.checks.preflight import Setup
from autotrain_mem.methods.configs import has_experts, peft_config, trusts_remote_code
from autotrain_mem.types.preflight import Finding

CHUNKED = "chunked_nll"
"""TRL's name for the loss that goes over the tokens in chunks, its default."""


def adapted_experts(setup: Setup) -> Problems:
    """Yields what PEFT refuses of experts, and a warning where an adapter leaves them as they are.

    Experts that transformers 5 fuses into one parameter are adapted by ``target_parameters``; in some families PEFT
    takes names of layers that they had before, such as ``gate_proj``, and ``all-linear``, for these
    (``peft/utils/transformers_weight_conversion.py: _convert_peft_config_moe``).
    """
    lora = _asked(setup)
    if lora is None:
        return
    model = model_without_weights(setup.job)
    fused = {name: weight.numel() for name, weight in model.named_parameters() if weight.dim() == 3}
    if not fused:
        return
    converted = deepcopy(lora)
    try:
        _convert(converted, model)
    except ValueError as error:  # one of two projections that are fused
        yield f"PEFT refuses --lora_target_modules: {error}", "Name gate_proj, up_proj and down_proj together."
        return
    names = [name for name, _ in model.named_parameters()]
    asked = sorted(converted.target_parameters or ())
    missing = [name for name in lora.target_parameters or () if not _matched(names, [name])]
    if missing:
        yield (
            f"--lora_target_parameters {' '.join(missing)} {'match' if len(missing) > 1 else 'matches'} no parameter "
            f"of {setup.job.model}.",
            f"Its experts are --lora_target_parameters {' '.join(_last_names(list(fused)))}.",
        )
    elif _matched(names, asked):
        yield from _refused_of_parameters(lora, asked)
    if setup.job.arguments.get("use_peft") and not _matched(list(fused), asked):
        yield _untouched(sum(fused.values()), sum(weight.numel() for weight in model.parameters()), list(fused))


def router_loss(setup: Setup) -> Problems:
    """TRL's chunked loss adds that of the routers with ``config.num_experts``, which some mixtures call otherwise: such
    a run ends in its first step (``trl/trainer/sft_trainer.py: _chunked_ce_forward``)."""
    job, training, text = setup.job, setup.filled.training, setup.config.get_text_config()
    if not job.method_facts.has_chunked_loss or job.python_call is not None:
        return
    asks = getattr(text, "output_router_logits", None) is not None and training.router_aux_loss_coef
    if asks and training.loss_type == CHUNKED and not hasattr(text, "num_experts"):
        yield (
            f"TRL's loss of the routers looks for num_experts, which the config of {text.model_type} has not: the run "
            "would end in its first step.",
            "--router_aux_loss_coef 0 trains without it.",
        )


def _asked(setup: Setup) -> Any:
    """The LoRA that is asked for, or that a plan would turn on with the parameters that are named; None without."""
    job, asked = setup.job, setup.filled.model
    if job.python_call is not None or not has_experts(setup.config):
        return None  # PEFT looks at the script's own config, and at its model
    if not job.arguments.get("use_peft"):
        if not job.arguments.get("lora_target_parameters"):
            return None
        asked = replace(asked, use_peft=True)
    return peft_config(asked, job.model, trust_remote_code=trusts_remote_code(setup.filled))


def _convert(lora: Any, model: Any) -> None:
    """Changes a config as PEFT does before it looks for layers (``peft/tuners/tuners_utils.py: inject_adapter``)."""
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers,
        get_model_conversion_mapping,
    )

    convert_peft_config_for_transformers(lora, model=model, conversions=get_model_conversion_mapping(model))


def _matched(names: Sequence[str], targets: Sequence[str]) -> bool:
    """``peft/tuners/tuners_utils.py: _inject_parameters``."""
    return any(name == target or name.endswith(f".{target}") for name in names for target in targets)


def _refused_of_parameters(lora: Any, asked: Sequence[str]) -> Problems:
    """``peft/tuners/lora/layer.py: ParamWrapper.__init__``."""
    if lora.lora_dropout:
        yield (
            f"--lora_dropout {lora.lora_dropout} cannot be applied to parameters, and LoRA is to adapt "
            f"{', '.join(asked)} (PEFT: ParamWrapper does not work with lora_dropout != 0).",
            "--lora_dropout 0, or name layers of attention alone: --lora_target_modules q_proj k_proj v_proj o_proj",
        )
    if lora.use_dora:
        yield "--use_dora does not go with experts that are adapted as parameters.", "Remove --use_dora."


def _untouched(experts: int, parameters: int, fused: Sequence[str]) -> Finding:
    return Finding(
        kind="warning",
        message=f"LoRA leaves the experts as they are, {experts / 1e9:.3g} B of {parameters / 1e9:.3g} B parameters: "
        "they are fused into parameters, which are no layers.",
        cure=f"--lora_target_parameters {' '.join(_last_names(fused))} --lora_dropout 0 adapts them; PEFT then makes a "
        "copy of each such weight in every forward pass.",
    )


def _last_names(names: Sequence[str]) -> list[str]:
    """``["experts.down_proj", "experts.gate_up_proj"]``: what repeats in every layer."""
    return sorted({".".join(name.split(".")[-2:]) for name in names})
