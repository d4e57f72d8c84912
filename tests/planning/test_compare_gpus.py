"""One job on many cards: a plan for each, from rehearsals that serve all cards with the same kernels."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from autotrain_mem import api
from autotrain_mem.support import codec
from autotrain_mem.support.errors import RehearsalError, UsageError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Hardware, Job, Knobs
from autotrain_mem.types.gpu_comparison import NOTHING_FITS, Cards
from autotrain_mem.types.hardware import Topology
from tests.fake_worker import FakeWorker, rehearsals, toy

AMPERE, ADA, TURING = (8, 6), (8, 9), (7, 5)
SPEEDS = {
    "bandwidth_bytes_per_second": 10**12,
    "bf16_flops_per_second": 10**14,
    "fp16_flops_per_second": 10**14,
    "fp32_flops_per_second": 10**13,
    "host_link_bytes_per_second": 10**10,
}


def card(name: str, gib: float, capability: tuple[int, int] = ADA) -> Hardware:
    return toy(gib, name, origin="named", compute_capability=capability, **SPEEDS)


TINY, SMALL, LARGE = card("tiny", 0.7), card("small", 12), card("large", 24, AMPERE)


def compared(worker: FakeWorker, *cards: Hardware, **heard: Any) -> Cards:
    job = Job(method="sft", model="m", dataset=None, arguments={"max_length": 512})
    return api.cards(rehearsals(worker, job, cards[0]), cards, **heard)


def levels(cards: Cards) -> dict[str, str]:
    return {verdict.hardware.name: verdict.level or verdict.refusal for verdict in cards.verdicts}


def rehearsed_for(*cards: Hardware) -> list[Any]:
    worker = FakeWorker()
    compared(worker, *cards)
    return [(each.knobs, each.kernels) for each in worker.asked]


def test_several_of_a_card_are_compared_and_the_smallest_set_of_all_is_named() -> None:
    def sizes(job: Job, knobs: Knobs) -> list[int]:
        """30 GiB of a model that processes may divide."""
        return [30 * GIB // knobs.processes, 0]

    counts = [replace(SMALL, topology=Topology(devices=count)) for count in (8, 1, 2, 4)]
    cards = compared(FakeWorker(sizes), *counts, LARGE)
    found = [(each.hardware.name, each.hardware.topology.devices, each.level) for each in cards.verdicts]
    refused = [("small", 1, None), ("large", 1, None), ("small", 2, None)]
    assert found == [*refused, ("small", 4, "lossless"), ("small", 8, "lossless")]
    assert cards.smallest_lossless == cards.verdicts[3]
    assert [each.estimate.knobs.effective_batch_size for each in cards.verdicts if each.estimate] == [32, 64]
    assert [each["gpus"] for each in codec.to_json(cards)["cards"]] == [1, 1, 2, 4, 8]


def test_a_verdict_is_what_the_card_alone_would_get_and_cards_of_one_kernel_class_share_rehearsals() -> None:
    verdicts = [compared(FakeWorker(), each).verdicts[0] for each in (TINY, SMALL, LARGE)]
    cards = compared(FakeWorker(), LARGE, TINY, SMALL)
    assert list(cards.verdicts) == verdicts, "the smallest first"
    assert [*levels(cards).values()] == [NOTHING_FITS, "lossless, offloading", "lossless"]
    assert cards.smallest_lossless == verdicts[2]
    alone = [rehearsed_for(each) for each in (TINY, SMALL, LARGE)]
    together = rehearsed_for(TINY, SMALL, LARGE)
    assert len(together) == len(set(together))
    assert set(together) == set().union(*alone)
    assert len(together) < sum(map(len, alone))
    near = [card(f"card{gib}", gib) for gib in (23, 24, 25)]
    assert len(rehearsed_for(*near)) < 1.5 * len(rehearsed_for(near[0]))
    turing = replace(LARGE, name="turing", compute_capability=TURING)
    assert {kernels for _, kernels in rehearsed_for(LARGE, turing)} == {ADA, (7, 0)}


def test_a_card_that_refuses_the_job_does_not_end_the_others_unless_all_do() -> None:
    worker, t4 = FakeWorker(refusing=frozenset({TURING})), card("t4", 16, TURING)
    assert levels(compared(worker, LARGE, t4)) == {"t4": "(7, 5) has no such kernel.", "large": "lossless"}
    with pytest.raises(UsageError, match=r"\(7, 5\) has no such kernel\."):
        compared(FakeWorker(refusing=frozenset({TURING, ADA})), SMALL, card("t4", 10, TURING))
    worker = FakeWorker(failing=frozenset({"sft"}))
    with pytest.raises(RehearsalError):
        compared(worker, TINY, SMALL, LARGE)
    assert len(worker.asked) == 1, "what is wrong whatever the card ends it at once"


def test_attempts_are_reported_card_by_card_with_the_budget_of_each() -> None:
    heard = Mock()
    compared(FakeWorker(), LARGE, TINY, on_attempt=heard)
    attempts = [(card.name, attempt.budget_bytes) for card, attempt in (call.args for call in heard.call_args_list)]
    budgets = [("tiny", TINY.total_bytes - 400 * MIB), ("large", LARGE.budget_bytes())]
    assert list(dict.fromkeys(attempts)) == budgets, "the least headroom, and the default"
