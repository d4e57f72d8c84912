"""What a vLLM engine takes of the card that the trainer trains on."""

from __future__ import annotations

import math

from autotrain_mem.spec import Hardware, Job

DEFAULT_MODE = "colocate"
DEFAULT_SHARE = 0.3
"""``vllm_mode`` and ``vllm_gpu_memory_utilization``, TRL 1.12 to 1.16 (trl/trainer/grpo_config.py, rloo_config.py)."""


def vllm_share_bytes(job: Job, hardware: Hardware) -> int:
    """Bytes of the engine: a share of the card's whole memory, whatever is free; 0 without one on this card.

    vLLM sizes its KV cache so that weights, activations and cache make up the share (vllm/v1/worker/utils.py:
    request_memory). A card of 24 GiB gives 7.2 GiB by default.
    """
    given = job.arguments
    if not given.get("use_vllm") or given.get("vllm_mode", DEFAULT_MODE) != "colocate":
        return 0
    return math.ceil(hardware.total_bytes * float(given.get("vllm_gpu_memory_utilization", DEFAULT_SHARE)))
