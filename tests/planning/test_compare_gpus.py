"""One job on many cards from rehearsals that cards share; ``--within`` and ``--budget``; where a misfit would fit."""

import re
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.planning.predictions import judge
from autotrain_mem.planning.rehearsals import Lengths
from autotrain_mem.report.plan_view import decision, gentler_levels, passed_over
from autotrain_mem.support import codec, errors
from autotrain_mem.support.host import HostMemory
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import DataProfile, Footprint, Hardware, Job, Knobs, Phase, Plan, Price, Topology, Workload
from autotrain_mem.types.gpu_comparison import NO_PRICE, NOTHING_FITS, TOO_DEAR, TOO_SLOW, Cards
from tests.fake_worker import FakeWorker, rehearsals, toy, work_of

AMPERE, ADA, TURING = (8, 6), (8, 9), (7, 5)
ON_HOST = frozenset({"optimizer_offload", "activation_offloading"})
"""Levers that would be faster than others, with a toy's rates."""
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
    assert set(together) <= set().union(*alone)
    assert len(together) < sum(map(len, alone))
    near = [card(f"card{gib}", gib) for gib in (23, 24, 25)]
    assert len(rehearsed_for(*near)) < 1.5 * len(rehearsed_for(near[0]))
    turing = replace(LARGE, name="turing", compute_capability=TURING)
    assert {kernels for _, kernels in rehearsed_for(LARGE, turing)} == {ADA, (7, 0)}


def test_a_class_of_cards_rehearses_only_the_plan_that_another_finds_and_no_weights_that_are_too_large() -> None:
    hopper, none = card("hopper", 24, (9, 0)), card("none", 0.7)
    worker = FakeWorker(parameters=10**9)
    verdicts = compared(worker, LARGE, SMALL, hopper, none).verdicts
    (alone,) = compared(FakeWorker(parameters=10**9), hopper).verdicts
    assert alone.estimate is not None
    assert alone in verdicts
    assert [each.knobs for each in worker.asked if each.kernels == (10, 0)] == [alone.estimate.knobs]
    alone = compared(unasked := FakeWorker(parameters=10**9), none).verdicts[0]
    assert (alone.refusal, alone.least, unasked.asked) == (NOTHING_FITS, None, [])


def test_a_card_that_lacks_little_is_told_which_flags_would_do() -> None:
    job = Job(method="sft", model="m", dataset=None, arguments={"max_length": 512}, fit="lossless", forbid=ON_HOST)
    near, far = card("near", 15.2), card("far", 12)
    verdicts = api.cards(rehearsals(FakeWorker(), job, near), (near, far)).verdicts
    assert [(each.hardware.name, each.nearest) for each in verdicts] == [("far", ""), ("near", "--optimizer_offload")]
    assert verdicts[0].least == replace(verdicts[1].least, hardware=far, budget_bytes=far.budget_bytes())


def test_a_card_that_refuses_the_job_does_not_end_the_others_unless_all_do() -> None:
    worker, t4 = FakeWorker(refusing=frozenset({TURING})), card("t4", 16, TURING)
    assert levels(compared(worker, LARGE, t4)) == {"t4": "(7, 5) has no such kernel.", "large": "lossless"}
    with pytest.raises(errors.UsageError, match=r"\(7, 5\) has no such kernel\."):
        compared(FakeWorker(refusing=frozenset({TURING, ADA})), SMALL, card("t4", 10, TURING))
    worker = FakeWorker(failing=frozenset({"sft"}))
    with pytest.raises(errors.RehearsalError):
        compared(worker, TINY, SMALL, LARGE)
    assert len(worker.asked) == 1, "what is wrong whatever the card ends it at once"


def test_attempts_are_reported_card_by_card_with_the_budget_of_each() -> None:
    heard = Mock()
    compared(FakeWorker(), LARGE, TINY, on_attempt=heard)
    attempts = [(card.name, attempt.budget_bytes) for card, attempt in (call.args for call in heard.call_args_list)]
    budgets = [("tiny", TINY.total_bytes - 400 * MIB), ("large", LARGE.budget_bytes())]
    assert list(dict.fromkeys(attempts)) == budgets, "the least headroom, and the default"


