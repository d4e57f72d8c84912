"""Writes the decode steps that are not rehearsed into the record, between the rehearsed ones.

A decode step allocates everything anew, and its cache with one more token: ``torch.cat`` allocates a layer's longer
keys, and the shorter ones die (``transformers/cache_utils.py: DynamicLayer.update``). Each length leaves a hole that
the next one does not fit: this is how a generation fragments a caching allocator. So every skipped step is written with
the growth of its states. As many as the budget allows are written with everything else that the last step did, whose
blocks are allocated again. Other blocks that grow with the length (masks, attention scores) have the last step's size
in all of them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from autotrain_mem.rehearsal.trace.ledger import Ledger

EVENTS_OF_SKIPPED_STEPS = 100_000
"""At most so many events are written into one run for steps that were skipped, half of what is left for a generation.
Sixteen times as many reserve the same to the byte (GRPO of Qwen3-8B and Qwen2.5-0.5B, RLOO of Llama-3.2-1B, PPO of
Qwen2.5-0.5B, 128 to 1,024 tokens sampled), a quarter up to 3.5 % more. Where a long generation of a deep model has but
few of its steps written, segments of fixed size come out too large: GRPO of Qwen3-8B in 4 bits with 1,024 tokens at
21.7 GiB, and at 16.8 with sixteen times as many; expandable ones at 11.7 with either.

A step of Qwen3-8B in 4 bits has 7,900 events, 144 of which are the growth of its cache. Of the 94 skipped steps of a
first generation all are written with their growth and 4 with everything."""
GROWTH_OF_A_LAYER = 4
"""Events of a step by which a layer's keys and values are replaced by longer ones."""
STEP_OF_A_LAYER = 220
"""Events of a whole step for each layer, about: 7,900 of the 36 layers of Qwen3-8B in 4 bits. Fewer without."""


