"""Reads a config of ``accelerate launch`` or of DeepSpeed into a request, as if its keys were flags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotrain_mem.settings.own import OF_DEEPSPEED, SHARE_TOKENS
from autotrain_mem.settings.words import CHECKPOINTING, RECOMPUTES
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.files import read_start
from autotrain_mem.support.yaml_files import LARGEST_CONFIG_BYTES, read_yaml

if TYPE_CHECKING:
    from autotrain_mem.parallel.user_config import Launch
    from autotrain_mem.planning.run_request import RunRequest


FLAG, _ARGUMENT = "--accelerate_config", "deepspeed"
_NUMBERS = {"gradient_accumulation_steps": "gradient_accumulation_steps", "gradient_clipping": "max_grad_norm"}
"""Keys of ``deepspeed_config`` that set one of TRL's arguments -> that argument's name."""


def with_accelerate(request: RunRequest) -> RunRequest:
    """Returns the request with its configs' processes, machines and sharding. Raises UsageError if a config asks for
    what is not rehearsed, or contradicts a flag."""
    request = with_deepspeed(request)
    given, name = request.autofit.accelerate_config, FLAG
    if given is None:
        content, name = request.accelerate, "the plan's config of accelerate launch"
    elif isinstance(given, Mapping):
        content = given
    else:
        content, name = request.accelerate or read_yaml(str(given), FLAG), str(Path(given))
    if content is None:
        return request
    from autotrain_mem.parallel.user_config import read_launch

    launch = read_launch(content, name)
    refuse_all([*_contradictions(request, launch, name)])
    autofit = request.autofit
    gpus = launch.processes // launch.nodes if launch.processes else autofit.gpus
    processes = launch.processes or autofit.gpu_counts[0] * launch.nodes
    if str(content.get("distributed_type")) == "DEEPSPEED":
        return _with_zero(request, content, launch, gpus=gpus)
    sharding = launch.sharding if processes > 1 else None
    # A number that distributed_type NO ignores stays as it is, so that launch_warnings can say so.
    written = content.get("num_processes", 1) if launch.processes == 1 else processes
    # The config also decides knobs without a flag, and offloading even if it is off.
    pins: dict[str, Any] = {"fsdp_offload_params": launch.fsdp_offload_params}
    if launch.dp_replicate_size is not None:
        pins["dp_replicate_size"] = launch.dp_replicate_size
    pins |= {name: size for name in SHARE_TOKENS if (size := getattr(launch, name)) > 1}
    return replace(
        request,
        accelerate={**content, "num_processes": written},
        autofit=replace(autofit, gpus=gpus, nodes=launch.nodes, sharding=sharding),
        pins=pins if sharding else {},
        config={**request.config, **_trl_arguments(request, launch)},
    )


def _with_zero(request: RunRequest, content: Mapping[str, Any], launch: Launch, *, gpus: Any) -> RunRequest:
    """Returns the request with the DeepSpeed settings of the config itself, or of the file that it names."""
    from autotrain_mem.parallel.user_config import zero_settings

    given = zero_settings(content)
    file = given.get("deepspeed_config_file")
    autofit = replace(request.autofit, gpus=gpus, nodes=launch.nodes, accelerate_config=None)
    config = {**_trl_arguments(request, launch), **request.config}
    if file is not None:
        config["deepspeed"] = str(file)
        return with_deepspeed(replace(request, autofit=autofit, accelerate=None, config=config))
    numbers = {ours: given[key] for key, ours in _NUMBERS.items() if isinstance(given.get(key), int | float)}
    offload = {name: given[name] for name in OF_DEEPSPEED if given.get(name) not in (None, "none")}
    autofit = replace(autofit, sharding=launch.sharding, **offload)
    return replace(request, autofit=autofit, accelerate=None, config=numbers | config)


def launch_warnings(request: RunRequest) -> tuple[str, ...]:
    """Returns the warnings about the request's accelerate config."""
    if request.accelerate is None:
        return ()
    from autotrain_mem.parallel.user_config import read_launch

    return read_launch(request.accelerate, FLAG).warnings


def _trl_arguments(request: RunRequest, launch: Launch) -> dict[str, Any]:
    """Returns the TRL arguments that the config implies; ``mixed_precision: no`` implies none, since TRL's default
    overrides it (``transformers/training_args.py: __post_init__``, ``trl/trainer/base_config.py``)."""
    precision = launch.mixed_precision
    computes = {} if precision == "no" or request.names(precision) else {precision: True}
    return computes | ({CHECKPOINTING: False} if launch.recomputes else {})


def refuse_all(problems: Sequence[tuple[str, str]]) -> None:
    """Raises UsageError for all problems, each with its cure, at once."""
    if problems:
        raise UsageError.of(problems)


