"""Where a run would fit that does not fit here: on a larger card, or on two of these."""

from __future__ import annotations

from autotrain_mem.engine.rehearsals import Rehearsals
from autotrain_mem.estimator.vllm_share import vllm_share_bytes
from autotrain_mem.machine.catalog import catalog
from autotrain_mem.planner.precision import lacks_bf16
from autotrain_mem.spec import Estimate, Hardware, Owner
from autotrain_mem.units import format_bytes

CARDS_NAMED = 2
"""How many larger cards are named: the next one, and one more for those who cannot get it."""

SHARDED = (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE)
"""What FSDP shares out among its cards (``FULL_SHARD``)."""


def would_fit(rehearsals: Rehearsals, estimate: Estimate) -> tuple[str, ...]:
    """Where a run that does not fit here would: the next larger cards, and two of this one.

    On another card by what this one's rehearsal reserves; cards with other kernels may need a few percent more or less.
    """
    if rehearsals.hardware.origin == "cpu":
        return ()
    return (*map(_named, larger_cards(rehearsals, estimate)), *_two_cards(estimate))


def larger_cards(rehearsals: Rehearsals, estimate: Estimate) -> list[Hardware]:
    """The smallest cards of the catalog that would hold it, smallest first, the fastest of each size.

    A card without bfloat16 computes otherwise, so none is named for a run on one that has it, and the reverse.
    """
    reserved, halves = estimate.reserved.peak_reserved_bytes, lacks_bf16(rehearsals.compute_capability)
    fitting = [
        card
        for card in catalog()
        if card.compute_capability is not None
        and lacks_bf16(card.compute_capability) is halves
        and reserved + card.non_torch_bytes + vllm_share_bytes(rehearsals.job, card)
        <= card.budget_bytes(rehearsals.headroom_bytes)
    ]
    sizes = sorted({card.total_bytes for card in fitting})[:CARDS_NAMED]
    return [max((card for card in fitting if card.total_bytes == size), key=_bandwidth) for size in sizes]


def _bandwidth(card: Hardware) -> int:
    return card.bandwidth_bytes_per_second or 0


def _named(card: Hardware) -> str:
    return f"{card.name} ({format_bytes(card.total_bytes)})"


def _two_cards(estimate: Estimate) -> tuple[str, ...]:
    """By arithmetic, not by a rehearsal: weights, gradients and optimizer state are halved, the rest is as it was."""
    owners = estimate.memory.owners_at_peak
    halved = sum(owners.get(owner, 0) for owner in SHARDED) // 2
    each = estimate.required_bytes - halved
    if each > estimate.budget_bytes:
        return ()
    return (f"two of these under FSDP, by arithmetic about {format_bytes(each)} each",)
