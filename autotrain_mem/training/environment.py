"""Builds the environment of a training process: visible devices, allocator settings, and the rendezvous port."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence

from autotrain_mem.allocator.settings import environment_setting, variable_that_counts
from autotrain_mem.machine.detect import ORDER, VISIBLE, numbers_in_pci_order
from autotrain_mem.parallel.config import accelerate_config
from autotrain_mem.parallel.launch_environment import launch_environment, rank_environment
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.host import cores
from autotrain_mem.support.units import MIB
from autotrain_mem.training.task import Request
from autotrain_mem.types import Hardware, Knobs

PORT, ADDRESS, THREADS = "MASTER_PORT", "127.0.0.1", "OMP_NUM_THREADS"
NO_CARD = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
"""Hides all GPUs; HIP treats an empty value as unset (``worker.client.HIDDEN_CUDA``)."""
MMAP_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
MMAP_FROM_BYTES = MIB
"""On the CPU, tensors of at least this size are returned to the system when freed. By default glibc raises this
threshold up to 32 MiB (``mallopt(3)``, M_MMAP_THRESHOLD) and keeps smaller blocks. Two SFT steps (146 M parameters in
float32, 2 rows of 256 tokens) then held 2691 MiB beyond the imports, and 2385 MiB with this setting; 2364 MiB were
predicted (anonymous pages, torch 2.13, glibc, 2026-11). The kernel zeroes returned pages again: 7 % more CPU time."""


def process_environment(
    device: Hardware, knobs: Knobs, environment: Mapping[str, str], *, simulate: bool
) -> dict[str, str]:
    """Returns the variables to set for the training process, including ``environment``, the job's ``env:`` block.

    Only as many GPUs as there are ranks are visible, since transformers splits a process's batches over all visible
    GPUs. Without a GPU, OpenMP threads sleep while they wait: by default they spin, and on shared cores a step of a
    small model takes 20 times longer. Several processes divide the cores. ``accelerate launch`` gives every process
    a single thread (``torch/distributed/run.py: config_from_args``), which makes an optimizer on the host slow.
    """
    if knobs.processes > 1:
        here = min(knobs.processes, max(1, device.topology.devices))
        threads = os.environ.get(THREADS, str(max(1, cores() // here)))
        environment = {THREADS: threads, **environment}
    if simulate or device.uuid is None:
        ours = {"OMP_WAIT_POLICY": "PASSIVE"} | ({} if simulate else {MMAP_VARIABLE: str(MMAP_FROM_BYTES)})
        without_card = {name: os.environ.get(name, setting) for name, setting in ours.items()}
        return {**without_card, **environment, **NO_CARD, "DS_ACCELERATOR": "cpu"}
    setting = environment_setting(environment, grows=knobs.expandable_segments)
    variable = variable_that_counts({**os.environ, **environment})
    allocator = {variable: setting} if knobs.expandable_segments else {}
    uuids = device.topology.uuids[: knobs.processes] if knobs.processes > 1 else (device.uuid,)
    return {**environment, **allocator, **seen_cards(uuids)}


def seen_cards(uuids: Sequence[str]) -> dict[str, str]:
    """Returns the variables that make only these GPUs visible, in this order. GPUs are named by number if certain.

    vLLM, which TRL or a user's reward function may start in the process, calls ``int`` on each of these names
    (``vllm/platforms/interface.py: Platform.device_id_to_physical_device_id``; vllm issues 13815 and 41848).
    """
    numbers = numbers_in_pci_order(uuids)
    return {VISIBLE: ",".join(uuids)} if numbers is None else {VISIBLE: ",".join(numbers), ORDER: "PCI_BUS_ID"}


@contextlib.contextmanager
def meeting_port(request: Request, environment: Mapping[str, str], machines_port: int | None = None) -> Iterator[int]:
    """Yields this machine's rendezvous port: the user's, else a free one; 0 if none is needed.

    The port stays bound within the block, so that the system gives it to no other process. Rank 0 can still listen on
    it, because both sides set ``SO_REUSEADDR`` (socket(7); libuv's ``src/unix/tcp.c: uv__tcp_bind`` for torch's store).
    Raises UsageError if the user's port is taken, or is not a port number.

    ``machines_port``: where several machines join, as accelerate's config says. If a launcher sets MASTER_PORT to it,
    that is not the ranks' port.
    """
    if not request.knobs.has_group:
        yield 0
        return
    configured = {} if machines_port is not None else request.job.accelerate or {}
    named = {**os.environ, **environment}.get(PORT, str(configured.get("main_process_port") or ""))
    named = "" if named == str(machines_port) else named
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("", int(named or 0)))
        except (OSError, ValueError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a port number"
            raise UsageError(
                f"The processes cannot meet at {PORT}={named}: {reason}.",
                hint=f"Unset {PORT} (main_process_port in --accelerate_config) to use a free port, or set it to "
                "another.",
            ) from error
        yield int(held.getsockname()[1])


def rank_environments(
    request: Request, environment: Mapping[str, str], port: int, address: str = ADDRESS
) -> list[dict[str, str]]:
    """Returns each process's variables: ``environment``, and those that ``accelerate launch`` would set."""
    job, knobs = request.job, request.knobs
    if not knobs.has_group:
        return [dict(environment)]
    settings = {**job.arguments, "fp16": knobs.fp16 or job.arguments.get("fp16")}
    precision = "fp16" if settings["fp16"] else "no" if settings.get("bf16") is False else "bf16"
    attention = job.arguments.get("attn_implementation")
    config = job.accelerate or accelerate_config(knobs, mixed_precision=precision, attention=attention)
    common = {**environment, **launch_environment(config)}
    local = request.processes_here
    return [
        common | rank_environment(rank, knobs.processes, address=address, port=port, local_processes=local)
        for rank in range(knobs.processes)
    ]


def one_tracked_run(number: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that make all processes of a run one Weights & Biases run; empty if the user sets any
    of them. With ``WANDB_RESUME=allow``, a run id starts or continues that run (W&B's guide to resuming)."""
    ours = {"WANDB_RUN_ID": number, "WANDB_RESUME": "allow"}
    return {} if ours.keys() & {**os.environ, **environment}.keys() else ours