@dataclass(kw_only=True, slots=True)
class Budget:
    """Counts what is left of :data:`EVENTS_OF_SKIPPED_STEPS`, by the usual number of events of a step.

    A model with few of its layers has as many steps written as the whole model, so that the whole can be extrapolated.
    """

    layers: int
    """Layers of the whole model."""
    events: int = EVENTS_OF_SKIPPED_STEPS

    def take(self, steps: int) -> tuple[int, int]:
        """Returns how many of the skipped steps to write with their growth, and how many of these in full."""
        room, growth, whole_step = self.events // 2, self.layers * GROWTH_OF_A_LAYER, self.layers * STEP_OF_A_LAYER
        grown = min(steps, max(room // 2 // growth, 1))
        whole = min(grown, max(room - grown * growth, 0) // whole_step)
        self.events -= min(room, grown * growth + whole * whole_step)
        return grown, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingState:
    """One tensor that each step replaces by a longer one: its known blocks, and its lengths."""

    before_jump: int
    after_jump: int
    after_last: int
    lengths: tuple[int, ...]
    """In tokens, after each skipped step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Jump:
    """A place where steps were skipped: the jump's events from ``start`` to ``stop``, and the last step after them."""

    start: int
    stop: int
    states: tuple[GrowingState, ...]
    steps: int
    """How many were skipped."""


def write_skipped_steps(ledger: Ledger, jump: Jump, budget: Budget) -> None:
    """Writes the skipped steps in place of the jump; called when the last step has just ended."""
    writing = _Writing(ledger, jump)
    events = writing.steps(*budget.take(jump.steps))
    rest_of_jump = array("q", (event for event in writing.jumped if event not in writing.moved))
    ledger.rewrite(jump.start, len(ledger.events), rest_of_jump + events + writing.last_step())


@dataclass(slots=True)
class _Slot:
    """Blocks that every step allocates again, before or after the last step's block is freed."""

    numbers: tuple[int, ...]
    """The events of its births, in turn; a state has one for each step."""
    alive: deque[int] = field(default_factory=deque)
    lengths: tuple[int, ...] = ()

    def bear(self, step: int) -> int:
        """Returns the event of its birth in one step."""
        event = self.numbers[step] if self.lengths else next(n for n in self.numbers if n not in self.alive)
        self.alive.append(event)
        return event

    def clear(self) -> Iterator[int]:
        """Yields the event of its predecessor's death, if there is one; a state always has one."""
        if len(self.alive) > bool(self.lengths):
            yield -self.alive.popleft()


class _Writing:
    """Classifies each event of the last step by its role in the steps before."""

    def __init__(self, ledger: Ledger, jump: Jump) -> None:
        self._ledger, self._jump = ledger, jump
        self._step = ledger.events[jump.stop :]
        self.jumped = ledger.events[jump.start : jump.stop]
        self._births: dict[int, _Slot] = {}
        """Slots by the event that fills them in the last step."""
        self._deaths: dict[int, _Slot] = {}
        """Slots by the event that clears them in the last step."""
        self._for_good: dict[int, deque[int]] = {}
        """Allocations that a step leaves and no step frees (scores), by that of the last step: one for each step."""
        self.moved: set[int] = set()
        """Events of the jump, and of the last step, that have been written elsewhere."""
        self._states: list[_Slot] = []
        self._left: set[int] = set()
        """Deaths of what the prefill left and no later step makes again: the first step's to write."""
        self._find_states()
        self._match()

    def _find_states(self) -> None:
        in_step, in_jump = set(self._step), set(self.jumped)
        for state in self._jump.states:
            before, ahead, after = (block + 1 for block in (state.before_jump, state.after_jump, state.after_last))
            if after not in in_step or ahead not in in_jump:
                continue
            # Bytes per token are those of the longest.
            ledger, per_token = self._ledger, self._ledger.sizes[state.after_jump] // state.lengths[-1]
            copies = [ledger.copy(state.after_jump, per_token * length) + 1 for length in state.lengths[:-1]]
            slot = _Slot(numbers=(*copies, state.after_jump + 1), lengths=state.lengths)
            if -before in in_jump:
                slot.alive.append(before)
            self.moved |= {-before, ahead}
            self._births[after] = self._deaths[-ahead] = slot
            self._states.append(slot)

    def _match(self) -> None:
        """Pairs the blocks that a step leaves with those that it frees: the first replaces the first of the same
        size."""
        sizes, in_step = self._ledger.sizes, set(self._step)
        ended: dict[int, deque[int]] = {}
        for event in self._step:
            if event < 0 and -event not in in_step and event not in self._deaths:
                ended.setdefault(sizes[-event - 1], deque()).append(event)
        made = self._made_by_jump()
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

    def _made_by_jump(self) -> dict[int, deque[int]]:
        """Births within the jump that are for good, by size; those that are not were its tools."""
        in_jump = set(self.jumped)
        made: dict[int, deque[int]] = {}
        for event in self.jumped:
            if event < 0 and -event in in_jump:
                self.moved |= {event, -event}
        for event in self.jumped:
            if event > 0 and event not in self.moved:
                made.setdefault(self._ledger.sizes[event - 1], deque()).append(event)
        return made

    # -- what comes of it ----------------------------------------------------------------------------------------

    def steps(self, grown: int, whole: int) -> array[int]:
        """Returns the events of the skipped steps: the growth of all of them, and everything of some."""
        slots = self._births | self._deaths
        growth = array("q", (event for event in self._step if event in slots and slots[event].lengths))
        in_full = set(_spread(whole, grown))
        written = array("q")
        # The last of them is always written: the state that the last step meets is its.
        for number, step in enumerate(_spread(grown, self._jump.steps)):
            self._write(self._step if number in in_full else growth, step, written)
        if not whole:
            written.extend(event for event in self._step if event in self._left)
            self.moved |= self._left
        return written

    def _write(self, events: array[int], step: int, written: array[int]) -> None:
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
        for slot in self._states:  # where something holds on to the shorter one beyond the step
            written.extend(slot.clear())

    def last_step(self) -> array[int]:
        """Returns the rehearsed step, which frees what the step before left."""
        events = array("q")
        for event in self._step:
            slot = self._deaths.get(event)
            if slot is not None and not slot.lengths:
                events.append(-slot.alive[0])
            elif event not in self.moved:
                events.append(event)
        return events


def _spread(count: int, total: int) -> Iterator[int]:
    """Returns ``count`` of ``range(total)`` at even distances, including the last."""
    return (total * number // count - 1 for number in range(1, count + 1))
