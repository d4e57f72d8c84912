"""Trains on several machines: determines this machine's place, and lets it lead the others or follow the first."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotrain_mem.parallel.place import FLAGS, how_to_start, place_of
from autotrain_mem.planning.output_dir import RESUME
from autotrain_mem.planning.run_request import RunRequest
from autotrain_mem.support.errors import UsageError

if TYPE_CHECKING:
    from autotrain_mem.training.machines.lead import Machines, Say


def placed(request: RunRequest, environment: Mapping[str, str] = os.environ) -> RunRequest:
    """Returns the request with this machine's place, from flags, an accelerate config, or a launcher's variables.
    Raises UsageError if this machine's rank is unknown, or flags contradict each other."""
    config = request.accelerate or {}
    given: dict[str, Any] = {name: getattr(request, name) for name in FLAGS}
    if (request.autofit.nodes or 1) > 1:
        given = {name: config.get(name) if value is None else value for name, value in given.items()}
        if given["main_process_ip"] is None and request.machine_rank is None:
            given = {}  # the config leaves it to the launcher
    place = place_of(request.autofit.nodes, given, environment)
    nodes = request.autofit.nodes or 1
    if place is None and nodes > 1:
        raise UsageError(f"--nodes {nodes}: no flag or launcher gives this machine's rank.", hint=how_to_start(nodes))
    if request.min_nodes is not None and not 1 <= request.min_nodes <= (1 if place is None else place.machines):
        raise UsageError(
            f"--min_nodes {request.min_nodes} is not between 1 and the number of machines, "
            f"{1 if place is None else place.machines}.",
            hint="It is the fewest machines with which training continues when others are lost: 1 to --nodes.",
        )
    if place is None:
        return request
    return replace(request, place=place, autofit=replace(request.autofit, nodes=place.machines))


def without_flags(argv: Sequence[str], names: Collection[str] = FLAGS) -> tuple[str, ...]:
    """Drops flags with their values; by default those that differ from machine to machine.

    >>> without_flags(["--nodes", "2", "--machine-rank", "1", "--main_process_ip=10.0.0.1", "--bf16"])
    ('--nodes', '2', '--bf16')
    """
    kept: list[str] = []
    skips = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if skips:
            skips = False
        elif name.startswith("--") and name[2:].replace("-", "_") in names:
            skips = not equals
        else:
            kept.append(word)
    return tuple(kept)


def follows(request: RunRequest) -> bool:
    """Returns whether another machine leads."""
    return request.place is not None and request.place.rank > 0


def follow_first(request: RunRequest, say: Say) -> None:
    """Takes part in the training until the leading machine reports its end; raises the error that ended it. Raises
    UsageError if the CPU is requested, NoGpuError, UnknownGpuError or UnreadableGpuError if this machine lacks what is
    requested, and the errors of ``training.machines.follow.follow``."""
    place = request.place
    assert place is not None
    if request.argument("use_cpu"):
        raise UsageError("--use_cpu trains in one process, on one machine.", hint="Remove --use_cpu, or --nodes.")
    from autotrain_mem.machine.choose import choose, training_device
    from autotrain_mem.training.machines.follow import follow

    counts = request.autofit.gpu_counts
    environment, gpus = request.environment, counts[0] if counts else None
    card = choose(request.autofit.gpu, use_cpu=False, gpus=gpus, environment=environment)
    hardware = training_device(card, simulate=request.simulate, environment=environment)
    if request.autofit.plan is not None and not request.argument("output_dir"):
        from autotrain_mem.planning.read_request import PlanHints, with_plan

        request = with_plan(request, PlanHints(other_method="", objects=""), say, to_train=True)
    follow(place, request.command, Path(request.folder or ""), hardware, real=not request.simulate, say=say)


def leading(request: RunRequest, say: Say) -> AbstractContextManager[Machines | None]:
    """Returns a context manager that yields the other machines, or None without any; its exit sends them the outcome.
    Raises UsageError if this machine cannot listen on the port, and OutputFolderError if the key cannot be written."""
    if request.place is None:
        return nullcontext()
    from autotrain_mem.training.machines.lead import Machines

    return Machines(request.place, request.command, Path(request.folder or ""), min_nodes=request.min_nodes, say=say)


def again(request: RunRequest, say: Say) -> RunRequest:
    """Returns the request, changed to resume if the same multi-machine command left an unfinished run in its folder.

    Schedulers, such as Slurm and Kubernetes, start the same command again when a machine was lost.
    """
    if request.place is None or request.place.rank or request.argument(RESUME) or request.overwrite_output_dir:
        return request
    from autotrain_mem.training.run_folder import is_left_by

    if not (folder := request.folder) or not is_left_by(folder, request.command):
        return request
    say(f"Resuming the unfinished run of the same command in {folder}")
    return replace(request, config={**request.config, RESUME: True})
