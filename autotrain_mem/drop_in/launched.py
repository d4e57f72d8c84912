"""Reads how torchrun, ``accelerate launch`` or the script's config set up the processes, which no plan changes.

Rank 0 plans for the smallest device of all ranks, and all ranks use its plan.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from autotrain_mem.machine.choose import least
from autotrain_mem.machine.links import topology
from autotrain_mem.parallel.config import read_deepspeed, with_auto
from autotrain_mem.parallel.launch_environment import config_of_environment
from autotrain_mem.parallel.user_config import read_launch
from autotrain_mem.planning.accelerate_config import deepspeed_content
from autotrain_mem.settings.own import OF_DEEPSPEED, SHARE_TOKENS
from autotrain_mem.settings.words import CHECKPOINTING
from autotrain_mem.support import codec, errors
from autotrain_mem.support.errors import AutofitError, UsageError, described
from autotrain_mem.types import AutoFit, Hardware, Plan

_PLUGIN = {
    **{"fsdp_version": "version", "cpu_offload": "offload_params"},
    **{"transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap"},
}
"""Keys of transformers' ``fsdp_plugin_args`` (``training_args.py: _process_fsdp_args``) -> accelerate's names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """Describes how many processes train together, and how they share the model."""

    processes: int = 1
    nodes: int = 1
    config: Mapping[str, Any] | None = None
    """The equivalent config of ``accelerate launch``; None for a single process or DeepSpeed."""
    pins: Mapping[str, Any] = field(default_factory=dict)
    """Knobs and arguments that a plan must not change."""
    warnings: tuple[str, ...] = ()


def read_launched(config: Any, autofit: AutoFit) -> Launched:
    """Returns how this process was launched. ``config``: TRL's config, which may also ask for FSDP or DeepSpeed.
    Raises UsageError if the sharding cannot be rehearsed, or contradicts ``autofit``."""
    if _is_on("ACCELERATE_USE_MEGATRON_LM"):
        raise UsageError(
            "accelerate launched this process with Megatron-LM, which is not rehearsed.",
            hint="Launch it with FSDP (distributed_type: FSDP, fsdp_version: 2), or use trl's own class.",
        )
    # Shared tokens need rows padded to a multiple of the processes, which the script's config determines.
    sizes = getattr(config, "parallelism_config", None)
    for name in SHARE_TOKENS:
        of_launcher = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")
        if (getattr(sizes, name, 1) or 1) > 1 or (sizes is None and of_launcher not in ("", "1")):
            raise UsageError(
                f"{name}: dividing a row's tokens among GPUs is not supported in a script that accelerate launched.",
                hint=f"autofit sft --gpus N --{name} N plans and trains with it; or launch with {name} 1.",
            )
    count, machines = processes(), nodes()
    # A script's own config wins over the launcher's (``transformers/training_args.py: __post_init__``).
    uses_deepspeed = getattr(config, "deepspeed", None) or _is_on("ACCELERATE_USE_DEEPSPEED")
    launched = (_by_deepspeed if uses_deepspeed else _by_accelerate)(config, count, machines)
    if problems := [*_contradictions(autofit, launched)]:
        raise UsageError(f"{'; '.join(problems)}.", hint=_START)
    return launched


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() == "true"


def _by_accelerate(config: Any, count: int, nodes: int) -> Launched:
    """Reads the environment, and the script's own config, which wins."""
    of_script: dict[str, Any] = {}
    if (plugin := getattr(config, "fsdp_plugin_args", None)) is not None:
        settings = {f"fsdp_{_PLUGIN.get(name, name)}": value for name, value in plugin.items()}
        of_script = {"distributed_type": "FSDP", "fsdp_config": settings}
    if (sizes := getattr(config, "parallelism_config", None)) is not None:
        names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
        of_script["parallelism_config"] = {f"parallelism_config_{name}": getattr(sizes, name) for name in names}
    content = {**config_of_environment(os.environ, count), **of_script, "num_machines": nodes}
    if count == 1 and content["distributed_type"] == "MULTI_GPU":
        return Launched()
    launch = read_launch(content, "How accelerate launched this process")
    pins: dict[str, Any] = {"sharding": launch.sharding, "fsdp_offload_params": launch.fsdp_offload_params}
    if launch.dp_replicate_size is not None:
        pins["dp_replicate_size"] = launch.dp_replicate_size
    if launch.recomputes:
        pins[CHECKPOINTING] = False  # transformers accepts only one of the two
    return Launched(processes=count, nodes=nodes, config=content, pins=pins, warnings=launch.warnings)


_START = "Remove it from AutoFit(...): accelerate launch --config_file FILE SCRIPT sets the processes and sharding."


