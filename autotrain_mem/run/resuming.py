"""Refuses, within a second, a checkpoint that the training which is asked for cannot go on with. Light to import."""

from __future__ import annotations

import contextlib
from pathlib import Path

from autotrain_mem.planning.output_dir import RESUME
from autotrain_mem.planning.wish import Wish
from autotrain_mem.settings.knobs import alone_too
from autotrain_mem.support.errors import OutputFolderError, PlanFileError, UsageError
from autotrain_mem.training.checkpoint_kinds import Resumer, as_it_was_begun, why_not
from autotrain_mem.training.checkpoints import check_order, newest_first, why_torn
from autotrain_mem.types import Plan


def check_checkpoint(wish: Wish) -> None:
    """Look at what a wish would go on with, as far as flags and the run's own plan say how the model is shared.

    Where they leave it open, the plan that is made is looked at (``run.supervised``).

    Raises:
        OutputFolderError: none of the checkpoints that it may mean can be read by so many ranks in this way, or the
            newest was trained with another seed.
        UsageError: so many GPUs do not divide the run's effective batch.
    """
    plan = _plan(wish)
    if plan is not None:
        rows, processes = plan.knobs.effective_batch_size, _processes(wish, plan)
        if processes is not None and rows % processes:
            fitting = [count for count in range(1, rows + 1) if rows % count == 0]
            nearest = sorted(fitting, key=lambda count: abs(count - processes))[:2]
            raise UsageError(
                f"{processes} GPUs do not divide the run's effective batch of {rows} rows, which stays as it was.",
                hint=f"Go on with --gpus {' or '.join(map(str, sorted(nearest)))}.",
            )
    resumer = _resumer(wish, plan)
    checkpoints = list(_checkpoints(wish))
    if checkpoints and not wish.argument("ignore_data_skip"):  # the rows themselves are looked at once they are loaded
        said = {f"--{name}": wish.argument(name) for name in ("seed", "data_seed")}
        check_order(checkpoints[0], {name: str(value) for name, value in said.items() if value is not None})
    if resumer is None or not checkpoints:
        return
    refused = {checkpoint: why_not(checkpoint, resumer) for checkpoint in checkpoints}
    if all(refused.values()):
        checkpoint, why = next(iter(refused.items()))
        raise OutputFolderError(f"Cannot go on with {checkpoint}: {why}.", hint=as_it_was_begun(checkpoint))


def _plan(wish: Wish) -> Plan | None:
    """The plan that is followed; None where one is made."""
    given = wish.plan or wish.autofit.plan or wish.folder
    with contextlib.suppress(PlanFileError):  # told where it is read to be followed
        return given if given is None or isinstance(given, Plan) else Plan.load(given)
    return None


def _processes(wish: Wish, plan: Plan | None) -> int | None:
    counts, topology = wish.autofit.gpu_counts, None if plan is None else plan.estimate.hardware.topology
    devices = counts[0] if len(counts) == 1 else None if topology is None else topology.devices
    nodes = wish.autofit.nodes or (1 if topology is None else topology.nodes)
    return None if devices is None else devices * nodes


def _resumer(wish: Wish, plan: Plan | None) -> Resumer | None:
    processes = _processes(wish, plan)
    if processes is None or wish.autofit.accelerate_config is not None:
        return None
    planned = None if plan is None else alone_too(plan.knobs.sharding, processes)
    sharding = wish.autofit.sharding or planned
    if sharding is None and processes > 1:
        return None if plan is None else Resumer(sharding="ddp", processes=processes, optim=plan.knobs.optim)
    return Resumer(sharding=sharding, processes=processes, optim=None if plan is None else plan.knobs.optim)


def _checkpoints(wish: Wish) -> list[Path]:
    """Those that may be meant, newest first; which of them are this run's is looked at later."""
    named = wish.argument(RESUME)
    if named not in (True, "true", "True"):
        return [Path(str(named))] if Path(str(named)).is_dir() else []
    found = [] if wish.folder is None else newest_first(Path(wish.folder))
    return [each.path for each in found if not why_torn(each.path)]
