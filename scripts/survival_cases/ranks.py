"""Injects each fault into one of two simulated ranks at 10 random moments, under DDP and FSDP2 in turn.

Losses are compared with those of the undisturbed run, as in ``survival_cases/faults.py``. bf16 is off, since FSDP2
would log losses in it. No process may be left running: every rank holds the output folder's lock until it exits.
"""

import pathlib
from collections.abc import Mapping
from random import Random

from autotrain_mem import api
from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.training.run_folder import lock_folder
from survival_cases import faults
from survival_cases.kept import Kept, Row

MOMENTS = 10
FAULTS = ("oom:backward", "kill", "stop", "disk:save", "SIGTERM")
SHARDINGS = ("ddp", "fsdp2")
WAIT = ("--ddp_timeout", "12")
"""Flags of all runs: ranks wait 12 seconds for a stopped rank."""
BOUND_SECONDS = 240.0
"""The time limit of a whole command, including planning. Its ranks start twice, and wait once."""


def undisturbed(workers: api.Workers, place: pathlib.Path, kept: Kept) -> dict[str, faults.Undisturbed]:
    """Returns the undisturbed run for each sharding: 12 steps of 8 rows, with a checkpoint every 4."""
    kind = f"{faults.SHARED} --dataset short_text --effective_batch_size 8 --bf16 false --gpus 2".split()
    commands = {sharding: ["sft", *kind, *WAIT, "--sharding", sharding] for sharding in SHARDINGS}
    return faults.undisturbed(workers, place, kept, commands)


def cases(quiet: Mapping[str, faults.Undisturbed]) -> list[faults.Case]:
    """Returns 50 cases, for each rank in turn. Only rank 0 writes to the full disk; SIGTERM goes to the command."""
    random = Random(0)
    every = []
    for fault in FAULTS:
        for number in range(MOMENTS):
            sharding, rank = SHARDINGS[number % 2], number // 2 % 2
            mishap = faults.drawn(random, fault, quiet[sharding])
            whose = f"rank:{rank}:" if rank and fault not in ("disk:save", "SIGTERM") else ""
            every.append(faults.Case(fault=fault, number=number, kind=sharding, mishap=whose + mishap))
    return every


def run(case: faults.Case, quiet: Mapping[str, faults.Undisturbed], place: pathlib.Path) -> Row:
    """Runs one case, with the plan of the undisturbed run."""
    row, ended = faults.run(case, quiet, place, "sft", WAIT)
    if is_left_over(ended.folder):
        row["outcome"] = "left over"
    elif ended.seconds > BOUND_SECONDS:
        row["outcome"] = "too late"
    return row


def is_left_over(folder: pathlib.Path) -> bool:
    """Returns whether a process of a finished run is still running."""
    try:
        with lock_folder(str(folder)):
            return False
    except OutputFolderError:
        return True
