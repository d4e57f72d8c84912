"""The environment of a training process: what it sees of this machine, and how its allocator is set."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence

from autotrain_mem.allocator.settings import (
    environment_setting,
    variable_that_counts,
)
from autotrain_mem.machine.detect import ORDER, VISIBLE, numbers_in_pci_order
from autotrain_mem.parallel.config import accelerate_config
from autotrain_mem.parallel.launch_environment import launch_environment, rank_environment
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import MIB
from autotrain_mem.training.task import Request
from autotrain_mem.types import Hardware, Knobs

PORT, ADDRESS, THREADS = "MASTER_PORT", "127.0.0.1", "OMP_NUM_THREADS"
NO_CARD = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
"""Hides all cards; HIP takes an empty text for one that is not set (``worker.client.HIDDEN_CUDA``)."""
MMAP_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
MMAP_FROM_BYTES = MIB
"""On the CPU, tensors from this size on go back to the system when they are freed. Left alone, glibc moves that border
up to 32 MiB (``mallopt(3)``, M_MMAP_THRESHOLD) and keeps what is freed below, with gaps: two SFT steps of 146 M
parameters in float32, 2 rows of 256 tokens, held 2691 MiB beyond the imports where a rehearsal predicts 2364; with this
they held 2385, and with rows of 128 tokens 2497 for a predicted 2487 (anonymous pages, torch 2.13, glibc, November
2026). The kernel clears such pages anew: 7 % more CPU time there, a sixth in a few wide layers with few rows."""


def process_environment(
    device: Hardware, knobs: Knobs, environment: Mapping[str, str], *, simulate: bool
) -> dict[str, str]:
    """Lists the variables that are set for the training process.

    As many cards as there are processes, since transformers would split a process's batches over all that it sees; or
    none, and then OpenMP threads that sleep while they wait: by default they spin, and where cores are shared a step of
    a small model takes 20 times longer. Several processes share the cores: ``accelerate launch`` leaves each of them
    one (``torch/distributed/run.py: config_from_args``), which an optimizer on the host would be slow with.

    Args:
        environment: What the job's ``env:`` block sets, over this process's own environment.
    """
    if knobs.processes > 1:
        here = min(knobs.processes, max(1, device.topology.devices))
        threads = os.environ.get(THREADS, str(max(1, (os.cpu_count() or 1) // here)))
        environment = {THREADS: threads, **environment}
    if simulate or device.uuid is None:
        ours = {"OMP_WAIT_POLICY": "PASSIVE"} | ({} if simulate else {MMAP_VARIABLE: str(MMAP_FROM_BYTES)})
        without_card = {name: os.environ.get(name, setting) for name, setting in ours.items()}
        return {**without_card, **environment, **NO_CARD, "DS_ACCELERATOR": "cpu"}
    setting = environment_setting(environment, grows=knobs.expandable_segments)
    variable = variable_that_counts({**os.environ, **environment})
    allocator = {variable: setting} if knobs.expandable_segments else {}
    # In the order of the ranks of this machine.
    uuids = device.topology.uuids[: knobs.processes] if knobs.processes > 1 else (device.uuid,)
    return {**environment, **allocator, **seen_cards(uuids)}


def seen_cards(uuids: Sequence[str]) -> dict[str, str]:
    """Returns the variables by which a process sees these cards alone, in this order.

    By number where that is sure: vLLM, which TRL or a user's reward may start in the process, calls ``int`` on each
    name (``vllm/platforms/interface.py: Platform.device_id_to_physical_device_id``; vllm issues 13815 and 41848).
    """
    numbers = numbers_in_pci_order(uuids)
    return {VISIBLE: ",".join(uuids)} if numbers is None else {VISIBLE: ",".join(numbers), ORDER: "PCI_BUS_ID"}


# -- several processes -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def meeting_port(request: Request, environment: Mapping[str, str], *, several_machines: bool) -> Iterator[int]:
    """Yields the rendezvous port of this machine: the user's, else a free one; 0 where none is needed.

    It is bound and not listened at meanwhile, so that the system gives it to nobody else, and the first rank may listen
    there seconds later: both sides set ``SO_REUSEADDR`` (socket(7); libuv's ``src/unix/tcp.c: uv__tcp_bind`` for
    torch's store).

    Args:
        several_machines: They meet at the port that is named, so that it is not for the ranks.

    Raises:
        UsageError: the port that the user named is taken, or is none.
    """
    if not request.knobs.has_group:
        yield 0
        return
    named = str((request.job.accelerate or {}).get("main_process_port") or "")
    named = "" if several_machines else {**os.environ, **environment}.get(PORT, named)
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("", int(named or 0)))
        except (OSError, ValueError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no number of a port"
            raise UsageError(
                f"The processes cannot meet at {PORT}={named}: {reason}.",
                hint=f"Unset {PORT} (main_process_port in --accelerate_config), and a free port is found; or name "
                "another.",
            ) from error
        yield int(held.getsockname()[1])


def rank_environments(
    request: Request, environment: Mapping[str, str], port: int, address: str = ADDRESS
) -> list[dict[str, str]]:
    """Lists the variables of each process, over ``environment``: those that ``accelerate launch`` would set.

    Args:
        port: At which they meet.
        address: Of this machine, as all of them can reach it.
    """
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
    """Lists the variables that make all processes of a run one run of Weights & Biases.

    It else begins another with each (its guide to resuming: a run's id with ``allow`` begins it, or goes on with it).
    Empty where the user says so himself.

    Args:
        number: The run's own, of letters and digits.
        environment: As of :func:`process_environment`.
    """
    ours = {"WANDB_RUN_ID": number, "WANDB_RESUME": "allow"}
    return {} if ours.keys() & {**os.environ, **environment}.keys() else ours
