"""The gentlest plan that keeps ``--within`` and ``--budget``; where a misfit would fit, and what is not counted."""

import re
from dataclasses import replace
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.report.plan_view import passed_over
from autotrain_mem.support.errors import DatasetNotFoundError, DoesNotFitError, LimitError, UsageError
from autotrain_mem.support.units import GIB
from autotrain_mem.types import DataProfile, Job, Knobs, Plan
from autotrain_mem.types.gpu_comparison import NO_PRICE, TOO_DEAR, TOO_SLOW
from autotrain_mem.types.hardware import Price
from tests.fake_worker import FakeWorker, rehearsals, toy
from tests.planning.test_compare_gpus import SPEEDS

CARD = toy(16.2, "toy", origin="named", compute_capability=(8, 9), **SPEEDS)
"""On which a billion parameters train in float32 with their activations recomputed, and without in bfloat16."""
PRICES = {"toy": Price(gpu="toy", per_hour=36.0, seen="2026-01-01")}


def asked(steps: int | None = 1000, card: Any = CARD, prices: Any = PRICES, **limits: Any) -> api.Rehearsals:
    arguments: dict[str, Any] = {"max_length": 512} | ({} if steps is None else {"max_steps": steps})
    forbid = frozenset({"optimizer_offload", "activation_offloading"})  # which would be faster, with a toy's rates
    job = Job(method="sft", model="m", dataset=None, arguments=arguments, forbid=forbid, **limits)
    return replace(rehearsals(FakeWorker(), job, card), prices=prices)


def planned(**limits: Any) -> Plan:
    return api.plan(asked(**limits))


FREE = planned()
FREE_SECONDS = FREE.run_seconds or 0.0


def test_the_gentlest_level_whose_plan_keeps_a_limit_is_taken_and_the_others_say_what_they_take() -> None:
    kept = planned(within_seconds=FREE_SECONDS)
    assert (kept.level, kept.knobs, FREE.price) == (FREE.level, FREE.knobs, None)
    assert FREE.level.startswith("lossless")
    faster = planned(within_seconds=0.9 * FREE_SECONDS)
    cheaper = planned(budget=0.9 * FREE_SECONDS / 100)  # 36 an hour are 0.01 a second
    for plan, said in ((faster, f"{FREE.level} fits, but takes "), (cheaper, " USD")):
        assert plan.level == "rounding"
        assert (plan.run_seconds or 0.0) <= 0.9 * FREE_SECONDS
        (gentler,) = [each for each in plan.alternatives if each.level == FREE.level]
        assert gentler.fits
        assert said in passed_over(gentler, plan)
        assert "max_slowdown" not in passed_over(gentler, plan)
    assert cheaper.cost == pytest.approx((cheaper.run_seconds or 0.0) / 100)


def test_where_nothing_keeps_it_the_error_says_what_it_would_take() -> None:
    with pytest.raises(LimitError) as raised:
        planned(within_seconds=1.0, budget=0.01)
    error = raised.value
    assert "keeps --within 1.0 s and --budget 0.01 USD" in error.message
    assert re.search(r"1,000 steps of [1-9]\d* ms", error.message)
    first, second, *_ = error.hint.splitlines()[1:]
    assert first.split()[0::2] == ["--within", "--budget"]
    assert second.split()[0] == "--max_steps"
    assert 1 <= int(second.split()[1]) < 1000


def test_what_nobody_can_tell_is_said_before_anything_is_rehearsed() -> None:
    for words, said in (
        ({"steps": None, "within_seconds": 60.0}, "the number of optimizer steps"),
        ({"card": toy(18), "within_seconds": 60.0}, "the speed of toy is unknown"),
        ({"prices": {}, "budget": 3.0}, "the price of toy is unknown"),
    ):
        rehearsals = asked(**words)
        with pytest.raises(UsageError, match=said):
            api.plan(rehearsals)
        assert not rehearsals.workers.first.asked


