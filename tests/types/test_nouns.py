"""What a noun derives from its fields, and what comes back of it from another process."""

import itertools
import json
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nouns import TRL_DEFAULTS

from autotrain_mem import types
from autotrain_mem.search.levels import LEVELS
from autotrain_mem.settings.words import read_length, wished_share, without_maximized
from autotrain_mem.support import codec
from autotrain_mem.support.errors import TokenizerError, UsageError
from autotrain_mem.support.units import GIB, KIB, MIB
from autotrain_mem.types import CACHE_EMPTIED, METHODS, EngineMark, Kind, MemoryReading, Price, StreamUse, Topology
from autotrain_mem.types.findings import Finding, settle
from autotrain_mem.types.gpu_comparison import LOSSLESS, NOTHING_FITS, Cards, CardVerdict
from tests.report import report_examples


def reserved(peak_bytes: int) -> types.ReservedEstimate:
    return report_examples.reserved(peak_bytes, slack_bytes=peak_bytes - 3 * GIB)


KNOBS = replace(TRL_DEFAULTS, per_device_train_batch_size=2, gradient_accumulation_steps=4)
HARDWARE = replace(report_examples.RTX3060, total_bytes=24 * GIB, free_bytes=24 * GIB, non_torch_bytes=500 * MIB)
MEMORY = replace(
    report_examples.memory(),
    peak_allocated_bytes=3 * GIB,
    reserved=types.ReservedByMode(native=reserved(4 * GIB), expandable_segments=reserved(3 * GIB + MIB)),
)
TIME = types.StepTime(tokens=300.0, phases={types.Phase.FORWARD: 0.25, types.Phase.BACKWARD: 0.5})
ESTIMATE = types.Estimate(knobs=KNOBS, hardware=HARDWARE, memory=MEMORY, budget_bytes=23 * GIB, time=TIME)


def test_a_knob_that_does_not_apply_overlays_nothing() -> None:
    """TRL's configs would take the null for a value; a max_length of null is one."""
    unlimited = replace(KNOBS, max_length=None)
    assert [name for name, value in codec.to_json(unlimited).items() if value is None] == ["max_length"]


def test_what_is_required_is_allocated_plus_cached_plus_what_lies_outside_torch() -> None:
    assert ESTIMATE.required_bytes == 3 * GIB + GIB + 500 * MIB
    assert ESTIMATE.required_bytes == MEMORY.peak_allocated_bytes + ESTIMATE.cached_bytes + ESTIMATE.outside_bytes
    assert codec.to_json(ESTIMATE)["required_bytes"] == ESTIMATE.required_bytes
    shared = replace(ESTIMATE, vllm_share_bytes=7 * GIB)
    assert shared.required_bytes == ESTIMATE.required_bytes + 7 * GIB


def test_what_nccl_holds_lies_outside_torch_once_for_each_communicator() -> None:
    card = replace(HARDWARE, communicator_bytes=700 * MIB)
    for processes, sharding, communicators in ((1, None, 0), (4, "ddp", 1), (4, "fsdp2", 1), (16, "hsdp", 3)):
        knobs = replace(KNOBS, processes=processes, sharding=sharding)
        one = replace(ESTIMATE, hardware=card, knobs=knobs)
        assert one.communicators_bytes == communicators * 700 * MIB
        assert one.required_bytes == ESTIMATE.required_bytes + one.communicators_bytes
        assert codec.to_json(one)["communicators_bytes"] == one.communicators_bytes
        # A simulated card, and one whose processes were measured, have it in one figure with the rest.
        measured = replace(one, hardware=card.with_communicators(knobs.communicators))
        assert (measured.communicators_bytes, measured.required_bytes) == (0, one.required_bytes)


