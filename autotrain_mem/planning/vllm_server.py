"""Plans vLLM's memory: on the GPUs of its server, or as a share of the GPUs that train."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from autotrain_mem.estimator.vllm_share import VLLM_MODE, VLLM_SHARE
from autotrain_mem.planning.rehearsals import Subject
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Knobs, ModelFacts
from autotrain_mem.types.vllm import OVERHEAD_BYTES, SERVER_PORT, SERVER_UTILIZATION, VllmServer

_HERE = ("0.0.0.0", "127.0.0.1", "localhost")  # TRL's default for a server on this machine
_HALF_BYTES = 2
"""Bytes per element: vLLM's ``dtype auto`` also serves float32 checkpoints in half precision (``config/model.py``)."""
_MOST_PERCENT = 95
"""The largest share of a card that a hint suggests, in percent, since the trainer needs the rest."""


def vllm_server(subject: Subject, knobs: Knobs) -> VllmServer | None:
    """Returns the server of ``--vllm_mode server``, assumed to have cards like those that train, or None.

    TRL leaves ``vllm_tensor_parallel_size`` and ``vllm_gpu_memory_utilization`` to the server's command. Raises
    DoesNotFitError if the weights and one completion exceed the server's share of its cards.
    """
    given, hardware = subject.job.arguments, subject.hardware
    if not given.get("use_vllm") or given.get("vllm_mode", VLLM_MODE) != "server":
        return None
    # ``trl/generation/vllm_generation.py: _init_vllm``
    host, port = _host(given.get), int(given.get("vllm_server_port", SERVER_PORT))
    if url := given.get("vllm_server_base_url"):
        port = urlsplit(str(url)).port or SERVER_PORT
    is_here = host in _HERE and hardware.topology.nodes == 1
    first_gpu = hardware.topology.devices if is_here else None
    server = _engine(subject, knobs, utilization=SERVER_UTILIZATION)
    server = replace(server, first_gpu=first_gpu, port=port)
    if not server.fits:
        more = (_on(server, subject.facts, gpus) for gpus in (2, 4, 8) if gpus > server.gpus)
        nearest = next((each for each in more if each.fits), None)
        cure = "Generate with a smaller model, or on larger cards"
        if nearest is not None:
            held = format_bytes(nearest.weights_bytes or 0)
            cure = f"Give --vllm_tensor_parallel_size {nearest.gpus}: {nearest.gpus} GPUs hold {held} of weights each"
        cards = f"a card of the vLLM server, which uses {format_bytes(server.share_bytes)} of it"
        raise DoesNotFitError(f"{_needs(server)} do not fit {cards}.", hint=f"{cure}.")
    return server


def gpus_served_here(argument: Callable[[str], Any], nodes: int) -> int:
    """Counts the GPUs of this machine that a vLLM server takes; 0 if it runs elsewhere, or if several machines train.

    ``argument`` returns the value of one of TRL's arguments, or None.
    """
    is_served = argument("use_vllm") and (argument("vllm_mode") or VLLM_MODE) == "server"
    if not is_served or nodes > 1 or _host(argument) not in _HERE:
        return 0
    gpus = str(argument("vllm_tensor_parallel_size") or 1)
    return int(gpus) if gpus.isdigit() else 1  # TRL's parser rejects anything else


def check_colocated(subject: Subject, knobs: Knobs) -> None:
    """Raises DoesNotFitError if vLLM's share of the training GPUs does not hold its weights and one completion.

    vLLM itself raises "No available memory for the cache blocks" only after loading all weights
    (``vllm/v1/core/kv_cache_utils.py: check_enough_kv_cache_memory``).
    """
    hardware, engine = subject.hardware, _engine(subject, knobs, utilization=VLLM_SHARE)
    if not subject.vllm_share_bytes or engine.fits:
        return
    held_bytes = (engine.weights_bytes or 0) + (engine.completion_bytes or 0)
    share = math.ceil(100 * (held_bytes + OVERHEAD_BYTES) / hardware.total_bytes)
    cures = [f"--vllm_gpu_memory_utilization {share / 100:.2f} gives it enough"] if share < _MOST_PERCENT else []
    if (gpus := hardware.topology.devices) > engine.gpus:
        cures.append(f"--vllm_tensor_parallel_size {gpus} divides it among {gpus} of the GPUs")
    cures.append("--vllm_mode server generates on GPUs of its own")
    raise DoesNotFitError(
        f"{_needs(engine)} do not fit vLLM's share of a card, {format_bytes(engine.share_bytes)}.",
        hint=f"{'; '.join(cures)}.",
    )


def _engine(subject: Subject, knobs: Knobs, *, utilization: float) -> VllmServer:
    given, prompt = subject.job.arguments, subject.lengths.longest
    length = None if prompt is None else prompt + knobs.completion_length
    engine = VllmServer(
        model=subject.job.model,
        gpus=1,
        first_gpu=None,
        port=SERVER_PORT,
        gpu_memory_utilization=float(given.get("vllm_gpu_memory_utilization", utilization)),
        max_model_len=given.get("vllm_max_model_length") or length,
        total_bytes=subject.hardware.total_bytes,
        weights_bytes=None,
        token_bytes=None,
    )
    return _on(engine, subject.facts, int(given.get("vllm_tensor_parallel_size", 1)))


def _host(argument: Callable[[str], Any]) -> str:
    if url := argument("vllm_server_base_url"):
        return urlsplit(str(url)).hostname or ""
    return str(argument("vllm_server_host") or _HERE[0])


def _on(server: VllmServer, facts: ModelFacts, gpus: int) -> VllmServer:
    """Divides the server among ``gpus``: each holds its part of the weights, and whole heads of keys and values."""
    weights = None if facts.parameters is None or facts.is_quantized else facts.parameters * _HALF_BYTES // gpus
    token = None
    if facts.kv_heads is not None and facts.kv_head_elements is not None:
        token = max(1, facts.kv_heads // gpus) * facts.kv_head_elements * _HALF_BYTES
    return replace(server, gpus=gpus, weights_bytes=weights, token_bytes=token)


def _needs(engine: VllmServer) -> str:
    weights, cache = format_bytes(engine.weights_bytes or 0), format_bytes(engine.completion_bytes or 0)
    return f"{weights} of weights and {cache} of KV cache for one completion"
