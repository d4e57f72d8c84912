"""Applies a plan's limits of time, cost (``--within``, ``--budget``) and this machine's host memory.

On each level of harm the fastest plan is also the cheapest, so if it exceeds a limit, every plan of the level does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autotrain_mem.machine.host_requirements import beside_the_card
from autotrain_mem.methods.interface import steps_of
from autotrain_mem.planning.preflight import load_of
from autotrain_mem.planning.rehearsals import Subject
from autotrain_mem.support.errors import LimitError, UsageError
from autotrain_mem.support.host import host_memory
from autotrain_mem.support.units import brief, duration, money
from autotrain_mem.types import Estimate, Knobs
from autotrain_mem.types.findings import Finding, settle
from autotrain_mem.types.gpu_comparison import TOO_DEAR, TOO_LITTLE_HOST, TOO_SLOW


@dataclass(kw_only=True, slots=True)
class RunLimits:
    """Implements :class:`autotrain_mem.search.search.Limits` for one job on one device."""

    subject: Subject
    host_bytes: int | None = None
    """Bytes of host memory available for what a plan offloads; None if the card is not this machine's."""
    refusals: list[str] = field(default_factory=list)

    def keeps(self, estimate: Estimate) -> bool:
        within_seconds, budget = self.subject.job.within_seconds, self.subject.job.budget
        if within_seconds is not None and self._seconds(estimate) > within_seconds:
            self.refusals.append(TOO_SLOW)
        elif budget is not None and self._cost(estimate) > budget:
            self.refusals.append(TOO_DEAR)
        elif self._lacking(estimate):
            self.refusals.append(TOO_LITTLE_HOST)
        else:
            return True
        return False

    def broken(self, fitting: Sequence[Estimate]) -> LimitError:
        """Returns the error with the fastest plan's time and cost, and the limits that this plan would meet. Raises
        HostMemoryError if host memory is too small for each of them."""
        if len(offloading := [each for each in fitting if self._lacking(each)]) == len(fitting):
            settle(self._lacking(fitting[-1]))
        fastest = min((each for each in fitting if each not in offloading), key=self._seconds)
        seconds, cost, job, price = self._seconds(fastest), self._cost(fastest), self.subject.job, self.subject.price
        steps, share = self._steps(fastest.knobs), 1.0
        wishes, flags = [], []
        if job.within_seconds is not None:
            wishes.append(f"--within {duration(job.within_seconds)}")
            if seconds > job.within_seconds:
                flags.append(f"--within {math.ceil(seconds / 60)}min")
                share = job.within_seconds / seconds
        if job.budget is not None and price is not None:
            wishes.append(f"--budget {money(job.budget, price.currency)}")
            if cost > job.budget:
                flags.append(f"--budget {math.ceil(100 * cost) / 100:g}")
                share = min(share, job.budget / cost)
        ways = [f"  {' '.join(flags)}"]
        if fewer := math.floor(steps * share):
            ways.append(f"  --max_steps {fewer}  fewer optimizer steps, {100 * share:.0f} % of the training")
        ways.append("  autofit plan ... --gpu all  shows which cards would suffice")
        costs = "" if price is None else f" and costs {money(cost, price.currency)}"
        return LimitError(
            f"Nothing that fits {fastest.hardware.name} meets {' and '.join(wishes)}.\n"
            f"  the fastest takes {duration(seconds)} ({steps:,} steps of {brief(fastest.time.step_seconds)}){costs}",
            hint="\n".join(["any of these would suffice:", *ways]),
        )

    def _lacking(self, estimate: Estimate) -> list[Finding]:
        """Returns the errors of a plan that offloads more than host memory holds."""
        if self.host_bytes is None:
            return []
        load = load_of(self.subject.job, estimate, parameters=self.subject.facts.parameters or 0)
        return [each for each in beside_the_card(load, self.host_bytes) if each.kind == "error"]

    def _steps(self, knobs: Knobs) -> int:
        return optimizer_steps(self.subject, knobs) or 0

    def _seconds(self, estimate: Estimate) -> float:
        return estimate.time.of_run(self._steps(estimate.knobs))

    def _cost(self, estimate: Estimate) -> float:
        cards = estimate.hardware.topology.processes
        return 0.0 if self.subject.price is None else self.subject.price.cost(self._seconds(estimate), cards=cards)


def limits_of(subject: Subject, knobs: Knobs) -> RunLimits:
    """Returns a job's limits. Raises UsageError if its steps, or the card's speed or price, are unknown."""
    job = subject.job
    wished = (("--within", job.within_seconds), ("--budget", job.budget))
    flags = " and ".join(flag for flag, given in wished if given is not None)
    is_here = subject.hardware.origin == "detected"
    limits = RunLimits(subject=subject, host_bytes=host_memory().available_bytes if is_here else None)
    if not flags:
        return limits
    if optimizer_steps(subject, knobs) is None:
        raise UsageError(
            f"{flags}: the number of optimizer steps is unknown.",
            hint="Name the data with --dataset, or give --max_steps N, or for a plan --tokens N.",
        )
    card = subject.hardware
    rates = (card.bandwidth_bytes_per_second, card.fp16_flops_per_second, card.fp32_flops_per_second)
    if None in (*rates, card.host_link_bytes_per_second):  # assumed rates only rank plans
        raise UsageError(
            f"{flags}: the speed of {card.name} is unknown.", hint="Name a card with --gpu (autofit gpus lists them)."
        )
    if job.budget is not None and subject.price is None:
        raise UsageError(
            f"--budget: the price of {card.name} is unknown.",
            hint="Give --prices FILE, a CSV with the columns gpu,per_hour and a row for this card.",
        )
    return limits


def optimizer_steps(subject: Subject, knobs: Knobs) -> int | None:
    """Returns the optimizer steps of the whole training: those for ``--tokens``, or ``steps_of`` the data."""
    job, lengths = subject.job, subject.lengths
    if job.tokens is not None:
        return math.ceil(job.tokens / (knobs.effective_batch_size * subject.row_tokens(knobs)))
    return steps_of(job, knobs, lengths.profile, lengths.rows)