def test_expandable_segments_are_counted_where_the_knobs_have_them() -> None:
    expanded = ESTIMATE.growing()
    assert expanded == replace(ESTIMATE, knobs=replace(KNOBS, expandable_segments=True))
    assert (expanded.reserved, ESTIMATE.reserved) == (MEMORY.reserved.expandable_segments, MEMORY.reserved.native)
    assert expanded.required_bytes == 3 * GIB + MIB + 500 * MIB
    assert codec.to_json(expanded)["peak_reserved_bytes"] == 3 * GIB + MIB


def test_exactly_the_budget_fits_one_byte_more_does_not_nor_a_run_that_stumbles_over_the_allocator() -> None:
    assert ESTIMATE.fits
    for trouble in ({"num_alloc_retries": 1}, {"largest_refused_bytes": 512}):
        native = replace(MEMORY.reserved.native, **trouble)
        assert (MEMORY.reserved.native.fits, native.fits) == (True, False)
        stumbling = replace(ESTIMATE, memory=replace(MEMORY, reserved=replace(MEMORY.reserved, native=native)))
        assert (stumbling.fits, stumbling.growing().fits) == (False, True), trouble
    required = ESTIMATE.required_bytes
    for budget, fits in ((required, True), (required - 1, False)):
        assert replace(ESTIMATE, budget_bytes=budget).fits is fits
        assert types.Candidate(knobs=KNOBS, required_bytes=required, budget_bytes=budget).fits is fits


GRPO = types.Job(method="grpo", model="tiny", dataset=None)
PLAN = replace(report_examples.PLAN, job=GRPO, estimate=ESTIMATE, optimizer_steps=None, row_tokens=77)


def test_a_plan_says_how_fast_it_is_and_how_long_the_run_takes() -> None:
    written = codec.to_json(replace(PLAN, optimizer_steps=40))
    assert (written["step_seconds"], written["tokens_per_second"]) == (0.75, 400.0)
    assert (written["optimizer_steps"], written["run_seconds"]) == (40, 30.0)
    assert (written["prompt_length"], written["effective_batch_size"]) == (77, 8)
    assert codec.to_json(PLAN)["run_seconds"] is None
    by_another_card = replace(ESTIMATE, time=replace(TIME, assumed="a100-80gb"))
    assumed = codec.to_json(replace(PLAN, estimate=by_another_card, optimizer_steps=40))
    assert {assumed[name] for name in ("step_seconds", "tokens_per_second", "run_seconds")} == {None}


def test_the_prediction_error_is_relative_to_what_was_measured() -> None:
    report = replace(report_examples.REPORT, predicted_peak_bytes=110, predicted_peak_reserved_bytes=110, measured=None)
    assert report.prediction_error is report.reserved_prediction_error is None
    for measured, error in ((100, pytest.approx(0.1)), (0, None), (220, -0.5)):
        peaks = dict.fromkeys(("allocated_bytes.all.peak", "reserved_bytes.all.peak"), measured)
        done = replace(report, measured=MemoryReading.from_stats(peaks))
        assert (done.prediction_error, done.reserved_prediction_error) == (error, error)


def test_the_budget_is_what_is_free_less_a_headroom_of_4_percent_but_at_least_400_mib_on_a_real_card() -> None:
    sizes = {"detected": (100 * GIB, 4 * GIB), "named": (4 * GIB, 400 * MIB), "imagined": (100 * MIB, 4 * MIB)}
    for origin, (total, headroom) in sizes.items():
        card = replace(HARDWARE, origin=origin, total_bytes=total, free_bytes=total - MIB)
        assert card.default_headroom_bytes() == headroom
        budgets = card.budget_bytes(), card.budget_bytes(MIB), card.budget_bytes(0)
        assert budgets == (total - MIB - headroom, total - 2 * MIB, total - MIB)
        assert replace(card, free_bytes=MIB).budget_bytes() == 0


def test_a_length_is_pinned_by_a_number_only_and_a_prompts_by_its_own_flag() -> None:
    job = types.Job(method="sft", model="m", dataset=None)
    assert not job.pins_length
    for length, pinned in (("auto", False), ("p99.9", False), (9, True), (None, True)):
        assert replace(job, arguments={"max_length": length}).pins_length is pinned
        for method in (name for name, facts in METHODS.items() if facts.is_online):
            online = replace(job, method=method, arguments={"max_length": length})
            assert not online.pins_length
            assert replace(online, prompt_length=9).pins_length


