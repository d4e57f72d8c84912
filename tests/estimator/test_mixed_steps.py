"""Steps of rows of every length, replayed from two rehearsals of a toy trainer whose memory is known at any length."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from mixed_runs import LONGEST, SHORTER, rehearsed

from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.allocator.simulator import CachingAllocator
from autotrain_mem.estimator.mixed_steps import drawn_batches, mixed_lengths, reserved_after
from autotrain_mem.estimator.step_parts import UnclearStepsError, step_parts
from autotrain_mem.support.units import MIB
from autotrain_mem.types import DataProfile, Phase
from autotrain_mem.types.trace import StreamUse

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
def test_a_replay_from_two_lengths_is_that_of_a_run_whose_steps_were_all_rehearsed(
    expandable: bool, micro_batches: int
) -> None:
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
