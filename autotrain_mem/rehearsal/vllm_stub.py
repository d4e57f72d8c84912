"""Replaces vLLM in rehearsals: vLLM need not be installed, and its memory is not in torch's allocator."""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from autotrain_mem.rehearsal.trace.recorder import current_recorder
from autotrain_mem.types.trace import EngineMark

PACKED_BUFFER_BYTES = 1 << 30
PACKED_BUFFERS = 2
"""The size and number of buffers in which a trainer sends weights to a vLLM server (``vllm/distributed/
weight_transfer/packed_tensor.py: DEFAULT_PACKED_BUFFER_SIZE_BYTES, DEFAULT_PACKED_NUM_BUFFERS``): a buffer is sent once
it exceeds that size."""

SAMPLED_LOGPROB = -1.0
"""The log-probability of every sampled token; any number would do."""


@contextmanager
def vllm_stand_in() -> Iterator[None]:
    """Within the block, TRL uses a vLLM engine or server that returns completions of the maximum length.

    As in ``generation``, all completions but the first are one token shorter, so that batches need a mask.

    Only the engine and the server's client are replaced. ``trl.generation.VLLMGeneration`` runs for real, since it
    merges adapters and gathers weights.
    """
    from trl.generation import vllm_generation

    with (
        patch.dict(os.environ),  # colocate mode sets RANK, WORLD_SIZE and a master address, and does not unset them
        patch.object(vllm_generation, "is_vllm_available", lambda *args, **kwargs: True),
        patch.object(vllm_generation, "VLLMClient", _Client),
        patch.object(vllm_generation, "LLM", _Engine, create=True),
        patch.object(vllm_generation, "SamplingParams", SimpleNamespace, create=True),
        patch.object(vllm_generation, "StructuredOutputsParams", SimpleNamespace, create=True),
    ):
        yield


class _Engine:
    """Implements the part of ``vllm.LLM`` that ``VLLMGeneration`` uses."""

    def __init__(self, **options: Any) -> None:
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=list)))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker),
            model_config=SimpleNamespace(max_model_len=options["max_model_len"]),
        )

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        answers: list[Any] = []
        for prompt in (each["prompt_token_ids"] for each in prompts):
            completions = []
            for number in range(len(answers) * sampling_params.n, (len(answers) + 1) * sampling_params.n):
                tokens = _completion(prompt, sampling_params.max_tokens, number)
                chosen = [{token: SimpleNamespace(rank=1, logprob=SAMPLED_LOGPROB)} for token in tokens]
                completions.append(SimpleNamespace(token_ids=tokens, logprobs=chosen))
            answers.append(SimpleNamespace(prompt_token_ids=prompt, outputs=completions))
        return answers

    def reset_prefix_cache(self) -> None: ...

    def sleep(self, level: int) -> None:
        """Releases the engine's memory and torch's cache (``vllm/device_allocator/cumem.py: CuMemAllocator.sleep``)."""
        _mark(EngineMark.SLEEPS)
        torch.cuda.empty_cache()

    def wake_up(self, tags: list[str]) -> None:
        """Allocates the weights, then the KV cache. TRL empties torch's cache before the first of these only
        (``trl/generation/vllm_generation.py: sync_weights, generate``)."""
        _mark(EngineMark.WAKES)


def _mark(mark: EngineMark) -> None:
    """Records an event of the engine if a recorder is active; none is while the trainer is built."""
    if recorder := current_recorder():
        recorder.ledger.mark(mark)


class _Client:
    """Implements the part of ``trl.generation.vllm_client.VLLMClient`` that TRL uses."""

    def __init__(self, **options: Any) -> None: ...

    def init_communicator(self, device: Any) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **options: Any) -> dict[str, Any]:
        asked = [prompt for prompt in prompts for _ in range(n)]
        completions = [_completion(prompt, max_tokens, number) for number, prompt in enumerate(asked)]
        return {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "logprobs": [[[SAMPLED_LOGPROB] for _ in tokens] for tokens in completions],
            "logprob_token_ids": [[[token] for token in tokens] for tokens in completions],
        }

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Packs weights into buffers and keeps the last :data:`PACKED_BUFFERS` alive."""
        in_flight: deque[torch.Tensor] = deque(maxlen=PACKED_BUFFERS)
        waiting = 0
        for _, tensor in named_params:
            waiting += tensor.numel() * tensor.element_size()
            if waiting > PACKED_BUFFER_BYTES:
                waiting = _send(in_flight, waiting)
        if waiting:
            _send(in_flight, waiting)


def _completion(prompt: list[int], max_tokens: int, number: int) -> list[int]:
    return [prompt[-1]] * max(1, max_tokens - (number > 0))


def _send(in_flight: deque[torch.Tensor], size_bytes: int) -> int:
    """Allocates a buffer, after freeing the oldest one if all are in use; returns 0, the bytes that still wait."""
    if len(in_flight) == PACKED_BUFFERS:
        in_flight.popleft()
    in_flight.append(torch.empty(size_bytes, dtype=torch.uint8))
    return 0
