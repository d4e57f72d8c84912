"""What a run reserves, its peak, and whose its bytes are; beside a vLLM that sleeps, and with rows of every length."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixed_runs import LONGEST, SHORTER, rehearsed
from nouns import TRL_DEFAULTS
from traces import block, run_of, trace, traces

from autotrain_mem.allocator.blocks import SMALL_BYTES, round_size
from autotrain_mem.allocator.settings import AllocatorSettings, parse_settings
from autotrain_mem.allocator.simulator import CachingAllocator
from autotrain_mem.estimator.decode_steps import NOT_DERIVED, Stretch
from autotrain_mem.estimator.memory import HOLDERS, LARGEST_MODULES, alive_after, estimate_memory, make_timeline
from autotrain_mem.estimator.mixed_steps import drawn_batches, mixed_lengths, reserved_after
from autotrain_mem.estimator.replay import DeviceCapacity, reserve
from autotrain_mem.estimator.step_parts import UnclearStepsError, step_parts
from autotrain_mem.estimator.vllm_share import asleep_bytes, estimate_while_awake, with_sleep
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import DataProfile, Estimate, Hardware, Job, MemoryEstimate, Owner, Phase, StepTime, Trace
from autotrain_mem.types.page import Timeline
from autotrain_mem.types.trace import CACHE_EMPTIED, EngineMark, StreamUse
from autotrain_mem.types.vllm import ASLEEP_BYTES, ASLEEP_PARALLEL_BYTES

LARGE_RUNS = traces(largest=48 * MIB, empties=True)


def room(capacity_mib: int | None = None, settings: str = "", total_mib: int | None = None) -> DeviceCapacity:
    capacity, total = (None if each is None else each * MIB for each in (capacity_mib, total_mib))
    return DeviceCapacity(capacity_bytes=capacity, total_bytes=total, settings=parse_settings(settings))


native = partial(reserve, grows=False)


def after(run: Trace, settings: AllocatorSettings) -> CachingAllocator:
    allocator = CachingAllocator(None, settings)
    addresses: dict[int, int] = {}
    for event in run.events:
        if event > 0:
            addresses[event] = allocator.malloc(run.blocks[event - 1].size_bytes)
        elif event == CACHE_EMPTIED:
            allocator.empty_cache()
        else:
            allocator.free(addresses.pop(-event))
    return allocator


@given(LARGE_RUNS, st.booleans(), st.sampled_from(("", "max_split_size_mb:20")))
def test_a_replay_is_what_the_allocator_does_with_the_same_calls(run: Trace, grows: bool, text: str) -> None:
    allocator = after(run, replace(parse_settings(text), grows=grows))
    replayed = reserve(run, room(settings=text), grows=grows)
    assert replayed.peak_reserved_bytes == allocator.peak_reserved_bytes
    assert (replayed.num_alloc_retries, replayed.largest_refused_bytes) == (0, None)
    assert replayed.fits


@given(LARGE_RUNS, traces(largest=3 * MIB), st.booleans(), st.booleans())
def test_a_stretch_that_is_left_out_for_its_proof_would_need_no_memory(
    run: Trace, closed: Trace, grows: bool, is_small: bool
) -> None:
    allocator, stretch = after(run, AllocatorSettings(grows=grows)), Stretch((0, is_small))
    sizes = [round_size(each.size_bytes) for each in closed.blocks]
    for event in (*closed.events, *(-number for number in alive_after(closed.events))):
        if (sizes[abs(event) - 1] <= SMALL_BYTES) is is_small:
            stretch.add(event, sizes[abs(event) - 1])
    is_neutral, before = stretch.is_neutral(allocator), allocator.reserved_bytes
    addresses: dict[int, int] = {}
    for event in stretch.events:
        if event > 0:
            addresses[event] = allocator.malloc(sizes[event - 1])
        else:
            allocator.free(addresses.pop(-event))
    assert not is_neutral or allocator.reserved_bytes == before


def generation(*temporaries: int, skips: bool) -> Trace:
    """Rows that grow from 3 to 12 tokens, with a cache of 1 MiB per token. Jumps from 4 to 9 tokens if it ``skips``.

    Args:
        temporaries: The number of other blocks that each decode step allocates and frees, repeated.
    """
    sizes, events, marks = [3], [1], [(1, 3)]
    for tokens, count in zip((4, 9, 10, 11, 12) if skips else range(4, 13), itertools.cycle(temporaries), strict=False):
        shorter = sizes.index(marks[-1][1]) + 1
        sizes.append(tokens)
        events += [len(sizes), -shorter]
        for _ in range(0 if skips and tokens == 9 else count):
            sizes.append(2)
            events += [len(sizes), -len(sizes)]
        marks.append((len(events), tokens))
    return replace(run_of(sizes, events), marks=tuple(marks))


def test_only_steps_that_are_alike_show_those_between() -> None:
    every, some, unlike = (
        estimate_memory(run, room())
        for run in (generation(1, skips=False), generation(1, skips=True), generation(0, 1, 2, skips=True))
    )
    assert some.reserved == every.reserved
    assert NOT_DERIVED not in some.not_counted
    assert NOT_DERIVED in unlike.not_counted


def test_slack_is_what_was_not_allocated_when_the_peak_was_first_reached() -> None:
    run = run_of([40, 4, 60, 90], [1, 2, -1, 3, -3, -2, 4])
    reserved = native(run, room())
    assert reserved.peak_reserved_bytes == (40 + 20 + 60 + 90) * MIB
    assert reserved.slack_bytes == (40 + 20 + 60) * MIB
    assert native(run_of([40, 4], [1, -1, 2]), room()).slack_bytes == 0  # the 40 were, though they serve the 4 later


HALF = "per_process_memory_fraction:0.5"


def test_retries_and_refusals_are_counted() -> None:
    for run, within, retries, refused_mib, needed_mib in (
        # 70 are served by the cached 80.
        (run_of([60, 80, 70, 90], [1, -1, 2, -2, 3, -3, 4]), room(100), 2, None, 60 + 80 + 90),
        # The largest that is refused counts as it was asked; then 52 are cached, which serve the last.
        (run_of([60, 50.5, 70.25, 45], [1, 2, 3, -2, 4]), room(100), 2, 70.25, 60 + 52 + 72),
        # A refused request takes no part of what is left for others.
        (run_of([60, 50, 40], [1, 2, 3]), room(100), 1, 50, 150),
        (run_of([1, 2], [1, 2]), room(0), 2, 2, 2 + 20),
        # One beyond the whole device does not end the run; the mode is the call's, whatever the settings say.
        (run_of([1, 700], [1, 2]), room(100, "expandable_segments:True"), 1, 700, 702),
        # A limit on the process counts, and what is needed is told without it.
        (run_of([40, 30], [1, 2]), room(100, HALF, total_mib=120), 1, 30, 70),
    ):
        reserved = native(run, within)
        assert (reserved.num_alloc_retries, reserved.peak_reserved_bytes) == (retries, needed_mib * MIB)
        assert reserved.largest_refused_bytes == (refused_mib and int(refused_mib * MIB))
        assert not reserved.fits


def test_pages_that_exceed_a_request_that_was_refused_do_not_end_the_run() -> None:
    """11 MiB find 5 mapped and 5 on the device: a whole page of 20 is missing, not the 12 that a segment would be."""
    for settings in ("", "per_process_memory_fraction:0.9", "large_segment_size_mb:34"):
        reserved = reserve(run_of([15, 11, 33, 33], [1, 2, 3, 4]), room(25, settings), grows=True)
        assert (reserved.fits, reserved.largest_refused_bytes) == (False, 33 * MIB), settings


@given(LARGE_RUNS, st.integers(0, 200), st.booleans())
def test_what_reserves_no_more_than_there_is_fits_and_no_more(run: Trace, capacity_mib: int, grows: bool) -> None:
    endless = reserve(run, room(), grows=grows)
    limited = reserve(run, room(capacity_mib), grows=grows)
    assert limited.fits == (endless.peak_reserved_bytes <= capacity_mib * MIB)
    assert limited.peak_reserved_bytes == endless.peak_reserved_bytes
    assert limited.slack_bytes == endless.slack_bytes
    assert limited.num_alloc_retries >= (limited.largest_refused_bytes is not None)


def test_a_host_reserves_what_is_allocated() -> None:
    run = run_of([40, 60, 1], [1, -1, CACHE_EMPTIED, 2, 3])
    memory = estimate_memory(run, DeviceCapacity(capacity_bytes=10 * MIB, caches=False))
    assert memory.reserved.native == memory.reserved.expandable_segments
    assert memory.reserved.native.peak_reserved_bytes == memory.peak_allocated_bytes == 61 * MIB
    assert memory.reserved.native.slack_bytes == 0
    assert memory.reserved.native.fits  # whether 61 MiB are there is the budget's question


ENDLESS = DeviceCapacity(capacity_bytes=None)


def draw(run: Trace, places: int = 1000, *, grows: bool = False) -> Timeline:
    return make_timeline(run, ENDLESS, grows=grows, name="step", places=places)


@given(run=traces(empties=True), places=st.integers(1, 8), expandable=st.booleans())
def test_thinning_loses_no_peak_and_owners_sum_to_the_allocated(run: Trace, places: int, expandable: bool) -> None:
    memory = estimate_memory(run, ENDLESS)
    thin, full = (draw(run, count, grows=expandable) for count in (places, 10**6))
    assert len(thin.event) <= 3 * places + 2
    allocated = [sum(column[point] for column in thin.owners.values()) for point in range(len(thin.event))]
    assert max(allocated) == allocated[thin.peak] == memory.peak_allocated_bytes
    assert {owner: column[thin.peak] for owner, column in thin.owners.items()} == {
        owner: memory.owners_at_peak[owner] for owner in thin.owners
    }
    assert max(thin.reserved_bytes) == memory.reserved.modes[expandable].peak_reserved_bytes
    of_event = dict(zip(full.event, full.reserved_bytes, strict=True))
    assert [of_event[event] for event in thin.event] == list(thin.reserved_bytes)


@given(run=traces())
def test_holders_are_the_modules_that_hold_most(run: Trace) -> None:
    timeline = draw(run)
    for point, event in enumerate(timeline.event):
        held: dict[tuple[Owner, str], int] = {}
        for each in run.events[: event + 1]:
            owned = run.blocks[abs(each) - 1]
            size = max(512, -(-owned.size_bytes // 512) * 512)
            key = (owned.owner, owned.module)
            held[key] = held.get(key, 0) + (size if each > 0 else -size)
        largest = sorted((size for size in held.values() if size), reverse=True)[:HOLDERS]
        named = timeline.holders[point]
        assert [holder.size_bytes for holder in named] == largest
        owners = list(timeline.owners)
        assert all(held[owners[holder.owner], timeline.modules[holder.module]] == holder.size_bytes for holder in named)


def estimate(run: Trace) -> MemoryEstimate:
    return estimate_memory(run, ENDLESS)


def test_the_first_of_two_equal_peaks_is_the_peak_and_phases_have_their_own_in_the_order_they_were_met() -> None:
    blocks = [block(512, Owner.ACTIVATIONS), block(512, Owner.TEMPORARY)]
    starts = [(0, Phase.LOAD), (0, Phase.FORWARD), (2, Phase.BACKWARD)]
    memory = estimate(trace(blocks, [1, -1, 2], starts))
    assert memory.peak_phase is Phase.FORWARD
    assert memory.owners_at_peak[Owner.ACTIVATIONS] == 512
    with pytest.raises(ValueError, match="empty"):
        estimate(trace([], []))
    blocks = [block(1024, Owner.WEIGHTS), block(2048), block(512), block(512)]
    starts = [(0, Phase.LOAD), (1, Phase.FORWARD), (3, Phase.BACKWARD), (5, Phase.FORWARD)]
    memory = estimate(trace(blocks, [1, 2, -2, 3, -3, 4], starts))
    assert list(memory.phases.items()) == [(Phase.LOAD, 1024), (Phase.FORWARD, 3072), (Phase.BACKWARD, 1536)]


def test_modules_are_listed_by_size_and_only_what_their_forwards_made() -> None:
    sizes = {f"part{index}": 512 * (index + 1) for index in range(LARGEST_MODULES + 2)}
    blocks = [block(size, Owner.ACTIVATIONS, name) for name, size in sizes.items()]
    blocks += [block(9 * 512, Owner.TEMPORARY, f"layers.{index}.mlp.0") for index in range(2)]
    blocks += [block(99 * 512, Owner.WEIGHTS, "embedding"), block(512)]
    memory = estimate(trace(blocks, list(range(1, len(blocks) + 1))))
    largest = [(f"part{index}", 512 * (index + 1)) for index in range(LARGEST_MODULES + 1, 2, -1)]
    assert memory.modules_at_peak == (("layers.*.mlp.*", 18 * 512), *largest)


@given(traces(largest=48 * MIB, empties=True))
def test_parts_add_up_to_the_peak_exactly(run: Trace) -> None:
    memory = estimate(run)
    peak = memory.peak_allocated_bytes
    assert sum(memory.owners_at_peak.values()) == max(memory.phases.values()) == peak
    assert memory.phases[memory.peak_phase] == peak
    assert set(memory.owners_at_peak) == set(Owner)
    held = memory.owners_at_peak[Owner.ACTIVATIONS] + memory.owners_at_peak[Owner.TEMPORARY]
    assert sum(size for _, size in memory.modules_at_peak) <= held
    sizes = [round_size(one.size_bytes) for one in run.blocks]
    assert max(sizes) <= peak <= sum(sizes)
    for mode, expandable in ((memory.reserved.native, False), (memory.reserved.expandable_segments, True)):
        assert mode == reserve(run, ENDLESS, grows=expandable)
        assert peak <= mode.peak_reserved_bytes
        assert 0 <= mode.slack_bytes < mode.peak_reserved_bytes
        assert mode.fits


CARD = Hardware(name="toy24", origin="named", total_bytes=24 * GIB, free_bytes=24 * GIB, non_torch_bytes=GIB)
SLEEPING = {"use_vllm": True, "vllm_enable_sleep_mode": True}


def engine_run(*, cached_mib: int = 0, activations_mib: int = 200) -> Trace:
    """100 MiB of weights; an engine that is awake for a gathered weight of 20; then a step; then awake once more.

    Args:
        cached_mib: Of what is freed between the emptying of the cache and the engine's waking.
    """
    blocks = [
        block(100 * MIB, Owner.WEIGHTS),
        block(20 * MIB, Owner.GATHERED_WEIGHTS),
        block(activations_mib * MIB, Owner.ACTIVATIONS, "layer"),
        block(max(1, cached_mib) * MIB),
    ]
    events = [1, CACHE_EMPTIED, 2, -2, CACHE_EMPTIED, 3, -3, CACHE_EMPTIED, 4, -4, CACHE_EMPTIED]
    phases = [(0, Phase.LOAD), (1, Phase.GENERATE), (5, Phase.FORWARD), (7, Phase.GENERATE), (10, Phase.SCORE)]
    last_woken = 10 if cached_mib else 8
    marks = [(2, EngineMark.WAKES), (2, EngineMark.WAKES), (4, EngineMark.SLEEPS)]
    marks += [(last_woken, EngineMark.WAKES), (10, EngineMark.SLEEPS)]
    return replace(trace(blocks, events, phases), marks=tuple(marks))


def awake(run: Trace) -> MemoryEstimate:
    found = estimate_while_awake(run, ENDLESS, estimate(run))
    assert found is not None
    return found


def test_only_what_is_alive_while_the_engine_is_awake_is_beside_its_share() -> None:
    memory = awake(engine_run())
    assert memory.peak_allocated_bytes == 120 * MIB == sum(memory.owners_at_peak.values())
    assert memory.owners_at_peak[Owner.GATHERED_WEIGHTS] == 20 * MIB
    assert memory.phases == {Phase.GENERATE: 120 * MIB}
    assert (memory.peak_phase, memory.modules_at_peak) == (Phase.GENERATE, ())
    assert memory.reserved.native.peak_reserved_bytes == 120 * MIB, "what the step left is given back before it wakes"
    assert memory.reserved.native.fits
    cached = awake(engine_run(cached_mib=60))
    assert cached.peak_allocated_bytes == 120 * MIB
    assert cached.reserved.native.peak_reserved_bytes == 160 * MIB, "what is cached as it wakes lies beside it"
    assert cached.reserved.native.slack_bytes == 60 * MIB


def beside_engine(memory: MemoryEstimate) -> Estimate:
    time = StepTime(tokens=1.0, phases={})
    sizes = {"budget_bytes": 10 * GIB, "vllm_share_bytes": GIB}
    return Estimate(knobs=TRL_DEFAULTS, hardware=CARD, memory=memory, time=time, **sizes)


def test_an_engine_that_never_sleeps_has_its_share_throughout() -> None:
    never = replace(engine_run(), marks=())
    memory = estimate(never)
    assert estimate_while_awake(never, ENDLESS, memory) is None
    estimated = beside_engine(memory)
    assert with_sleep(estimated, None, asleep_bytes=5) is estimated


def test_the_card_needs_the_larger_of_both_moments() -> None:
    awake_mib, asleep_mib = 1024 + 1024 + 120, 1024 + 512 + 1900
    for activations_mib, needed, phase in ((200, awake_mib, Phase.GENERATE), (1800, asleep_mib, Phase.FORWARD)):
        one = engine_run(activations_mib=activations_mib)
        estimated = with_sleep(beside_engine(estimate(one)), awake(one), asleep_bytes=512 * MIB)
        assert (estimated.required_bytes, estimated.memory.peak_phase) == (needed * MIB, phase)
        assert estimated.vllm_sleep is not None
        assert estimated.required_bytes == CARD.non_torch_bytes + estimated.vllm_sleep.needed_bytes
        assert estimated.vllm_sleep.is_decided_awake is (phase is Phase.GENERATE)


def test_it_never_keeps_more_than_its_share() -> None:
    for words, kept_bytes in (
        (SLEEPING, ASLEEP_BYTES),
        (SLEEPING | {"vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.5}, ASLEEP_PARALLEL_BYTES),
        (SLEEPING | {"vllm_gpu_memory_utilization": 0.1}, 2.4 * GIB),
        ({"use_vllm": True}, 7.2 * GIB),
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5}, 12 * GIB),
        ({}, 0),
        (SLEEPING | {"vllm_mode": "server"}, 0),
    ):
        assert asleep_bytes(Job(method="grpo", model="m", dataset=None, arguments=words), CARD) == pytest.approx(
            kept_bytes
        ), words


SETTINGS = AllocatorSettings()


def played_in_full(tokens: Sequence[int], settings: AllocatorSettings, micro_batches: int) -> list[int]:
    """The same run as one sequence of calls, each step with its own sizes."""
    allocator, alive, reserved = CachingAllocator(None, settings), dict[int, int](), []
    for number, each in enumerate(tokens):
        trace = rehearsed(each, micro_batches).trace
        cuts = [index for index, phase in trace.phase_starts if phase is Phase.FORWARD][::micro_batches]
        begin, end = (0, cuts[1]) if number == 0 else (cuts[1], len(trace.events))
        for event in trace.events[begin:end]:
            if event > 0:
                alive[event] = allocator.malloc(trace.blocks[event - 1].size_bytes)
            else:
                allocator.free(alive.pop(-event))
        reserved.append(allocator.peak_reserved_bytes)
    return reserved


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("expandable", [False, True])
def test_a_replay_from_two_lengths_is_that_of_a_run_rehearsed_whole(expandable: bool, micro_batches: int) -> None:
    tokens = [210, 640, 333, 900, 150, 640, 511, 977, 210, 333, 960, 420, 1000, 640]
    settings = AllocatorSettings(grows=expandable)
    pair = rehearsed(LONGEST, micro_batches), rehearsed(SHORTER, micro_batches)
    replayed = reserved_after(*pair, tokens, settings, longest_first=False, accumulates=micro_batches > 1)
    assert replayed == played_in_full(tokens, settings, micro_batches)


def test_the_longest_rows_run_first_beside_the_gradients_that_later_ones_are_added_to() -> None:
    pair = rehearsed(LONGEST, 2), rehearsed(SHORTER, 2)
    held = itertools.accumulate(sign * block.size_bytes for _, sign, block in pair[0].trace.walk())
    (reserved,) = reserved_after(*pair, [SHORTER], SETTINGS, longest_first=True, accumulates=True)
    assert reserved >= max(held)


def test_with_the_longest_rows_first_less_is_reserved_unless_steps_empty_the_cache() -> None:
    profile = DataProfile(rows_by_length={100: 500, 300: 300, 500: 150, 700: 80, 850: 30, 1000: 4})
    batches = drawn_batches(profile, rows=2, each_step=1, limit=None, longest=LONGEST)
    pair = rehearsed(LONGEST), rehearsed(SHORTER)
    kept, emptied = (mixed_lengths(*pair, batches, SETTINGS, empties_cache=each).native for each in (False, True))
    assert emptied[-1] > kept[-1] + 40 * MIB
    assert all(fewer <= more for fewer, more in zip(kept, emptied, strict=True))
    assert all(before <= after for before, after in (*pairwise(kept), *pairwise(emptied)))


def test_drawn_batches_are_as_long_as_their_longest_rows_and_the_same_each_time() -> None:
    profile = DataProfile(rows_by_length={10: 90, 50: 9, 400: 1})
    batches = drawn_batches(profile, rows=4, each_step=2, limit=100, longest=100)
    assert len(batches.tokens) == 2000
    assert {*batches.tokens} <= set(range(10, 101))
    assert max(batches.tokens) == 100
    assert batches == drawn_batches(profile, rows=4, each_step=2, limit=100, longest=100)


def test_a_rehearsal_of_one_step_or_of_two_streams_is_not_cut() -> None:
    trace = rehearsed(SHORTER).trace
    one_step = replace(trace, phase_starts=trace.phase_starts[:4])
    streams = replace(trace, stream_uses=(StreamUse(1, 1, 1),))
    for each in (one_step, streams):
        with pytest.raises(UnclearStepsError):
            step_parts(each)
