"""Skipped decode steps are written from the events of the last step."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_run import peak

from autotrain_mem.rehearsal.trace.ledger import Ledger
from autotrain_mem.rehearsal.trace.skipped_decode_steps import (
    GROWTH_OF_A_LAYER,
    Budget,
    GrowingState,
    Jump,
    write_skipped_steps,
)
from autotrain_mem.types import Owner, Phase, Trace

TOKEN = 100
PREFILL = 3
TEMPORARY, LOGITS, SCORES, LEFT = 7, 5000, 9, 11


class Generation:
    """A cache of one tensor, logits that live into the next step, permanent scores, and a block of the prefill."""

    def __init__(self, skipped: int, *, scores: bool = False) -> None:
        self.ledger = Ledger()
        self.skipped = skipped
        self.scores = scores
        self._born("weights", 1)
        self.ledger.enter_phase(Phase.GENERATE)
        self.cache = self._born("cache", PREFILL * TOKEN)
        self.logits = self._born("logits", LOGITS)
        self.left = self._born("left", LEFT)

    def _born(self, name: str, size_bytes: int) -> int:
        block = self.ledger.write_birth(size_bytes, name)
        self.ledger.describe(block, Owner.KV_CACHE if name == "cache" else Owner.OTHER, name)
        return block

    def jump_and_step(self, events: int = 1_000_000, budget: Budget | None = None) -> Trace:
        ledger, before = self.ledger, self.cache
        start = len(ledger.events)
        tool = self._born("tool", 13)
        ahead = self._born("cache", (PREFILL + self.skipped) * TOKEN)
        ledger.end(before)
        ledger.end(tool)
        for _ in range(self.skipped * self.scores):
            self._born("scores", SCORES)
        stop = len(ledger.events)
        after = self.step(ahead, (PREFILL + self.skipped + 1) * TOKEN)
        lengths = tuple(range(PREFILL + 1, PREFILL + self.skipped + 1))
        state = GrowingState(before_jump=before, after_jump=ahead, after_last=after, lengths=lengths)
        jump = Jump(start=start, stop=stop, states=(state,), steps=self.skipped)
        write_skipped_steps(ledger, jump, budget or Budget(layers=1, events=2 * events))
        ledger.enter_phase(Phase.SCORE)
        ledger.end(self.logits)
        return ledger.trace()

    def step(self, shorter: int, size_bytes: int) -> int:
        """Runs a step: a temporary, the longer cache beside the shorter, new logits beside the old."""
        ledger = self.ledger
        temporary = self._born("temporary", TEMPORARY)
        longer = self._born("cache", size_bytes)
        ledger.end(shorter)
        if self.left >= 0:
            ledger.end(self.left)
            self.left = -1
        ledger.end(temporary)
        logits = self._born("logits", LOGITS)
        ledger.end(self.logits)
        self.logits = logits
        if self.scores:
            self._born("scores", SCORES)
        return longer

    def all_steps(self) -> Trace:
        for step in range(self.skipped + 1):
            self.cache = self.step(self.cache, (PREFILL + step + 1) * TOKEN)
        self.ledger.enter_phase(Phase.SCORE)
        self.ledger.end(self.logits)
        return self.ledger.trace()


def story(trace: Trace) -> list[tuple[str, int, str]]:
    return [(phase.value, sign * block.size_bytes, block.module) for phase, sign, block in trace.walk()]


def assert_lives(trace: Trace) -> None:
    """Blocks are allocated only while free, and freed only while allocated."""
    alive: set[int] = set()
    for event in trace.events:
        assert (abs(event) in alive) is (event < 0)
        alive ^= {abs(event)}


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("skipped", [1, 2, 3, 10, 11])
def test_with_room_for_all_the_record_is_that_of_all_steps(skipped: int, scores: bool) -> None:
    written = Generation(skipped, scores=scores).jump_and_step()
    assert story(written) == story(Generation(skipped, scores=scores).all_steps())
    assert_lives(written)


def test_without_room_for_whole_steps_the_cache_still_grows_step_by_step_or_in_longer_strides() -> None:
    for skipped, stride in ((20, 1), (100, 10)):
        written = Generation(skipped).jump_and_step(events=2 * GROWTH_OF_A_LAYER * skipped // stride)
        grown = [-size // TOKEN for _, size, name in story(written) if name == "cache" and size < 0]
        assert grown[-1] == PREFILL + skipped
        assert {later - earlier for earlier, later in itertools.pairwise(grown)} == {stride}
        assert len([name for _, size, name in story(written) if name == "temporary" and size > 0]) < skipped // stride


@settings(max_examples=60, deadline=None)
@given(skipped=st.integers(1, 60), events=st.integers(0, 8000), scores=st.booleans())
def test_however_much_room_there_is_lives_are_whole_and_the_peak_is_that_of_all_steps(
    skipped: int, events: int, scores: bool
) -> None:
    written = Generation(skipped, scores=scores).jump_and_step(events)
    assert_lives(written)
    assert peak(written) == peak(Generation(skipped, scores=scores).all_steps())


def test_a_phase_and_a_use_of_a_stream_that_come_later_move_along() -> None:
    generation = Generation(10)
    ledger = generation.ledger
    trace = generation.jump_and_step()
    ledger.use_on_stream(0, 1)
    ledger.end(0)
    (use,) = ledger.trace().stream_uses
    assert ledger.trace().events[use.event] == -1
    assert trace.phase_starts[-1] == (len(trace.events) - 1, Phase.SCORE)