def _contradictions(autofit: AutoFit, launched: Launched) -> Iterator[str]:
    """Yields settings of AutoFit that running processes cannot follow."""
    if autofit.accelerate_config is not None:
        yield "AutoFit(accelerate_config=...) comes too late for processes that run already"
    if autofit.gpu_counts not in ((), (launched.processes // launched.nodes,)):
        yield f"AutoFit(gpus=...) asks for {autofit.gpus}, and {launched.processes} process(es) train here"
    if autofit.nodes not in (None, launched.nodes):
        yield f"AutoFit(nodes={autofit.nodes}) differs from the {launched.nodes} of this run"
    for name in ("sharding", "fsdp_offload_params", *OF_DEEPSPEED):
        asked, here = getattr(autofit, name), launched.pins.get(name)
        if asked not in (None, False, here):
            yield f"AutoFit({name}={asked!r}) is not how these processes were launched ({here})"


def _by_deepspeed(config: Any, count: int, nodes: int) -> Launched:
    """Reads the DeepSpeed JSON that the trainer will use: the script's own, or accelerate's
    (``accelerate/utils/dataclasses.py: DeepSpeedPlugin.__post_init__``).

    Values of ``auto`` come from TRL's arguments. A number must equal TRL's argument, and a plan keeps it.
    """
    given = getattr(config, "deepspeed", None)
    name = given if isinstance(given, str) else "How accelerate launched this process with DeepSpeed"
    name = "The script's deepspeed=..." if isinstance(given, Mapping) else name
    content = dict(deepspeed_content(given) if given else config.deepspeed_plugin.hf_ds_config.config)
    content.pop("steps_per_print", None)  # accelerate's is infinity, which is not JSON; it needs no memory
    content.setdefault("gradient_accumulation_steps", 1)  # as accelerate does, whatever TRL's config says
    zero = read_deepspeed(content, name)
    if count == 1:
        raise UsageError(
            f"{name}: a single process has no others to share the model with.",
            hint="Launch two processes or more (accelerate launch --num_processes 2), or train without DeepSpeed.",
        )
    left, args = with_auto(content)
    if "gradient_clipping" not in content:  # then DeepSpeed clips nothing
        del left["gradient_clipping"]
    # As ``transformers/integrations/deepspeed.py: trainer_config_process`` compares.
    problems = [f"{value} and {key}={other}" for key, value in args.items() if (other := getattr(config, key)) != value]
    rows, asked = content.get("train_batch_size", "auto"), count * config.per_device_train_batch_size
    asked *= config.gradient_accumulation_steps
    if rows not in ("auto", asked):
        problems.append(f"train_batch_size {rows} and the {asked} rows of a step")
    if problems:
        raise UsageError(
            f"{name} and the trainer's config contradict each other: {'; '.join(problems)}.",
            hint="Write \"auto\" in DeepSpeed's config for the values of the trainer's config.",
        )
    offload = {knob: getattr(zero, knob) for knob in OF_DEEPSPEED}
    pins = {"sharding": zero.sharding, "fsdp_offload_params": False, **offload, "deepspeed": left, **args}
    return Launched(processes=count, nodes=nodes, pins=pins)


Noun = TypeVar("Noun", Hardware, Plan)


def processes() -> int:
    """Returns the world size of torch.distributed; 1 without a process group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def nodes() -> int:
    """Returns the number of machines (``torch/distributed/elastic/agent/server/local_elastic_agent.py``)."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, processes() // int(local)) if local.isdigit() and int(local) else 1


def is_first() -> bool:
    """Returns whether this process plans and reports."""
    import torch.distributed as dist

    return processes() == 1 or dist.get_rank() == 0


def smallest(find: Callable[[], Hardware], link: str | None = None) -> Hardware:
    """Returns the device of all processes with the least budget, with the topology of all; every process must call it.
    ``link``: names of the links between devices, as in ``--link``; None to detect them. Raises AutofitError if any
    process failed to find its device."""
    if processes() == 1:
        return find()
    import torch.distributed as dist

    devices: list[Any] = [None] * processes()
    try:
        own = codec.to_json(find())
    except AutofitError as error:
        own = error.to_json()
    dist.all_gather_object(devices, own)
    cards, machines = [_received(Hardware, each) for each in devices], nodes()
    of_node = len(cards) // machines
    uuids = [each.uuid for each in cards[:of_node] if each.uuid is not None]
    card = least(cards)
    joined = topology(card, devices=of_node, nodes=machines, asked=link, uuids=uuids if len(uuids) == of_node else ())
    return replace(card, topology=joined)


def _received(kind: type[Noun], answer: Any) -> Noun:
    """Returns another process's answer, or raises its AutofitError."""
    if "error" in answer:
        raise errors.from_json(answer)
    return codec.from_json(kind, answer)


def agreed(make: Callable[[], Plan]) -> Plan:
    """Returns rank 0's plan in every process, or raises its error; the others wait up to the group's timeout."""
    if processes() == 1:
        return make()
    if not is_first():
        return _received(Plan, _broadcast(None))
    try:
        plan = make()
    except BaseException as error:  # the others are waiting for an answer
        reason = f"Rank 0 failed while it planned: {described(error)}"
        _broadcast((error if isinstance(error, AutofitError) else AutofitError(reason)).to_json())
        raise
    _broadcast(codec.to_json(plan))
    return plan


def _broadcast(answer: Any) -> Any:
    import torch.distributed as dist

    box = [answer]
    dist.broadcast_object_list(box, src=0)
    return box[0]
