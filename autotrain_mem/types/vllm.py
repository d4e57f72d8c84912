"""Defines vLLM's memory on its own GPUs (VllmServer), and on the training GPUs (VllmSleep)."""

import shlex
from dataclasses import dataclass
from typing import ClassVar

from autotrain_mem.support.codec import Form
from autotrain_mem.support.units import GIB, MIB

OVERHEAD_BYTES = 3 * GIB
"""The bytes that a server holds on each card besides weights and KV cache: activations of its profile run, CUDA graphs,
NCCL. vLLM's log reports them (``vllm/v1/worker/gpu_worker.py: determine_available_memory``, ``Actual usage is``): 1.5
GiB for a model of 0.9 GiB on 16 GB, 2.1 GiB for Qwen3-8B on 24 GB, 3.05 GiB for Llama-3-8B on an H100
(https://github.com/vllm-project/vllm/pull/10511). Mixtures of experts take more, up to 7 GiB. Only advice on a card's
share uses this figure; no plan is rejected because of it."""
ASLEEP_BYTES = OVERHEAD_BYTES
"""The most bytes that an engine on one card keeps while it sleeps: CUDA graphs, workspaces, NCCL. Sleep releases only
the pool of weights and KV cache (``vllm/v1/worker/gpu_worker.py: load_model, initialize_from_config``). One log
(``Sleep mode freed``) shows 0.3 GiB kept of a share of 19.8 GiB (https://github.com/vllm-project/vllm/issues/17117).
CUDA graphs took 1.4 GiB for a model with 72 GiB per card (https://github.com/vllm-project/vllm/issues/47654)."""
ASLEEP_PARALLEL_BYTES = 7424 * MIB
"""The most bytes that a sleeping engine keeps on each of several cards: 7,392 MiB for Llama-3.2-1B on 2 cards, with the
CUDA context (https://github.com/NVIDIA-NeMo/RL/issues/223), and 6,962 to 7,121 MiB for Kimi-K2.6 on 8 cards
(https://github.com/vllm-project/vllm/issues/47654)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmServer:
    """Describes the server of ``--vllm_mode server``. All sizes are the bytes on one of its GPUs.

    Example: Qwen2.5-7B on an A100 of 40 GiB has 14.2 GiB of weights, and its KV cache takes 56 KiB per token.

    >>> from autotrain_mem import VllmServer
    >>> taken = {"total_bytes": 40 * 2**30, "weights_bytes": None, "token_bytes": 57344}
    >>> where = {"gpus": 1, "first_gpu": 1, "port": 8000, "gpu_memory_utilization": 0.9, "max_model_len": 1024}
    >>> VllmServer(model="Qwen/Qwen2.5-7B", **where, **taken).completion_bytes
    58720256
    """

    json_form: ClassVar = Form(derived={"command": "command"})

    model: str
    gpus: int
    """The number of its GPUs: its ``tensor_parallel_size``."""
    first_gpu: int | None
    """The index of its first GPU; GPUs before it are for training. None if the server runs on another machine."""
    port: int
    gpu_memory_utilization: float
    """The fraction of each GPU's memory that vLLM takes."""
    max_model_len: int | None
    """The tokens of the longest prompt with its completion; None if no prompt was counted."""
    total_bytes: int
    """The memory of one GPU."""
    weights_bytes: int | None
    """The bytes of the weights on one GPU; None if the model's config does not determine them."""
    token_bytes: int | None
    """The bytes of the KV cache for one token of a sequence; None if the config does not determine them."""

    @property
    def share_bytes(self) -> int:
        """Computes the bytes that vLLM takes on a GPU (``vllm/v1/worker/utils.py: request_memory``)."""
        return int(self.total_bytes * self.gpu_memory_utilization)

    @property
    def completion_bytes(self) -> int | None:
        """Computes the bytes of the KV cache for the longest prompt with its completion; None if unknown."""
        if self.token_bytes is None or self.max_model_len is None:
            return None
        return self.token_bytes * self.max_model_len

    @property
    def fits(self) -> bool:
        """Returns whether weights and one completion fit vLLM's share. Its other memory is not counted."""
        return (self.weights_bytes or 0) + (self.completion_bytes or 0) <= self.share_bytes

    @property
    def command(self) -> str:
        """Returns the command that starts the server (``trl/scripts/vllm_serve.py: ScriptArguments``)."""
        visible = () if self.first_gpu is None else (f"CUDA_VISIBLE_DEVICES={self.devices}",)
        length = () if self.max_model_len is None else ("--max_model_len", str(self.max_model_len))
        port = () if self.port == SERVER_PORT else ("--port", str(self.port))
        words = ("trl", "vllm-serve", "--model", self.model, "--tensor_parallel_size", str(self.gpus), *length)
        words = (*visible, *words, "--gpu_memory_utilization", str(self.gpu_memory_utilization), *port)
        return " ".join(map(shlex.quote, words))

    @property
    def devices(self) -> str:
        """Returns the indices of the server's GPUs on the training machine, as ``6,7``."""
        first = self.first_gpu or 0
        return ",".join(str(first + number) for number in range(self.gpus))


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSleep:
    """Describes an engine on the training cards that sleeps between generations. All sizes are the bytes on one card.

    >>> from autotrain_mem import VllmSleep
    >>> beside = {"reserved_awake_bytes": 9 * 2**30, "reserved_asleep_bytes": 20 * 2**30}
    >>> sleep = VllmSleep(awake_bytes=24 * 2**30, asleep_bytes=3 * 2**30, **beside)
    >>> sleep.is_decided_awake, sleep.needed_bytes // 2**30
    (True, 33)
    """

    awake_bytes: int
    """The engine's share while it is awake: while it samples completions or receives weights."""
    asleep_bytes: int
    """The most bytes of its share that the engine keeps while it sleeps."""
    reserved_awake_bytes: int
    """The most bytes that torch's allocator reserves for the trainer while the engine is awake."""
    reserved_asleep_bytes: int
    """The most bytes that torch's allocator reserves for the trainer over the whole run."""

    @property
    def is_decided_awake(self) -> bool:
        """Returns whether the card needs at least as much while the engine is awake as while it sleeps."""
        awake_bytes = self.awake_bytes + self.reserved_awake_bytes
        return awake_bytes >= self.asleep_bytes + self.reserved_asleep_bytes

    @property
    def needed_bytes(self) -> int:
        """Computes the most bytes that engine and trainer together take on the card."""
        awake_bytes = self.awake_bytes + self.reserved_awake_bytes
        return max(awake_bytes, self.asleep_bytes + self.reserved_asleep_bytes)


SERVER_PORT = 8000
SERVER_UTILIZATION = 0.9
"""Defaults of ``trl vllm-serve`` (trl/scripts/vllm_serve.py: ScriptArguments). Trainers have the same default port."""
