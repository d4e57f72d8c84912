"""The environment of a training process: what it sees of this machine, and how its allocator is set."""

from __future__ import annotations

import os
from collections.abc import Mapping

from autotrain_mem.allocator.settings import (
    NEWER_VARIABLE,
    OLDER_VARIABLE,
    AllocatorSettings,
    given_settings,
    parse_settings,
    variable_that_counts,
)
from autotrain_mem.errors import UsageError
from autotrain_mem.spec import Hardware, Knobs
from autotrain_mem.units import MIB

MMAP_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
MMAP_FROM_BYTES = MIB
"""On the CPU, tensors from this size on go back to the system when they are freed. Left alone, glibc moves that border
up to 32 MiB (``mallopt(3)``, M_MMAP_THRESHOLD) and keeps what is freed below, with gaps: two SFT steps of 146 M
parameters in float32, 2 rows of 256 tokens, held 2691 MiB beyond the imports where a rehearsal predicts 2364; with this
they held 2385, and with rows of 128 tokens 2497 for a predicted 2487 (anonymous pages, torch 2.13, glibc, November
2026). The kernel clears such pages anew: 7 % more CPU time there, a sixth in a few wide layers with few rows."""


def environment_settings(environment: Mapping[str, str]) -> AllocatorSettings:
    """The settings, of this process's environment and what a job's ``env:`` block sets over it.

    Raises:
        UsageError: torch would refuse them, or they name another allocator.
    """
    text = environment_setting(environment)
    try:
        return parse_settings(text)
    except ValueError as error:
        raise UsageError(
            f"The allocator is set to {text!r} by the environment, which cannot be planned with: {error}.",
            hint=f"Correct or unset {NEWER_VARIABLE} (or {OLDER_VARIABLE}), in the shell or in the recipe's env block.",
        ) from error


def environment_setting(environment: Mapping[str, str], *, expandable_segments: bool = False) -> str:
    """Their text, with expandable segments beside what the user set.

    Of a setting that is named twice the last counts (torch: ``c10/core/AllocatorConfig.cpp: parseArgs``).
    """
    given = given_settings({**os.environ, **environment})
    added = "expandable_segments:True" if expandable_segments else ""
    return ",".join(filter(None, (given, added)))


def process_environment(
    device: Hardware, knobs: Knobs, environment: Mapping[str, str], *, simulate: bool
) -> dict[str, str]:
    """List the variables that are set for the training process.

    One card, since transformers would split each batch over several; or none, and then OpenMP threads that sleep while
    they wait: by default they spin, and where cores are shared a step of a small model takes 20 times longer.

    Args:
        environment: What the job's ``env:`` block sets, over this process's own environment.
    """
    if simulate or device.uuid is None:
        ours = {"OMP_WAIT_POLICY": "PASSIVE"} | ({} if simulate else {MMAP_VARIABLE: str(MMAP_FROM_BYTES)})
        without_card = {name: os.environ.get(name, setting) for name, setting in ours.items()}
        return {**without_card, **environment, "CUDA_VISIBLE_DEVICES": ""}
    setting = environment_setting(environment, expandable_segments=knobs.expandable_segments)
    variable = variable_that_counts({**os.environ, **environment})
    allocator = {variable: setting} if knobs.expandable_segments else {}
    return {**environment, **allocator, "CUDA_VISIBLE_DEVICES": device.uuid}


def one_tracked_run(number: str, environment: Mapping[str, str]) -> dict[str, str]:
    """List the variables that make all processes of a run one run of Weights & Biases.

    It else begins another with each (its guide to resuming: a run's id with ``allow`` begins it, or goes on with it).
    Empty where the user says so himself.

    Args:
        number: The run's own, of letters and digits.
        environment: As of :func:`process_environment`.
    """
    ours = {"WANDB_RUN_ID": number, "WANDB_RESUME": "allow"}
    return {} if ours.keys() & {**os.environ, **environment}.keys() else ours
