"""Reads how the processes of this training were launched: torchrun, ``accelerate launch``, and the script's own config.

What they say is rehearsed as it is; a plan changes none of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotrain_mem.drop_in import ranks
from autotrain_mem.errors import UsageError
from autotrain_mem.parallel.environment import config_of_environment
from autotrain_mem.parallel.user_config import Launch, read_launch
from autotrain_mem.spec.autofit import AutoFit

_NOT_REHEARSED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
"""What ``accelerate launch`` says to its processes (``accelerate/utils/launch.py``), and what it means."""

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
    """The config of ``accelerate launch`` that says the same; None for a single process."""
    pins: Mapping[str, Any] = field(default_factory=dict)
    """Knobs and arguments that a plan must not change."""
    warnings: tuple[str, ...] = ()


def read_launched(config: Any, autofit: AutoFit) -> Launched:
    """How this process was launched.

    Args:
        config: TRL's, which may ask for FSDP too.

    Raises:
        UsageError: it shards in a way that is not rehearsed, or otherwise than ``autofit`` says.
    """
    for variable, name in _NOT_REHEARSED.items():
        if os.environ.get(variable, "").lower() == "true":  # as accelerate/state.py asks
            raise UsageError(
                f"accelerate launched this process with {name}, which is not rehearsed.",
                hint="Launch it with FSDP (distributed_type: FSDP, fsdp_version: 2), or take trl's own class.",
            )
    count, nodes = ranks.processes(), ranks.nodes()
    content = _content(config, count) | {"num_machines": nodes}
    if count == 1 and content["distributed_type"] == "MULTI_GPU":
        launched, launch = Launched(), None
    else:
        launch = read_launch(content, "How accelerate launched this process")
        _check_shared_tokens(launch)
        launched = Launched(processes=count, nodes=nodes, config=content, pins=_pins(launch), warnings=launch.warnings)
    if problems := [*_contradictions(autofit, launched, launch)]:
        raise UsageError(f"{'; '.join(problems)}.", hint=_START)
    return launched


_START = "accelerate launch --config_file FILE SCRIPT starts processes and shards; remove it from AutoFit(...)."


def _contradictions(autofit: AutoFit, launched: Launched, launch: Launch | None) -> Iterator[str]:
    """A trainer's class is in the midst of its processes: it starts none."""
    sharding = None if launch is None else launch.sharding
    if autofit.accelerate_config is not None:
        yield "AutoFit(accelerate_config=...) comes too late for processes that run already"
    if autofit.gpu_counts not in ((), (launched.processes // launched.nodes,)):
        yield f"AutoFit(gpus=...) asks for {autofit.gpus}, and {launched.processes} process(es) train here"
    if autofit.nodes not in (None, launched.nodes):
        yield f"AutoFit(nodes={autofit.nodes}) is not the {launched.nodes} of this training"
    if autofit.sharding not in (None, sharding):
        yield f"AutoFit(sharding={autofit.sharding!r}) is not how these processes were launched ({sharding})"
    if autofit.fsdp_offload_params and not (launch is not None and launch.fsdp_offload_params):
        yield "AutoFit(fsdp_offload_params=True) is not how these processes were launched"


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


def _check_shared_tokens(launch: Launch) -> None:
    """A script's own rows are padded as its config says, and shared tokens need a multiple of twice the processes."""
    if launch.cp_size > 1:
        raise UsageError(
            "Context parallelism is not planned for in a script that accelerate launched.",
            hint="autofit sft --gpus N --cp_size N plans and trains with it; or launch with cp_size 1.",
        )


def _pins(launch: Launch) -> dict[str, Any]:
    return {
        "sharding": launch.sharding,
        "fsdp_offload_params": launch.fsdp_offload_params,
        **({} if launch.dp_replicate_size is None else {"dp_replicate_size": launch.dp_replicate_size}),
        **({"gradient_checkpointing": False} if launch.recomputes else {}),  # transformers takes one of both
    }