WISHES = {" Auto": ("auto", 1.0), "none": (None, 1.0), "P99.9": ("p99.9", 0.999), "p100": ("p100", 1.0)}


def test_a_length_is_a_number_a_wish_or_none_and_a_wish_is_kept_from_trl() -> None:
    for text, (value, share) in WISHES.items():
        assert read_length(text) == value
        assert wished_share(value) == pytest.approx(share), text
        kept = {} if value else {"max_length": None}
        assert without_maximized({"max_length": value, "dtype": "auto"}) == {"dtype": "auto", **kept}
    assert read_length("512") == 512
    assert without_maximized({"max_length": 9}) == {"max_length": 9}


def test_anything_else_is_refused_with_its_own_words() -> None:
    for text in ("p0", "p101", "p100.1", "pfoo", "p", "99%", "-1", "0", "1.5", "p-1", "pauto"):
        with pytest.raises(ValueError, match=text):
            read_length(text)


def test_a_job_evaluates_by_a_strategy_or_before_its_first_step() -> None:
    """A script may hand over rows to evaluate on and ask for the first alone."""
    asked = ({"eval_strategy": "steps"}, {"eval_on_start": True}, {"eval_strategy": "no"}, {})
    jobs = [types.Job(method="sft", model="m", dataset=None, arguments=given) for given in asked]
    assert [job.is_evaluated for job in jobs] == [True, True, False, False]


