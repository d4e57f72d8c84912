"""Which of many cards is marked, and what is written of each."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from autotrain_mem.support.units import GIB
from autotrain_mem.types import Estimate, Hardware
from autotrain_mem.types.gpu_comparison import LOSSLESS, NOTHING_FITS, Cards, CardVerdict
from autotrain_mem.types.hardware import Topology


def verdict(name: str, gib: int, level: str, speed: float = 1.0, gpus: int = 1) -> CardVerdict:
    size_bytes, topology = gib * GIB, Topology(devices=gpus)
    card = Hardware(
        name=name, origin="named", total_bytes=size_bytes, free_bytes=size_bytes, non_torch_bytes=0, topology=topology
    )
    return CardVerdict(hardware=card, level=level, estimate=cast(Estimate, SimpleNamespace(tokens_per_second=speed)))


REFUSED = replace(verdict("a", 8, ""), level=None, estimate=None, refusal=NOTHING_FITS)
OFFLOADING = verdict("small", 12, "lossless, offloading")


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([REFUSED, verdict("b", 12, "rounding"), verdict("c", 24, "lossless"), verdict("d", 80, "lossless")], "c"),
        # Of cards as small the fastest.
        ([verdict("slow", 24, "lossless", 1.0), verdict("fast", 24, "lossless", 2.0)], "fast"),
        # One that must offload counts only where none does without.
        ([OFFLOADING, verdict("large", 24, "lossless")], "large"),
        ([OFFLOADING, verdict("large", 24, "rounding")], "small"),
        # Of sets of cards the one with least memory in all.
        ([verdict("four", 24, "lossless", 4.0, gpus=4), verdict("one", 80, "lossless")], "one"),
        ([verdict("two", 24, "lossless", gpus=2), verdict("one", 80, "lossless", 9.0)], "two"),
        ([REFUSED, verdict("b", 12, "LoRA"), verdict("c", 24, "rounding, offloading")], None),
    ],
)
def test_the_smallest_card_that_changes_nothing_is_marked(verdicts: list[CardVerdict], expected: str | None) -> None:
    smallest = Cards(verdicts=tuple(verdicts)).smallest_lossless
    assert (None if smallest is None else smallest.hardware.name) == expected


@pytest.mark.parametrize("level", LOSSLESS)
def test_the_planner_has_the_levels_that_count_as_lossless(level: str) -> None:
    from autotrain_mem.search.levels import LEVELS

    assert level in [step.name for step in LEVELS]