CARD = toy(16.2, "toy", origin="named", compute_capability=(8, 9), **SPEEDS)
"""On which a billion parameters train in float32 with their activations recomputed, and without in bfloat16."""
JOB = Job(method="sft", model="m", dataset=None, arguments={"max_length": 512})
ACTIVATIONS = frozenset({"activation_offloading"})
PRICES = {"toy": Price(gpu="toy", per_hour=36.0, seen="2026-01-01")}


def asked(steps: int | None = 1000, card: Any = CARD, prices: Any = PRICES, **limits: Any) -> api.Rehearsals:
    arguments: dict[str, Any] = {"max_length": 512} | ({} if steps is None else {"max_steps": steps})
    job = Job(method="sft", model="m", dataset=None, arguments=arguments, forbid=ON_HOST, **limits)
    return replace(rehearsals(FakeWorker(), job, card), prices=prices)


def planned(**limits: Any) -> Plan:
    return api.plan(asked(**limits))


def test_a_plan_that_offloads_more_than_this_machines_host_memory_holds_is_passed_over() -> None:
    here = replace(SMALL, origin="detected")
    for gib, level in ((9, "lossless, offloading"), (7, "rounding")):
        memory = HostMemory(total_bytes=64 * GIB, available_bytes=gib * GIB, source="made up")
        with patch("autotrain_mem.planning.limits.host_memory", lambda memory=memory: memory):
            plan = api.plan(replace(asked(card=here), job=replace(JOB, forbid=ACTIVATIONS)))
            assert plan.level == level
            if gib < 8:
                told = "lossless, offloading fits the card, but offloads more than host memory holds"
                assert gentler_levels(plan) == [told]
                with pytest.raises(errors.HostMemoryError, match=r"--optimizer_offload: 8\.00 GiB are needed"):
                    api.plan(replace(asked(card=here), job=replace(JOB, forbid=ACTIVATIONS, fit="lossless")))


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


def test_the_time_of_a_run_holds_that_of_scoring_its_rows_once() -> None:
    subject = asked().subject(lengths=Lengths(longest=None, rows=400))
    forward = tuple(replace(each, phase=Phase.FORWARD) for each in work_of(FREE.knobs).work)
    footprint = Footprint(memory=FREE.estimate.memory, work=Workload(work=forward, micro_steps=1, optimizer_steps=1))
    times = [judge(subject, replace(FREE.knobs, precompute_ref_log_probs=on), footprint).time for on in (False, True)]
    once = times[0].of_run(400) / FREE.knobs.effective_batch_size
    assert times[1].of_run(10) == pytest.approx(times[0].of_run(10) + once)


def test_where_nothing_keeps_it_the_error_says_what_it_would_take() -> None:
    with pytest.raises(errors.LimitError) as raised:
        planned(within_seconds=1.0, budget=0.01)
    error = raised.value
    assert "meets --within 1.0 s and --budget 0.01 USD" in error.message
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
        with pytest.raises(errors.UsageError, match=said):
            api.plan(rehearsals)
        assert not rehearsals.workers.first.asked


def test_the_time_of_a_training_is_bounded_without_a_tokenizer_and_predicted_for_tokens_without_data() -> None:
    words = {"num_train_epochs": 2, "max_length": 512}
    per_step = 8 * 512
    for method, arguments, steps, tokens, told in (
        ("sft", words, 2 * 10**8 // 8, None, "at most"),
        ("grpo", words | {"num_generations": 4, "num_iterations": 2}, 2 * 10**8, None, "at most"),
        ("ppo", words | {"total_episodes": 10**8}, 10**8 // 8, None, "at most"),
        ("sft", words, 10**9, 10**9 * per_step, "about"),
        ("sft", words | {"max_steps": 10**8}, 10**8, None, "at most"),
    ):
        job = Job(method=method, model="m", dataset="d", arguments=arguments, prompt_length=512, tokens=tokens)
        defaults = replace(TRL_DEFAULTS, num_generations=arguments.get("num_generations"))
        plan = api.plan(rehearsals(FakeWorker(uncounted_rows=10**8), job, CARD, defaults))
        assert plan.optimizer_steps == steps
        (_, first, *_) = decision(plan)
        assert str(first).startswith(f"the training takes {told} "), "more than a day"


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
        with pytest.raises(errors.DoesNotFitError) as raised:
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
        raise errors.DatasetNotFoundError("There is no file rows.jsonl.")


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