def trace(events: list[int]) -> types.Trace:
    """Three blocks of 1, 2 and 4 KiB, the last one on stream 1; the optimizer step begins at the fourth event."""
    owners = (types.Owner.WEIGHTS, types.Owner.ACTIVATIONS, types.Owner.OPTIMIZER_STATE)
    sizes = [(KIB << index, owner, index // 2) for index, owner in enumerate(owners)]
    return types.Trace(
        blocks=tuple(
            types.Block(size_bytes=size, owner=owner, module="", stream=stream) for size, owner, stream in sizes
        ),
        events=array("q", events),
        phase_starts=((0, types.Phase.FORWARD), (3, types.Phase.OPTIMIZER_STEP)),
        operators=3,
        seconds=0.0,
    )


def test_a_trace_comes_back_as_it_went() -> None:
    moments = {"stream_uses": (StreamUse(event=2, block=3, stream=0),), "marks": ((2, 7), (3, EngineMark.WAKES))}
    sent = replace(trace([1, 3, CACHE_EMPTIED, -3, -1]), **moments)
    received = codec.from_json(types.Trace, json.loads(json.dumps(codec.to_json(sent))))
    assert received == sent
    assert [*received.awake()] == [range(3, 5)], "to the end, where nothing says that it sleeps"


def work(count: float = 1.0, flops: int = 100, phase: types.Phase = types.Phase.FORWARD) -> types.Work:
    numbers = {"flops": flops, "bytes": 10, "fixed_bytes": 20, "launches": 1}
    return types.Work(phase=phase, kind=Kind.MATMUL, dtype="bfloat16", count=count, **numbers)


def layers(count: int) -> types.Workload:
    """Each layer has three products; the update passes all of them at once."""
    update = work(1.0, flops=7 * count, phase=types.Phase.OPTIMIZER_STEP)
    return types.Workload(work=(work(5.0, flops=1), work(3.0 * count), update), micro_steps=2, optimizer_steps=1)


def total_flops(workload: types.Workload) -> float:
    return sum(each.flops * each.count for each in workload.work)


def test_few_layers_tell_the_work_of_many() -> None:
    whole = layers(2).extrapolated(layers(4), 15.0)
    assert total_flops(whole) == total_flops(layers(32))
    assert {each.flops: each.count for each in whole.work} == {1: 5.0, 100: 96.0, 14: -14.0, 28: 15.0}
    assert (whole.micro_steps, whole.optimizer_steps) == (2, 1)
    assert layers(2).extrapolated(layers(2), 15.0) == layers(2), "what both depths do alike is not multiplied"


def test_few_chunks_tell_the_work_of_all() -> None:
    few, all_of_them = (types.Workload(work=(work(4.0), replace(work(count), of_chunk=True))) for count in (6.0, 128.0))
    assert few.with_chunks(3, 64) == all_of_them


def test_without_a_mask_attention_computes_half_and_nothing_else_changes() -> None:
    attention = replace(work(), kind=Kind.ATTENTION)
    found = types.Workload(work=(attention, work())).without_mask().work
    assert [each.flops for each in found] == [50, 100]


def verdict(name: str, gib: int, level: str, speed: float = 1.0, gpus: int = 1) -> CardVerdict:
    size_bytes, topology = gib * GIB, Topology(devices=gpus)
    card = types.Hardware(
        name=name, origin="named", total_bytes=size_bytes, free_bytes=size_bytes, non_torch_bytes=0, topology=topology
    )
    estimate: Any = SimpleNamespace(tokens_per_second=speed)
    return CardVerdict(hardware=card, level=level, estimate=estimate)


PRICE = Price(gpu="rented", per_hour=1.0)
REFUSED = replace(verdict("a", 8, ""), level=None, estimate=None, refusal=NOTHING_FITS)
OFFLOADING = verdict("small", 12, "lossless, offloading")


def test_the_smallest_card_that_changes_nothing_is_marked() -> None:
    for verdicts, expected in (
        ([REFUSED, verdict("b", 12, "rounding"), verdict("c", 24, "lossless"), verdict("d", 80, "lossless")], "c"),
        # Of cards as small the fastest.
        ([verdict("slow", 24, "lossless", 1.0), verdict("fast", 24, "lossless", 2.0)], "fast"),
        # One that must offload counts only where none does without.
        ([OFFLOADING, verdict("large", 24, "lossless")], "large"),
        ([OFFLOADING, verdict("large", 24, "rounding")], "small"),
        # Of sets of cards the one with least memory in all.
        ([verdict("four", 24, "lossless", 4.0, gpus=4), verdict("one", 80, "lossless")], "one"),
        ([verdict("two", 24, "lossless", gpus=2), verdict("one", 80, "lossless", 9.0)], "two"),
        # One that nobody is known to rent out counts only where no other fits.
        ([verdict("rare", 24, "lossless"), replace(verdict("rented", 80, "lossless"), price=PRICE)], "rented"),
        ([REFUSED, verdict("b", 12, "LoRA"), verdict("c", 24, "rounding, offloading")], None),
    ):
        smallest = Cards(verdicts=tuple(verdicts)).smallest_lossless
        assert (None if smallest is None else smallest.hardware.name) == expected
    assert {*LOSSLESS} <= {step.name for step in LEVELS}


WARNING = Finding(kind="warning", message="Slow.", cure="Give --fast.")
USAGE = Finding(kind="error", message="Both.", cure="Give one.\nOr none.")
TOKENS = Finding(kind="error", error="TokenizerError", message="No end.", cure="Give --end.")


def test_warnings_come_back_an_error_is_raised_as_it_is_and_several_as_one_of_the_class_of_the_first() -> None:
    assert settle([WARNING, WARNING]) == (WARNING,)
    with pytest.raises(TokenizerError) as raised:
        settle([WARNING, Finding.of(TokenizerError("No end.", hint="Give --end."))])
    assert (raised.value.message, raised.value.hint) == ("No end.", "Give --end.")
    with pytest.raises(UsageError, match="2 problems:") as several:
        settle([USAGE, WARNING, TOKENS, USAGE])
    assert several.value.hint == "1. Both.\n   Give one.\n   Or none.\n2. No end.\n   Give --end."


# What truncation cuts and what batches hold, from a histogram of row lengths.

ROW_LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=50)


@given(ROW_LENGTHS, st.integers(1, 6000))
def test_the_fractions_are_those_of_truncating_row_by_row(rows: list[int], limit: int) -> None:
    profile = profile_of(rows)
    assert profile.truncated_rows_fraction(None) == profile.truncated_tokens_fraction(None) == 0
    assert (profile.rows, profile.tokens, profile.longest) == (len(rows), sum(rows), max(rows))
    kept = sum(min(length, limit) for length in rows)
    assert profile.truncated_tokens_fraction(limit) == pytest.approx(1 - kept / sum(rows))
    assert profile.truncated_rows_fraction(limit) == sum(length > limit for length in rows) / len(rows)
    assert 0 <= profile.truncated_tokens_fraction(limit) < 1


def test_a_percentile_is_the_nearest_rank() -> None:
    hundred = types.DataProfile(rows_by_length=dict.fromkeys(range(1, 101), 1))
    assert [hundred.percentile(share) for share in (0.07, 0.5, 0.95, 0.99, 0.999, 1)] == [7, 50, 95, 99, 100, 100]
    for share in (0, -0.5, 1.01):
        with pytest.raises(ValueError, match="share of rows"):
            hundred.percentile(share)
    evaluated = replace(hundred, longest_evaluated=200)
    assert (evaluated.asked_length(1), evaluated.asked_length(0.99)) == (200, 99), "all rows include the evaluated ones"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 50))