def _contradictions(request: RunRequest, launch: Launch, name: str) -> Iterator[tuple[str, str]]:
    autofit, counts = request.autofit, request.autofit.gpu_counts
    devices = None if launch.processes is None else launch.processes // launch.nodes
    if devices is None and len(counts) != 1:
        yield f"{name} does not set num_processes", "Give --gpus N, or write num_processes: N."
    elif devices is not None and counts not in ((), (devices,)):
        machines = f" on {launch.nodes} machines" if launch.nodes > 1 else ""
        written = ",".join(map(str, counts))
        cure = f"Remove --gpus, or write num_processes: {counts[0] * launch.nodes}."
        yield f"--gpus {written} and num_processes {launch.processes}{machines} in {name} contradict each other", cure
    if autofit.nodes not in (None, launch.nodes):
        cure = f"Remove --nodes, or write num_machines: {autofit.nodes}."
        yield f"--nodes {autofit.nodes} and num_machines {launch.nodes} in {name} contradict each other", cure
    if autofit.sharding not in (None, launch.sharding) and (launch.sharding or launch.processes == 1):
        asked = launch.sharding or "a single process"
        yield f"--sharding {autofit.sharding} and {name}, which asks for {asked}, contradict each other", "Remove one."
    if autofit.fsdp_offload_params and not launch.fsdp_offload_params:
        cure = "Remove the flag, or write fsdp_offload_params: true."
        yield f"--fsdp_offload_params and {name} contradict each other", cure
    for knob in SHARE_TOKENS:
        asked, size = getattr(autofit, knob), getattr(launch, knob)
        if asked not in (None, size):
            cure = f"Remove --{knob}, or write parallelism_config_{knob}: {asked}."
            yield f"--{knob} {asked} and the value {size} in {name} contradict each other", cure
    attention = request.argument("attn_implementation") or "sdpa"
    if launch.sp_size > 1 and attention != launch.sp_attention:
        cure = f"Write parallelism_config_sp_attn_implementation: {attention}."
        yield f"{name} is for {launch.sp_attention} attention, and --attn_implementation is {attention}", cure
    if launch.recomputes and any(request.argument(each) for each in RECOMPUTES):
        cure = "Remove --gradient_checkpointing, or write fsdp_activation_checkpointing: false; one is enough."
        yield f"--gradient_checkpointing and fsdp_activation_checkpointing in {name} recompute activations twice", cure
    precision = launch.mixed_precision
    other = {"bf16": "fp16", "fp16": "bf16"}.get(precision)
    is_off = request.names(precision) and not request.argument(precision)
    if other is not None and (is_off or request.argument(other)):
        flag = f"--{precision} false" if is_off else f"--{other}"
        cure = f"Remove {flag}, or write mixed_precision: {'no' if is_off else other}."
        yield f"{flag} and mixed_precision {precision} in {name} contradict each other", cure


def with_deepspeed(request: RunRequest) -> RunRequest:
    """Returns the request with the ZeRO stage and offloading of its DeepSpeed config, which TRL gets as well. A number
    for which TRL has an argument becomes that argument, and ``auto`` in the config. Raises UsageError if the config
    asks for what is not rehearsed, or contradicts a flag."""
    if (given := request.argument(_ARGUMENT)) is None:
        return request
    from autotrain_mem.parallel.config import read_deepspeed, with_auto

    content = deepspeed_content(given)
    is_file = isinstance(given, str) and not given.startswith("{")
    zero = read_deepspeed(content, str(given) if is_file else f"--{_ARGUMENT}")
    problems = []
    if request.autofit.sharding not in (None, zero.sharding):
        both = f"--sharding {request.autofit.sharding} and {zero.sharding} in --{_ARGUMENT} contradict each other"
        problems.append((both, "Remove one."))
    if request.autofit.accelerate_config is not None or request.accelerate is not None:
        problems.append((f"{FLAG} and --{_ARGUMENT} both set how processes share the model", "Remove one."))
    others = [name for name in OF_DEEPSPEED if getattr(request.autofit, name) not in (None, getattr(zero, name))]
    cure = "Remove the flag, or write it into the file."
    problems += [(f"--{name} and --{_ARGUMENT} contradict each other", cure) for name in others]
    refuse_all(problems)
    offload = {name: getattr(zero, name) or getattr(request.autofit, name) for name in OF_DEEPSPEED}
    left, said = with_auto(content)
    argv, is_value = [], False  # without --deepspeed, whose content is among the request's keys now
    for token in request.argv:
        if not is_value and token != f"--{_ARGUMENT}" and not token.startswith(f"--{_ARGUMENT}="):
            argv.append(token)
        is_value = token == f"--{_ARGUMENT}"
    return replace(
        request,
        argv=tuple(argv),
        config={**said, **request.config, _ARGUMENT: left},
        autofit=replace(request.autofit, sharding=zero.sharding, **offload),
    )


def deepspeed_content(given: Any) -> Mapping[str, Any]:
    """Reads a DeepSpeed config: a path, JSON text (as TRL's parser does), or keys. Raises UsageError if that fails."""
    return config_content(given, f"--{_ARGUMENT}", hint="Give a DeepSpeed config in JSON.")


def config_content(given: Any, flag: str, *, hint: str, file_name: str = "") -> Mapping[str, Any]:
    """Returns the keys of a config, given as a mapping, JSON, a file, or the folder that holds ``file_name``.

    Raises UsageError if it cannot be read.
    """
    if isinstance(given, Mapping):
        return given
    text, path = str(given).strip(), Path(str(given))
    if not text.startswith("{"):
        file = path / file_name if path.is_dir() else path
        try:
            text = read_start(file, LARGEST_CONFIG_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise UsageError(f"{flag} {file} cannot be read: {reason}.", hint=hint) from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {given} is not JSON: {error}.", hint=hint) from error
    if not isinstance(content, Mapping):
        raise UsageError(f"{flag} {given} holds no keys.", hint=hint)
    return content