def test_of_many_cards_those_that_break_a_limit_say_which() -> None:
    other = replace(CARD, name="other")
    for words, expected in (({"within_seconds": 1.0}, TOO_SLOW), ({"budget": 0.01}, TOO_DEAR)):
        cards = api.cards(asked(**words), [CARD, other])
        refusals = {each.hardware.name: each.refusal for each in cards.verdicts}
        assert refusals == {"toy": expected, "other": NO_PRICE if "budget" in words else expected}
    cards = api.cards(asked(), [CARD, other])
    costs = {each.hardware.name: each.cost for each in cards.verdicts}
    assert costs == {"toy": pytest.approx(FREE_SECONDS / 100, rel=0.01), "other": None}
    assert cards.cheapest is not None
    assert cards.cheapest.hardware.name == "toy"


TOY8 = toy(8, "toy8", origin="named")


def test_more_of_the_card_are_named_where_shards_fit_them_as_rehearsed() -> None:
    for gib, words, more in (
        (12, {}, "2 of these (--gpus 2), 6.00 GiB each"),
        (40, {}, "8 of these (--gpus 8), 5.00 GiB each"),
        (90, {}, ""),  # 11.3 each
        (12, {"optim": "adamw_8bit"}, ""),  # whose kernels know no shards
        (12, {"per_device_train_batch_size": 1}, ""),  # one row is for one process
    ):
        arguments = {"max_length": 64, "use_peft": False, "dtype": "float32", "optim": "adamw_torch"} | words
        job = Job(method="sft", model="m", dataset=None, arguments=arguments, forbid=frozenset({"optimizer_offload"}))
        worker = FakeWorker(lambda job, knobs, gib=gib: [gib * GIB // knobs.shards, 0])
        with pytest.raises(DoesNotFitError) as raised:
            api.plan(rehearsals(worker, job, TOY8))
        hint = raised.value.hint
        assert (more in hint, " of these" in hint) == (True, bool(more))
        assert {each.knobs.processes for each in worker.asked} == ({1, int(more[0])} if more else {1})
        batch = words.get("per_device_train_batch_size", 8)
        assert {each.knobs.effective_batch_size for each in worker.asked} == {batch}


def test_a_plan_does_not_wait_for_a_rehearsal_of_more_cards() -> None:
    """Weights of 12 GiB, and a fourth of that in 4 bits: all levels but the last need more than the card."""

    def sizes(job: Job, knobs: Knobs) -> list[int]:
        return [(4 if knobs.load_in_4bit else 12 if knobs.dtype == "float32" else 10) * GIB // knobs.shards, 0]

    worker = FakeWorker(sizes)
    job = Job(method="sft", model="m", dataset=None, arguments={"max_length": 64})
    plan = api.plan(rehearsals(worker, job, TOY8, TRL_DEFAULTS))
    more = [way for each in plan.alternatives for way in each.would_fit if "of these" in way]
    assert {*more} == {f"2 of these (--gpus 2), about {size}.00 GiB each" for size in (5, 6)}
    assert {each.knobs.processes for each in worker.asked} == {1}


ROOMY = toy(40, "toy", origin="named", compute_capability=(8, 9))
HOURS = "memory reserved over hours with rows of every length: "


class Unreadable(FakeWorker):
    def profile(self, job: Job, on_counting: object) -> DataProfile:
        raise DatasetNotFoundError("There is no file rows.jsonl.")


def test_the_reason_is_told_unless_all_batches_are_alike() -> None:
    for worker, dataset, words, reasons in (
        (FakeWorker, None, {}, ["their lengths are unknown; give --dataset"]),
        (Unreadable, "rows.jsonl", {}, ["the data could not be read: There is no file rows.jsonl"]),
        (FakeWorker, "rows.jsonl", {}, ["the steps of this rehearsal cannot be replayed"]),
        *((FakeWorker, data, {"packing": True}, []) for data in ("rows.jsonl", None)),
        (FakeWorker, "rows.jsonl", {"padding_free": True}, []),
    ):
        job = Job(method="sft", model="m", dataset=dataset, arguments={"max_length": 512, **words})
        memory = api.estimate(rehearsals(worker(), job, ROOMY)).memory
        assert memory.mixed_lengths is None
        told = [each.removeprefix(HOURS) for each in memory.not_counted if each.startswith(HOURS)]
        assert [each[: len(reason)] for each, reason in zip(told, reasons, strict=True)] == reasons, (dataset, words)
