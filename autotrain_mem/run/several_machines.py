"""Trains on several machines: tells which one this is, and has it lead the others or follow the first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotrain_mem.parallel.place import FLAGS, how_to_start, place_of
from autotrain_mem.planning.output_dir import RESUME
from autotrain_mem.planning.wish import Wish
from autotrain_mem.support.errors import UsageError

if TYPE_CHECKING:
    from autotrain_mem.training.machines.lead import Machines

Say = Callable[[str], None]


def placed(wish: Wish, environment: Mapping[str, str] = os.environ) -> Wish:
    """Returns the wish with this machine's place, by flags, by a config of accelerate's, or by a launcher.

    Raises:
        UsageError: several machines are asked for, and nothing says which of them this is; flags that contradict each
            other.
    """
    config = wish.accelerate or {}
    given: dict[str, Any] = {name: getattr(wish, name) for name in FLAGS}
    if (wish.autofit.nodes or 1) > 1:
        given = {name: config.get(name) if value is None else value for name, value in given.items()}
        if given["main_process_ip"] is None and wish.machine_rank is None:
            given = {}  # of a config that leaves it to the launcher
    place = place_of(wish.autofit.nodes, given, environment)
    nodes = wish.autofit.nodes or 1
    if place is None and nodes > 1:
        raise UsageError(f"--nodes {nodes}, and nothing says which of them this machine is.", hint=how_to_start(nodes))
    if wish.min_nodes is not None and not 1 <= wish.min_nodes <= (1 if place is None else place.machines):
        raise UsageError(
            f"--min_nodes {wish.min_nodes} is no number of the machines that train, of which there are "
            f"{1 if place is None else place.machines}.",
            hint="It says with how many the training may go on where others are lost: 1 to --nodes.",
        )
    if place is None:
        return wish
    return replace(wish, place=place, autofit=replace(wish.autofit, nodes=place.machines))


def shared_words(argv: Sequence[str]) -> tuple[str, ...]:
    """Leaves out what differs from machine to machine.

    >>> shared_words(["--nodes", "2", "--machine-rank", "1", "--main_process_ip=10.0.0.1", "--bf16"])
    ('--nodes', '2', '--bf16')
    """
    kept: list[str] = []
    skips = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if skips:
            skips = False
        elif name.startswith("--") and name[2:].replace("-", "_") in FLAGS:
            skips = not equals
        else:
            kept.append(word)
    return tuple(kept)


def follows(wish: Wish) -> bool:
    """Whether another machine leads."""
    return wish.place is not None and wish.place.rank > 0


def follow_first(wish: Wish, say: Say) -> None:
    """Takes part until the first machine says that the training has ended; raises what ended it.

    Raises:
        UsageError: the CPU is asked for.
        NoGpuError, UnknownGpuError, UnreadableGpuError: this machine has not what is asked for.
        AutofitError: as ``training.machines.follow.follow``.
    """
    place = wish.place
    assert place is not None
    if wish.argument("use_cpu"):
        raise UsageError("--use_cpu trains in one process, on one machine.", hint="Remove --use_cpu, or --nodes.")
    from autotrain_mem.machine.choose import choose, training_device
    from autotrain_mem.training.machines.follow import follow

    counts = wish.autofit.gpu_counts
    environment, gpus = wish.environment, counts[0] if counts else None
    card = choose(wish.autofit.gpu, use_cpu=False, gpus=gpus, environment=environment, measures=False)
    hardware = training_device(card, simulate=wish.simulate, environment=environment)
    if wish.autofit.plan is not None and not wish.argument("output_dir"):
        from autotrain_mem.planning.request import PlanHints, with_plan

        wish = with_plan(wish, PlanHints(other_method="", objects=""), say, to_train=True)
    follow(place, wish.command, Path(wish.folder or ""), hardware, real=not wish.simulate, say=say)


@contextlib.contextmanager
def leading(wish: Wish, say: Say) -> Iterator[Machines | None]:
    """Yields the other machines, which are told how the block ended; None where one machine trains.

    Raises:
        UsageError: their port cannot be listened at.
        OutputFolderError: their key cannot be written.
    """
    if wish.place is None:
        yield None
        return
    from autotrain_mem.training.machines.lead import leading as leads

    folder = Path(wish.folder or "")
    with leads(wish.place, wish.command, folder, min_nodes=wish.min_nodes, say=say) as machines:
        yield machines


def again(wish: Wish, say: Say) -> Wish:
    """Returns the wish to go on, where the same command of several machines has left a run in its folder.

    Whoever starts machines, such as Slurm and Kubernetes, starts the same command again where one was lost.
    """
    if wish.place is None or wish.place.rank or wish.argument(RESUME) or wish.overwrite_output_dir:
        return wish
    from autotrain_mem.training.run_folder import is_left_by

    folder = wish.folder
    if not folder or not is_left_by(folder, wish.command):
        return wish
    say(f"The same command began a run in {folder}, which has not ended: going on with it")
    return replace(wish, config={**wish.config, RESUME: True})
