"""What goes wrong with one of two simulated ranks, at 10 random moments each, under DDP and under FSDP2 in turn.

Losses are held against those of the undisturbed run, as in ``survival_cases/faults.py``; without bf16 here, in which
FSDP2 logs them. Nothing may be left over: every rank holds the lock on the output folder until it has ended.
"""

from __future__ import annotations

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
"""Of all runs: a rank that is stopped is waited for so many seconds."""
BOUND_SECONDS = 240.0
"""Of a whole command, planning included, whose ranks start twice and wait once."""


def undisturbed(workers: api.Workers, place: pathlib.Path, kept: Kept) -> dict[str, faults.Undisturbed]:
    """By sharding: 12 steps of 8 rows, a checkpoint every 4."""
    kind = f"{faults.SHARED} --dataset short_text --effective_batch_size 8 --bf16 false --gpus 2".split()
    commands = {sharding: ["sft", *kind, *WAIT, "--sharding", sharding] for sharding in SHARDINGS}
    return faults.undisturbed(workers, place, kept, commands)


def cases(quiet: Mapping[str, faults.Undisturbed]) -> list[faults.Case]:
    """50: each rank in turn; a disk is full for the first, which alone writes the file where it breaks off."""
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
    """One case, with the plan of the undisturbed run."""
    row, ended = faults.run(case, quiet, place, "sft", WAIT)
    if is_left_over(ended.folder):
        row["outcome"] = "left over"
    elif ended.seconds > BOUND_SECONDS:
        row["outcome"] = "too late"
    return row


def is_left_over(folder: pathlib.Path) -> bool:
    """Whether a process of a run that has ended is still there."""
    try:
        with lock_folder(str(folder)):
            return False
    except OutputFolderError:
        return True
