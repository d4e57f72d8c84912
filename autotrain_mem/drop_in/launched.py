"""Reads how the processes of this training were launched: torchrun, ``accelerate launch``, and the script's own config.

What they say is rehearsed as it is; a plan changes none of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotrain_mem.drop_in import agreement
from autotrain_mem.parallel.deepspeed_config import read_deepspeed, with_auto
from autotrain_mem.parallel.environment import config_of_environment
from autotrain_mem.parallel.user_config import Launch, read_launch
from autotrain_mem.planning.deepspeed_file import deepspeed_content
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types.autofit import AutoFit
from autotrain_mem.types.knobs import TOKEN_KNOBS, ZERO_KNOBS

_PLUGIN = {
    **{"fsdp_version": "version", "cpu_offload": "offload_params"},
    **{"transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap"},
}
"""What ``fsdp_plugin_args`` of transformers' config (``training_args.py: _process_fsdp_args``) calls otherwise than a
file of accelerate's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """Says how many processes train together, and how they share the model."""

    processes: int = 1
    nodes: int = 1
    config: Mapping[str, Any] | None = None
    """The config of ``accelerate launch`` that says the same; None for a single process, and where DeepSpeed's own says
    how the model is shared, which is among the pins."""
    pins: Mapping[str, Any] = field(default_factory=dict)
    """Knobs and arguments that a plan must not change."""
    warnings: tuple[str, ...] = ()


def read_launched(config: Any, autofit: AutoFit) -> Launched:
    """How this process was launched.

    Args:
        config: TRL's, which may ask for FSDP or DeepSpeed too.

    Raises:
        UsageError: it shards in a way that is not rehearsed, or otherwise than ``autofit`` says.
    """
    if _is_on("ACCELERATE_USE_MEGATRON_LM"):
        raise UsageError(
            "accelerate launched this process with Megatron-LM, which is not rehearsed.",
            hint="Launch it with FSDP (distributed_type: FSDP, fsdp_version: 2), or take trl's own class.",
        )
    _check_shared_tokens(config)
    count, nodes = agreement.processes(), agreement.nodes()
    launched = _by_deepspeed(config, count, nodes) if _uses_deepspeed(config) else _by_accelerate(config, count, nodes)
    if problems := [*_contradictions(autofit, launched)]:
        raise UsageError(f"{'; '.join(problems)}.", hint=_START)
    return launched


def _is_on(variable: str) -> bool:
    """Says whether ``accelerate launch`` told its processes so (``accelerate/utils/launch.py``, ``state.py``)."""
    return os.environ.get(variable, "").lower() == "true"


def _by_accelerate(config: Any, count: int, nodes: int) -> Launched:
    content = _content(config, count) | {"num_machines": nodes}
    if count == 1 and content["distributed_type"] == "MULTI_GPU":
        return Launched()
    launch = read_launch(content, "How accelerate launched this process")
    return Launched(processes=count, nodes=nodes, config=content, pins=_pins(launch), warnings=launch.warnings)


_START = "accelerate launch --config_file FILE SCRIPT starts processes and shards; remove it from AutoFit(...)."


