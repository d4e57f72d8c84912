"""Checks a job before the first rehearsal, and the host memory and disk that its plan needs."""

import pathlib
from dataclasses import dataclass, replace
from typing import Any

from autotrain_mem.machine.host_requirements import Load, room_findings
from autotrain_mem.planning.kept_answers import answered
from autotrain_mem.planning.output_dir import output_dir
from autotrain_mem.planning.rehearsals import Lengths, OnCounting, Rehearsals, reads_dataset, stream_lengths
from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.settings.levers import OFFLOADING
from autotrain_mem.settings.own import OFFLOADED
from autotrain_mem.support.errors import DatasetNotFoundError
from autotrain_mem.types import Estimate, Job
from autotrain_mem.types.findings import Finding, Preflight, settle

_OUT_OF_REACH = DatasetNotFoundError.__name__


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Holds the result of a job that passed all checks."""

    warnings: tuple[Finding, ...]
    result: Preflight
    trains_on_cpu: bool | None
    """Whether the run trains on the CPU; None if nothing is trained here."""


def check_preflight(
    rehearsals: Rehearsals, *, to_train: bool = False, simulate: bool = False, reads_data: bool = True
) -> Checked:
    """Checks model, tokenizer and data in a worker. Raises all errors as one (``types.findings.settle``).

    Args:
        to_train: Whether to check the output folder and host memory, too.
        simulate: Whether the run uses the CPU, as a simulated card.
        reads_data: Whether planning needs the data.
    """
    job, on_cpu = rehearsals.job, simulate or rehearsals.hardware.origin == "cpu"
    capability = rehearsals.hardware.capability
    facts = {"to_train": to_train, "on_cpu": on_cpu, "reads_data": reads_data}

    def has_no_error(result: Preflight) -> bool:
        return not any(finding.kind == "error" or finding.error == _OUT_OF_REACH for finding in result.findings)

    words, store = {"compute_capability": capability, **facts}, rehearsals.store
    result = answered(
        store,
        job,
        "preflight",
        words,
        Preflight,
        lambda: rehearsals.workers.first.preflight(job, capability, **facts),
        reads_data=reads_data,
        keeps=has_no_error,  # an error of the network may not recur
    )
    return Checked(warnings=settle(result.findings), result=result, trains_on_cpu=on_cpu if to_train else None)


def examine(
    rehearsals: Rehearsals, on_counting: OnCounting, *, to_train: bool = False, simulate: bool = False
) -> tuple[Checked, Lengths]:
    """Checks the job and measures its rows. Raises as :func:`check_preflight` and ``Rehearsals.count_lengths`` do."""
    job = rehearsals.job
    reads, unread = reads_dataset(job, to_train=to_train), stream_lengths(job)
    checked = check_preflight(rehearsals, to_train=to_train, simulate=simulate, reads_data=reads)
    if reads and not any(finding.error == _OUT_OF_REACH for finding in checked.warnings):
        return checked, replace(rehearsals.count_lengths(on_counting), rows=checked.result.rows)
    return checked, unread


def check_room(
    checked: Checked, rehearsals: Rehearsals, planned: Estimate, optimizer_steps: int | None
) -> tuple[Finding, ...]:
    """Returns all warnings for a plan. Raises AutofitError if this machine lacks memory or disk for it."""
    if checked.trains_on_cpu is None or checked.result.parameters is None:
        return checked.warnings
    load = load_of(
        rehearsals.job,
        planned,
        parameters=checked.result.parameters,
        on_cpu=checked.trains_on_cpu,
        optimizer_steps=optimizer_steps,
        download=checked.result.download,
    )
    return settle((*checked.warnings, *room_findings(load)))


def load_of(job: Job, planned: Estimate, *, parameters: int, on_cpu: bool = False, **of_run: Any) -> Load:
    """Returns what a plan needs of this machine besides its card; ``of_run``: further fields of :class:`Load`."""
    names = ("use_peft", "dtype", "sharding", *OFFLOADED, *OFFLOADING, *BASE_BITS)
    decided = {name: getattr(planned.knobs, name) for name in names}
    return Load(
        job=replace(job, arguments={**job.arguments, **decided}),
        parameters=parameters,
        on_cpu=on_cpu,
        output_dir=pathlib.Path(output_dir(job)),
        memory=planned.memory,
        processes=planned.hardware.topology.devices,
        **of_run,
    )
