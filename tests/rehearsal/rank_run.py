"""Trains one small job in several processes that talk through gloo, each recorded as a rehearsal is."""

import json
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from real_run import Case, trained

from autotrain_mem.parallel.config import accelerate_config
from autotrain_mem.parallel.launch_environment import launch_environment, rank_environment
from autotrain_mem.support import codec
from autotrain_mem.support.codec import from_json
from autotrain_mem.types import Phase, Trace

SECONDS = 120
"""For all ranks of a case; each takes a few."""


def trained_by_ranks(one: Case, folder: Path) -> list[Trace]:
    """The traces of all ranks of a case, forked off this process; an AssertionError holds what they printed."""
    launched = launch_environment(accelerate_config(one.knobs))
    forked(_train, one.knobs.processes, folder, launched, one)
    return [from_json(Trace, json.loads((folder / f"{rank}.json").read_text())) for rank in range(one.knobs.processes)]


def _train(rank: int, folder: Path, one: Case) -> None:
    trace, _ = trained(one, folder / f"out{rank}")
    (folder / f"{rank}.json").write_text(json.dumps(codec.to_json(trace)))


def forked(run: Callable[..., None], processes: int, folder: Path, environment: Mapping[str, str], *args: Any) -> None:
    """Runs ``run(rank, folder, *args)`` in several processes; an AssertionError holds what they printed."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start(rank: int) -> None:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        sys.stdout = sys.stderr = os.fdopen(log, "w")
        os.environ |= {**environment, **rank_environment(rank, processes, address="127.0.0.1", port=port)}
        torch.set_num_threads(1)
        code = 0
        try:
            run(rank, folder, *args)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)

    ranks = [multiprocessing.get_context("fork").Process(target=start, args=(rank,)) for rank in range(processes)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(SECONDS)
        each.kill()
    logs = "".join((folder / f"{rank}.log").read_text() for rank in range(processes))
    assert all(each.exitcode == 0 for each in ranks), logs[-6000:]


def assert_births_in_order(fake: Trace, real: Trace, above_bytes: int) -> None:
    made, really_made = ([move for move in moves_in_order(trace, above_bytes) if move[1] > 0] for trace in (fake, real))
    assert made == really_made


def moves_in_order(trace: Trace, above_bytes: int) -> list[tuple[str, int, int]]:
    """Phase, bytes (negative for a death) and stream of every block above a size, in order.

    Deaths that follow each other, with no birth between, stand by size: autograd frees a node's tensors in any order.
    Saving is left out: the ranks that really train here save nothing.
    """
    order: list[tuple[str, int, int]] = []
    deaths: list[tuple[str, int, int]] = []
    for phase, sign, block in trace.walk():
        if block.size_bytes <= above_bytes or phase is Phase.SAVE:
            continue
        if sign < 0:
            deaths.append((phase.value, -block.size_bytes, block.stream))
            continue
        order += [*sorted(deaths), (phase.value, block.size_bytes, block.stream)]
        deaths = []
    return order + sorted(deaths)