def _contradictions(autofit: AutoFit, launched: Launched) -> Iterator[str]:
    """A trainer's class is in the midst of its processes: it starts none."""
    sharding = launched.pins.get("sharding")
    if autofit.accelerate_config is not None:
        yield "AutoFit(accelerate_config=...) comes too late for processes that run already"
    if autofit.gpu_counts not in ((), (launched.processes // launched.nodes,)):
        yield f"AutoFit(gpus=...) asks for {autofit.gpus}, and {launched.processes} process(es) train here"
    if autofit.nodes not in (None, launched.nodes):
        yield f"AutoFit(nodes={autofit.nodes}) is not the {launched.nodes} of this training"
    if autofit.sharding not in (None, sharding):
        yield f"AutoFit(sharding={autofit.sharding!r}) is not how these processes were launched ({sharding})"
    if autofit.fsdp_offload_params and not launched.pins.get("fsdp_offload_params"):
        yield "AutoFit(fsdp_offload_params=True) is not how these processes were launched"
    for name in ZERO_KNOBS:
        if getattr(autofit, name) not in (None, launched.pins.get(name)):
            yield f"AutoFit({name}={getattr(autofit, name)!r}) is not how these processes were launched"


def _content(config: Any, count: int) -> dict[str, Any]:
    """The config of accelerate that says what the environment and the script's own config say; the latter's wins, as
    ``transformers/trainer.py: create_accelerator_and_postprocess`` has it."""
    of_launcher = config_of_environment(os.environ, count) or {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
        "num_processes": count,
    }
    of_script: dict[str, Any] = {}
    if (plugin := getattr(config, "fsdp_plugin_args", None)) is not None:
        settings = {f"fsdp_{_PLUGIN.get(name, name)}": value for name, value in plugin.items()}
        of_script = {"distributed_type": "FSDP", "fsdp_config": settings}
    if (sizes := getattr(config, "parallelism_config", None)) is not None:
        names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
        of_script["parallelism_config"] = {f"parallelism_config_{name}": getattr(sizes, name) for name in names}
    return {**of_launcher, **of_script}


def _check_shared_tokens(config: Any) -> None:
    """A script's own rows are padded as its config says, and shared tokens need a multiple of the processes."""
    sizes = getattr(config, "parallelism_config", None)
    for name in TOKEN_KNOBS:
        launched = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")
        if (getattr(sizes, name, 1) or 1) > 1 or (sizes is None and launched not in ("", "1")):
            raise UsageError(
                f"{name}: that several GPUs share the tokens of a row is not planned for in a script that accelerate "
                "launched.",
                hint=f"autofit sft --gpus N --{name} N plans and trains with it; or launch with {name} 1.",
            )


def _pins(launch: Launch) -> dict[str, Any]:
    return {
        "sharding": launch.sharding,
        "fsdp_offload_params": launch.fsdp_offload_params,
        **({} if launch.dp_replicate_size is None else {"dp_replicate_size": launch.dp_replicate_size}),
        **({"gradient_checkpointing": False} if launch.recomputes else {}),  # transformers takes one of both
    }


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def _uses_deepspeed(config: Any) -> bool:
    """Tells whether DeepSpeed divides the model; a script's own config wins over the launcher's
    (``transformers/training_args.py: __post_init__``)."""
    return bool(getattr(config, "deepspeed", None)) or _is_on("ACCELERATE_USE_DEEPSPEED")


def _by_deepspeed(config: Any, count: int, nodes: int) -> Launched:
    """Reads the JSON of DeepSpeed's that the trainer will have: the script's own, or accelerate's.

    Of accelerate that is what its plugin makes of its variables and of its file (``accelerate/utils/dataclasses.py:
    DeepSpeedPlugin.__post_init__``), which transformers' config holds. What is ``auto`` in it is filled in from TRL's
    arguments, and a number must be theirs: a plan keeps it.
    """
    given = getattr(config, "deepspeed", None)
    name = given if isinstance(given, str) else "How accelerate launched this process with DeepSpeed"
    name = "The script's deepspeed=..." if isinstance(given, Mapping) else name
    content = dict(deepspeed_content(given) if given else config.deepspeed_plugin.hf_ds_config.config)
    content.pop("steps_per_print", None)  # accelerate's is infinity, which is no JSON, and takes no memory
    content.setdefault("gradient_accumulation_steps", 1)  # as accelerate does, whatever TRL's config says
    zero = read_deepspeed(content, name)
    if count == 1:
        raise UsageError(
            f"{name}: a single process has nothing to divide among others.",
            hint="Launch two processes or more (accelerate launch --num_processes 2), or train without DeepSpeed.",
        )
    left, said = with_auto(content)
    if "gradient_clipping" not in content:  # then DeepSpeed clips nothing
        del left["gradient_clipping"]
    if problems := [*_mismatches(content, said, config, count)]:
        raise UsageError(
            f"{name} and the trainer's config contradict each other, which transformers refuses: "
            f"{'; '.join(problems)}.",
            hint='Write "auto" into the config of DeepSpeed for what the trainer\'s config says.',
        )
    offload = {knob: getattr(zero, knob) for knob in ZERO_KNOBS}
    pins = {"sharding": zero.sharding, "fsdp_offload_params": False, **offload, "deepspeed": left, **said}
    return Launched(processes=count, nodes=nodes, pins=pins)


def _mismatches(content: Mapping[str, Any], said: Mapping[str, Any], config: Any, count: int) -> Iterator[str]:
    """Compares as ``transformers/integrations/deepspeed.py: trainer_config_process`` does."""
    for name, value in said.items():
        if getattr(config, name) != value:
            yield f"{value} and {name}={getattr(config, name)}"
    rows, asked = content.get("train_batch_size", "auto"), count * config.per_device_train_batch_size
    asked *= config.gradient_accumulation_steps
    if rows not in ("auto", asked):
        yield f"train_batch_size {rows} and the {asked} rows of a step"
