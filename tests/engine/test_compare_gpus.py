"""One job on many cards: a plan for each, from rehearsals that serve all cards with the same kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.errors import RehearsalError, UsageError
from autotrain_mem.spec import Block, Candidate, Hardware, Job, Knobs, Owner, Phase, Trace, Workload
from autotrain_mem.spec.gpu_comparison import NOTHING_FITS, Cards
from autotrain_mem.spec.model import ModelFacts
from autotrain_mem.spec.preflight import Preflight
from autotrain_mem.spec.work import Kind, Work
from autotrain_mem.units import GIB, MIB

AMPERE, ADA, TURING = (8, 6), (8, 9), (7, 5)


def card(name: str, gib: float, capability: tuple[int, int] = ADA) -> Hardware:
    size = int(gib * GIB)
    return Hardware(
        name=name,
        origin="named",
        total_bytes=size,
        free_bytes=size,
        non_torch_bytes=0,
        compute_capability=capability,
        bandwidth_bytes_per_second=10**12,
        bf16_flops_per_second=10**14,
        fp16_flops_per_second=10**14,
        fp32_flops_per_second=10**13,
        host_link_bytes_per_second=10**10,
    )


TINY, SMALL, LARGE = card("tiny", 0.7), card("small", 12), card("large", 24, AMPERE)


@dataclass
class FakeWorker:
    """A model of 1B parameters, whose rows take 1 GiB each without recomputation, rehearsed in no time."""

    asked: list[tuple[Knobs, tuple[int, int]]] = field(default_factory=list)
    refusing: frozenset[tuple[int, int]] = frozenset()

    def describe(self, job: Job, compute_capability: tuple[int, int]) -> ModelFacts:
        if compute_capability in self.refusing:
            raise UsageError(f"{compute_capability} has no such kernel.")
        return ModelFacts(context_length=None, is_quantized=False)

    def preflight(self, job: Job, compute_capability: tuple[int, int], **facts: bool) -> Preflight:
        return Preflight(findings=(), parameters=None)

    def rehearse(
        self, job: Job, knobs: Knobs, length: int, compute_capability: tuple[int, int], **copies: None
    ) -> Trace:
        self.asked.append((knobs, compute_capability))
        width = 2 if knobs.dtype == "bfloat16" else 4
        weights = 10**9 // 2 if knobs.load_in_4bit else 10**9 if knobs.load_in_8bit else 10**9 * width
        moments = 0 if knobs.optimizer_offload else 2 if knobs.optim == "adamw_8bit" else 2 * width
        trained = 0 if knobs.use_peft else 10**9 * (width + moments)
        rows = GIB * knobs.per_device_train_batch_size // (4 if knobs.gradient_checkpointing else 1)
        blocks = (_block(Owner.WEIGHTS, weights), _block(Owner.ACTIVATIONS, trained + rows))
        return Trace(
            blocks=blocks,
            events=array("q", [1, 2]),
            phase_starts=((0, Phase.LOAD), (1, Phase.BACKWARD)),
            operators=2,
            seconds=0.0,
            work=_work(knobs),
        )


def _block(owner: Owner, size: int) -> Block:
    return Block(size_bytes=size, owner=owner, module="")


def _work(knobs: Knobs) -> Workload:
    """Twice the work with recomputation."""
    passes = 2 if knobs.gradient_checkpointing else 1
    flops = passes * knobs.per_device_train_batch_size * 10**12
    work = Work(
        phase=Phase.BACKWARD,
        kind=Kind.MATMUL,
        dtype="bfloat16",
        flops=flops,
        bytes=0,
        fixed_bytes=0,
        launches=1,
        count=1,
    )
    return Workload(work=(work,), micro_steps=1, optimizer_steps=1)


def compared(
    worker: FakeWorker, *cards: Hardware, attempts: list[tuple[str, Candidate]] | None = None, fit: str = "all"
) -> Cards:
    workers = api.Workers.holding(worker)  # type: ignore[arg-type]
    job = Job(method="sft", model="m", dataset=None, arguments={"max_length": 512}, fit=fit)  # type: ignore[arg-type]
    rehearsals = api.Rehearsals(workers=workers, job=job, defaults=TRL_DEFAULTS, hardware=cards[0])
    reported: list[tuple[str, Candidate]] = [] if attempts is None else attempts
    return api.cards(rehearsals, cards, lambda card, attempt: reported.append((card.name, attempt)))


def levels(cards: Cards) -> dict[str, str]:
    return {verdict.hardware.name: verdict.level or verdict.refusal for verdict in cards.verdicts}


def rehearsals_of(*cards: Hardware) -> list[tuple[Knobs, tuple[int, int]]]:
    worker = FakeWorker()
    compared(worker, *cards)
    return worker.asked


def test_every_card_has_its_verdict_smallest_first() -> None:
    cards = compared(FakeWorker(), LARGE, TINY, SMALL)
    assert list(levels(cards).items()) == [
        ("tiny", NOTHING_FITS),
        ("small", "lossless, offloading"),
        ("large", "lossless"),
    ]
    smallest = cards.smallest_lossless
    assert smallest is not None
    assert smallest.hardware.name == "large"


def test_a_verdict_is_what_the_card_alone_would_get() -> None:
    alone = [compared(FakeWorker(), each).verdicts[0] for each in (TINY, SMALL, LARGE)]
    assert list(compared(FakeWorker(), TINY, SMALL, LARGE).verdicts) == alone


def test_cards_of_one_kernel_class_share_their_rehearsals() -> None:
    alone = [rehearsals_of(each) for each in (TINY, SMALL, LARGE)]
    together = rehearsals_of(TINY, SMALL, LARGE)
    assert len(together) == len(set(together))
    assert set(together) == set().union(*alone)
    assert len(together) < sum(map(len, alone))
    near = [card(f"card{gib}", gib) for gib in (23, 24, 25)]
    assert len(rehearsals_of(*near)) < 1.5 * len(rehearsals_of(near[0]))


def test_cards_with_other_kernels_share_nothing() -> None:
    turing = replace(LARGE, name="turing", compute_capability=TURING)
    assert {kernels for _, kernels in rehearsals_of(LARGE, turing)} == {ADA, (7, 0)}


def test_a_card_that_refuses_the_job_does_not_end_the_others_unless_all_do() -> None:
    worker, t4 = FakeWorker(refusing=frozenset({TURING})), card("t4", 16, TURING)
    assert levels(compared(worker, LARGE, t4)) == {"t4": "(7, 5) has no such kernel.", "large": "lossless"}
    with pytest.raises(UsageError, match=r"\(7, 5\) has no such kernel\."):
        compared(FakeWorker(refusing=frozenset({TURING, ADA})), SMALL, card("t4", 10, TURING))


def test_what_is_wrong_whatever_the_card_ends_it_at_once() -> None:
    class Failing(FakeWorker):
        def rehearse(self, job: Job, knobs: Knobs, length: int, *device: object, **copies: None) -> Trace:
            self.asked.append((knobs, ADA))
            raise RehearsalError("It raised.")

    worker = Failing()
    with pytest.raises(RehearsalError):
        compared(worker, TINY, SMALL, LARGE)
    assert len(worker.asked) == 1


def test_nothing_is_rehearsed_for_a_suggestion_where_nothing_fits() -> None:
    worker = FakeWorker()
    assert levels(compared(worker, TINY, fit="lossless")) == {"tiny": NOTHING_FITS}
    assert not [knobs for knobs, _ in worker.asked if knobs.use_peft or knobs.dtype == "bfloat16"]


def test_whoever_listens_hears_of_each_card_in_turn() -> None:
    attempts: list[tuple[str, Candidate]] = []
    compared(FakeWorker(), TINY, attempts=attempts)
    assert _budgets(attempts, "tiny") == {TINY.total_bytes - 400 * MIB}, "the least headroom"
    attempts.clear()
    compared(FakeWorker(), LARGE, SMALL, attempts=attempts)
    names = [name for name, _ in attempts]
    assert names == sorted(names, reverse=True)
    assert set(names) == {"small", "large"}
    assert _budgets(attempts, "small") == {SMALL.total_bytes - int(0.04 * SMALL.total_bytes)}


def _budgets(attempts: Sequence[tuple[str, Candidate]], name: str) -> set[int]:
    return {attempt.budget_bytes for each, attempt in attempts if each == name}