def test_the_expected_longest_and_the_padding_are_those_of_every_batch_that_can_be_drawn(
    lengths: list[int], rows: int, limit: int
) -> None:
    drawn = min(rows, len(lengths))
    batches = list(itertools.combinations([min(length, limit) for length in lengths], drawn))
    assert profile_of(lengths).expected_longest(rows, limit) == pytest.approx(sum(map(max, batches)) / len(batches))
    batches = list(itertools.combinations(lengths, drawn))
    real, padded = sum(map(sum, batches)), sum(drawn * max(batch) for batch in batches)
    assert profile_of(lengths).padding_fraction(rows) == pytest.approx(1 - real / padded)


def test_a_million_rows_are_no_less_exact() -> None:
    """With so many rows, drawing with and without replacement are the same."""
    million = types.DataProfile(rows_by_length={10: 990_000, 80: 10_000})
    assert million.expected_longest(4) == pytest.approx(80 - 70 * 0.99**4, rel=1e-5)


PAIRS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6)


@given(PAIRS, st.integers(1, 4))
def test_both_sequences_of_a_pair_are_padded_to_the_longest(sides: list[tuple[int, int]], rows: int) -> None:
    drawn = min(rows, len(sides))
    batches = list(itertools.combinations(sides, drawn))
    real = sum(sum(map(sum, batch)) for batch in batches)
    padded = sum(2 * drawn * max(map(max, batch)) for batch in batches)
    profile = profile_of_pairs(sides)
    assert profile.tokens == sum(map(sum, sides))
    assert profile.padding_fraction(rows) == pytest.approx(1 - real / padded)


@given(PAIRS, st.integers(1, 45))
def test_dropped_pairs_take_all_their_tokens_with_them(sides: list[tuple[int, int]], limit: int) -> None:
    kept = [pair for pair in sides if max(pair) <= limit]
    profile = profile_of_pairs(sides, drops=True)
    assert profile.kept_tokens(limit) == sum(map(sum, kept))
    assert profile.expected_longest(1, limit) == pytest.approx(sum(map(max, kept)) / len(kept) if kept else 0)


def profile_of(lengths: list[int]) -> types.DataProfile:
    return types.DataProfile(rows_by_length={length: lengths.count(length) for length in lengths})


def profile_of_pairs(sides: list[tuple[int, int]], *, drops: bool = False) -> types.DataProfile:
    longer = [max(pair) for pair in sides]
    shorter = {length: sum(min(pair) for pair in sides if max(pair) == length) for length in longer}
    return replace(profile_of(longer), shorter_sides=shorter, drops=drops)
