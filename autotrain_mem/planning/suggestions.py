"""Suggests where a run that does not fit here would fit: on a larger card, or on more cards."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from autotrain_mem.estimator.vllm_share import asleep_bytes, vllm_share_bytes
from autotrain_mem.machine.catalog import catalog
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.search.space import with_rows
from autotrain_mem.settings.levers import pulled
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Estimate, Hardware, Knobs, Owner
from autotrain_mem.types.hardware import lacks_bf16

CARDS_NAMED = 2

SHARDED = (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE)
"""The owners of memory that FSDP divides among its cards."""

MOST_CARDS = 8
"""The largest number of cards in a machine."""

Shared = Callable[[Knobs, int], Estimate | None]
"""Rehearses settings on several cards that share the model; returns None if they cannot."""


def would_fit(rehearsals: Rehearsals, estimate: Estimate, shared: Shared | None) -> tuple[str, ...]:
    """Names where a run that does not fit would fit: on the next larger cards, and on more of this card.

    Another card is judged by the bytes that this one reserves; other kernels may need a few percent more or less.
    ``shared`` rehearses settings on more cards; if it is None, bytes are computed without a rehearsal.
    """
    if rehearsals.hardware.origin == "cpu":
        return ()
    ways = [f"{card.name} ({format_bytes(card.total_bytes)})" for card in _larger_cards(rehearsals, estimate)]
    return (*ways, *_more_of_these(rehearsals, estimate, shared))


def _more_of_these(rehearsals: Rehearsals, estimate: Estimate, shared: Shared | None) -> Iterator[str]:
    """Finds the fewest cards that hold the run under FSDP2: computes their bytes, and confirms them with ``shared``."""
    job, knobs, topology = rehearsals.job, estimate.knobs, rehearsals.hardware.topology
    whole = [row for row in pulled(knobs) if "fsdp2" not in row.needs.get("sharding", ("fsdp2",))]
    # Shards save the bytes, so nothing is offloaded.
    let_go: dict[str, Any] = {
        row.knobs[0]: False for row in whole if row.offloads and row.knobs[0] not in job.arguments
    }
    needs_whole = len(let_go) < len(whole)
    if job.method_facts.holds_models_whole or needs_whole or topology.nodes > 1 or job.arguments.get("sharding"):
        return
    rows, owners = knobs.effective_batch_size, estimate.memory.owners_at_peak
    divided = sum(owners.get(owner, 0) for owner in SHARDED)
    counts = [topology.devices * times for times in (2, 4, 8)]
    for count in (each for each in counts if each <= MOST_CARDS and rows % each == 0):
        each_bytes = estimate.required_bytes - divided + divided * knobs.shards // count
        if each_bytes > estimate.budget_bytes:
            continue
        if shared is None:
            yield f"{count} of these (--gpus {count}), about {format_bytes(each_bytes)} each"
            return
        split = replace(knobs, processes=count, sharding="fsdp2", **let_go)
        there = shared(with_rows(split, min(knobs.per_device_train_batch_size, rows // count), rows), count)
        if there is not None and there.fits:
            yield f"{count} of these (--gpus {count}), {format_bytes(there.required_bytes)} each"
            return


def _larger_cards(rehearsals: Rehearsals, estimate: Estimate) -> list[Hardware]:
    """Returns the smallest cards that would hold the run, with the same half precision; the fastest of each size."""
    job, sleep = rehearsals.job, estimate.vllm_sleep
    halves = lacks_bf16(rehearsals.hardware.capability)

    def needed_bytes(card: Hardware) -> int:
        share_bytes = vllm_share_bytes(job, card)
        if sleep is None:
            return card.non_torch_bytes + estimate.reserved.peak_reserved_bytes + share_bytes
        there = replace(sleep, awake_bytes=share_bytes, asleep_bytes=asleep_bytes(job, card))
        return card.non_torch_bytes + there.needed_bytes

    cards = [card for card in catalog(laptops=False) if lacks_bf16(card.capability) is halves]
    fitting = [card for card in cards if needed_bytes(card) <= card.budget_bytes(rehearsals.headroom_bytes)]
    speeds = [(card.bandwidth_bytes_per_second or 0, card.fp16_flops_per_second or 0) for card in fitting]
    fastest: dict[int, Hardware] = {}
    for _, card in sorted(zip(speeds, fitting, strict=True), key=lambda pair: pair[0], reverse=True):
        fastest.setdefault(card.total_bytes, card)
    return [fastest[size] for size in sorted(fastest)[:CARDS_NAMED]]
