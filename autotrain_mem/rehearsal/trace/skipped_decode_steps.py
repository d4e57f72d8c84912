"""Writes the decode steps that are not rehearsed into the ledger, between the rehearsed ones.

Each decode step allocates a KV cache with one more token, and frees the shorter one (``transformers/cache_utils.py:
DynamicLayer.update``). The longer cache never fits the freed block, which fragments a caching allocator. So the growth
of the cache is written for as many skipped steps as the budget allows. Some of these steps are written in full, as
copies of the last step: masks and attention scores, which depend on the length, have the last step's sizes.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from autotrain_mem.rehearsal.trace.ledger import Ledger

EVENTS_OF_SKIPPED_STEPS = 100_000
"""The most events of skipped steps in one run; each generation uses half of the remaining ones.

With sixteen times as many, the same bytes are reserved (GRPO of Qwen3-8B and Qwen2.5-0.5B, RLOO of Llama-3.2-1B, PPO of
Qwen2.5-0.5B, 128 to 1,024 tokens sampled); with a quarter, up to 3.5 % more. Without expandable segments, the number is
too small for a long generation of a deep model: GRPO of Qwen3-8B in 4 bits with 1,024 tokens reserves 21.7 GiB instead
of 16.8 GiB. With expandable segments it reserves 11.7 GiB in both cases."""
GROWTH_OF_A_LAYER = 4
"""Events of a step that replace a layer's keys and values by longer ones."""
STEP_OF_A_LAYER = 220
"""Events of a whole step per layer: 7,900 for the 36 layers of Qwen3-8B in 4 bits, and fewer without quantization."""


