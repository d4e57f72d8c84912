"""Says what to know of a plan for several machines beside what it says for one."""

from __future__ import annotations

from collections.abc import Iterator

from autotrain_mem.settings.knobs import ROWS, STEPS
from autotrain_mem.types import Job, Knobs, Topology

NOT_MODELLED = (
    "not modelled: a machine that is slower than the others, for which all wait in every step; a network that others "
    "use too; and how the latency of collectives grows: each weighs more the more machines there are"
)


def machine_warnings(job: Job, knobs: Knobs, topology: Topology) -> Iterator[str]:
    """Says what is not modelled of several machines, and what TRL's default makes of the effective batch."""
    if topology.nodes == 1:
        return
    yield NOT_MODELLED
    if job.effective_batch_size is None and not {ROWS, STEPS} & job.arguments.keys():
        rows, least = job.method_facts.rows(knobs.effective_batch_size), knobs.processes
        yield (
            f"{rows} in each optimizer step: with no --effective_batch_size given, TRL's "
            f"default is taken on each of {knobs.processes:,} GPUs, and the learning rate is not adapted to it; "
            f"--effective_batch_size takes multiples of {least}"
        )