@dataclass(kw_only=True, slots=True)
class Budget:
    """Counts the events that can still be written, estimated from the usual number per step."""

    layers: int
    """Layers of the whole model, even if fewer are rehearsed: extrapolation needs the same steps in all rehearsals."""
    events: int = EVENTS_OF_SKIPPED_STEPS

    def take(self, steps: int) -> tuple[int, int]:
        """Returns how many skipped steps to write with the growth of the cache, and how many of these in full."""
        room, growth, whole_step = self.events // 2, self.layers * GROWTH_OF_A_LAYER, self.layers * STEP_OF_A_LAYER
        grown = min(steps, max(room // 2 // growth, 1))
        whole = min(grown, max(room - grown * growth, 0) // whole_step)
        self.events -= min(room, grown * growth + whole * whole_step)
        return grown, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingState:
    """Describes a tensor that each step replaces by a longer one: its blocks before and after the jump and after the
    last step, and its lengths in tokens after each skipped step."""

    before_jump: int
    after_jump: int
    after_last: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Jump:
    """Describes skipped steps. Events ``start`` to ``stop`` move the loop's state; the last step's events follow."""

    start: int
    stop: int
    states: tuple[GrowingState, ...]
    steps: int
    """The number of skipped steps."""


def write_skipped_steps(ledger: Ledger, jump: Jump, budget: Budget) -> None:
    """Replaces the jump by the skipped steps. Call this at the end of the last step."""
    writing = _Writing(ledger, jump)
    events = writing.steps(*budget.take(jump.steps))
    rest_of_jump = array("q", (event for event in writing.jumped if event not in writing.moved))
    ledger.rewrite(jump.start, len(ledger.events), rest_of_jump + events + writing.last_step())


@dataclass(slots=True)
class _Slot:
    """Tracks a block that every step allocates and the next step frees."""

    numbers: tuple[int, ...]
    """The birth events to use in turn; a growing state has one for each step."""
    alive: deque[int] = field(default_factory=deque)
    lengths: tuple[int, ...] = ()

    def bear(self, step: int) -> int:
        """Returns the birth event for one step."""
        event = self.numbers[step] if self.lengths else next(n for n in self.numbers if n not in self.alive)
        self.alive.append(event)
        return event

    def clear(self) -> Iterator[int]:
        """Yields the death event of the previous block, if there is one; a growing state keeps its last block."""
        if len(self.alive) > bool(self.lengths):
            yield -self.alive.popleft()


class _Writing:
    """Classifies each event of the last step by its role in the steps before."""

    def __init__(self, ledger: Ledger, jump: Jump) -> None:
        self._ledger, self._jump = ledger, jump
        self._step = ledger.events[jump.stop :]
        self.jumped = ledger.events[jump.start : jump.stop]
        self._births: dict[int, _Slot] = {}
        self._deaths: dict[int, _Slot] = {}
        """``_births`` and ``_deaths`` map each event of the last step that allocates or frees a block to its slot."""
        self._for_good: dict[int, deque[int]] = {}
        """Maps the last step's birth of a block that no step frees (scores) to the block's births in other steps."""
        self.moved: set[int] = set()
        """Events of the jump and the last step that are already written elsewhere."""
        self._states: list[_Slot] = []
        self._left: set[int] = set()
        """Deaths of blocks that only the prefill allocated: the first written step frees them."""
        self._find_states()
        self._match()

    def _find_states(self) -> None:
        in_step, in_jump = set(self._step), set(self.jumped)
        for state in self._jump.states:
            before, ahead, after = (block + 1 for block in (state.before_jump, state.after_jump, state.after_last))
            if after not in in_step or ahead not in in_jump:
                continue
            ledger, per_token = self._ledger, self._ledger.sizes[state.after_jump] // state.lengths[-1]
            copies = [ledger.copy(state.after_jump, per_token * length) + 1 for length in state.lengths[:-1]]
            slot = _Slot(numbers=(*copies, state.after_jump + 1), lengths=state.lengths)
            if -before in in_jump:
                slot.alive.append(before)
            self.moved |= {-before, ahead}
            self._births[after] = self._deaths[-ahead] = slot
            self._states.append(slot)

    def _match(self) -> None:
        """Pairs the blocks that a step leaves allocated with those that it frees, by size and in order."""
        sizes, in_step = self._ledger.sizes, set(self._step)
        ended: dict[int, deque[int]] = {}
        for event in self._step:
            if event < 0 and -event not in in_step and event not in self._deaths:
                ended.setdefault(sizes[-event - 1], deque()).append(event)
        in_jump = set(self.jumped)
        for event in self.jumped:
            if event < 0 and -event in in_jump:
                self.moved |= {event, -event}
        made: dict[int, deque[int]] = {}
        """The births of the jump that it did not free, by size."""
        for event in self.jumped:
            if event > 0 and event not in self.moved:
                made.setdefault(sizes[event - 1], deque()).append(event)
        for event in self._step:
            if event <= 0 or -event in in_step or event in self._births:
                continue
            size = sizes[event - 1]
            if ended.get(size):
                death = ended[size].popleft()
                spare = self._ledger.copy(-death - 1, size) + 1
                self._births[event] = self._deaths[death] = _Slot(numbers=(-death, spare), alive=deque([-death]))
            else:
                self._for_good[event] = made.get(size, deque())
        self._left = {event for events in ended.values() for event in events}

    def steps(self, grown: int, whole: int) -> "array[int]":
        """Returns the events of ``grown`` skipped steps with growing caches; ``whole`` of these steps are complete."""
        slots = self._births | self._deaths
        growth = array("q", (event for event in self._step if event in slots and slots[event].lengths))
        in_full = set(_spread(whole, grown))
        written = array("q")
        for number, step in enumerate(_spread(grown, self._jump.steps)):
            self._write(self._step if number in in_full else growth, step, written)
        if not whole:
            written.extend(event for event in self._step if event in self._left)
            self.moved |= self._left
        return written

    def _write(self, events: "array[int]", step: int, written: "array[int]") -> None:
        for event in events:
            if (slot := self._births.get(event)) is not None:
                written.append(slot.bear(step))
            elif (slot := self._deaths.get(event)) is not None:
                written.extend(slot.clear())
            elif event in self._for_good:
                if self._for_good[event]:
                    birth = self._for_good[event].popleft()
                    self.moved.add(birth)
                    written.append(birth)
            elif event not in self._left or event not in self.moved:
                written.append(event)
                self.moved |= {event} & self._left
        for slot in self._states:  # frees a shorter cache that something held beyond the step
            written.extend(slot.clear())

    def last_step(self) -> "array[int]":
        """Returns the events of the rehearsed step, which frees the blocks of the previous step."""
        events = array("q")
        for event in self._step:
            if (slot := self._deaths.get(event)) is not None and not slot.lengths:
                events.append(-slot.alive[0])
            elif event not in self.moved:
                events.append(event)
        return events


def _spread(count: int, total: int) -> Iterator[int]:
    """Returns ``count`` numbers of ``range(total)`` at even distances, including the last."""
    return (total * number // count - 1 for number in range(1, count + 1))
