"""Replays hundreds of steps with rows of every length, to predict reserved memory after hours of training.

A rehearsal runs two steps of the worst batch. A real run has batches of every length, and blocks that the allocator
cached for one length do not fit the next. Two rehearsals, of the longest rows and of shorter ones, show how each block
grows with the length (:class:`BlockSizes`), so that a step of any length can be replayed. A step that leaves the
allocator's state unchanged is replayed once.

Example: Qwen2.5-0.5B with LoRA, without checkpointing, with 8 rows of up to 1,024 tokens and fixed-size segments
reserves 11.6 GiB for its worst batch, 15.6 GiB after 300 steps in any order, 11.6 GiB if the longest rows run first.

Known limits: the micro-batches of a step have the same length, except for small blocks. More than :data:`CLASSES`
distinct lengths are grouped. Blocks of up to 1 MiB, which have their own segments, count with the most that any length
needs.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from autotrain_mem.allocator.blocks import MIN_BLOCK_BYTES, SMALL_BYTES
from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.allocator.simulator import CachingAllocator
from autotrain_mem.estimator.depth.alignment import name_of
from autotrain_mem.estimator.step_parts import FOREIGN, Kind, TraceSpan, step_parts
from autotrain_mem.types import CACHE_EMPTIED, Block, DataProfile, MixedLengths, Trace
from autotrain_mem.types.estimate import STEPS

CLASSES = 8
"""The number of distinct lengths to replay, each of which makes planning slower."""
SMALL_CLASSES = 4
"""The number of distinct lengths for small blocks, which have few segments."""
SEED = 0

NEAR = 0.005
"""The accepted relative error of a size: a row may have one token less, as with shifted labels."""
LEAST_POWER = 1.2
"""A size that grows by more than this power of the tokens is not linear in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """Holds a rehearsal of rows with ``tokens`` tokens each."""

    tokens: int
    trace: Trace


class BlockSizes:
    """Computes the sizes of a rehearsal's blocks at any length, from a second rehearsal with another length.

    A block has ``s`` bytes with rows of ``a`` tokens and ``t`` bytes with rows of ``b``. It is constant (``s == t``),
    linear in the tokens (a line through both points) or, if it grows faster, a power of them, as a mask grows with
    their square. Blocks of the two rehearsals are paired by module and owner; layers are not distinguished.

    Example: with 8 rows of 1,024 and of 320 tokens in bfloat16, hidden states of 14 and 4.375 MiB take 7 MiB at 512
    tokens, and a mask of 16 and 1.5625 MiB takes 4 MiB.
    """

    def __init__(self, here: Rehearsed, other: Rehearsed) -> None:
        self._here, self._other = here, other
        mine, others = _by_place(here.trace), _by_place(other.trace)
        ratio = other.tokens / here.tokens
        numbers: dict[tuple[Hashable, int], int] = {}
        self._pairs: list[tuple[int, int]] = []
        for place, sizes in mine.items():
            for size, partner in _partners(sizes, others.get(place, Counter()), ratio).items():
                numbers[place, size] = len(self._pairs)
                self._pairs.append((size, partner))
        self._numbers = [numbers[_place(block), block.size_bytes] for block in here.trace.blocks]

    def at(self, tokens: int) -> list[int]:
        """Returns the size of every block, in bytes, with rows of this many tokens."""
        a, b = self._here.tokens, self._other.tokens
        sizes = []
        for size, partner in self._pairs:
            if size == partner or a == b or not size or not partner:
                sizes.append(size)
                continue
            power = math.log(partner / size) / math.log(b / a)
            by_power, by_line = size * math.pow(tokens / a, power), size + (partner - size) * (tokens - a) / (b - a)
            sizes.append(max(MIN_BLOCK_BYTES, round(by_power if power > LEAST_POWER else by_line)))
        return [sizes[number] for number in self._numbers]


def _place(block: Block) -> Hashable:
    return block.owner, name_of(block.module).pattern, block.stream


def _by_place(trace: Trace) -> dict[Hashable, Counter[int]]:
    places: dict[Hashable, Counter[int]] = defaultdict(Counter)
    for block in trace.blocks:
        places[_place(block)][block.size_bytes] += 1
    return places


def _partners(mine: Counter[int], others: Counter[int], ratio: float) -> dict[int, int]:
    """Maps each block size of a module and owner to the size of the corresponding blocks in the other rehearsal.

    A size that is constant, or linear or quadratic in the tokens, is preferred; of several, the one with the closest
    number of blocks. The rest is paired in order if equally many are left, and is otherwise assumed to be linear.
    """
    partners: dict[int, int] = {}
    for size, count in mine.items():
        near = [_nearest(others, size * ratio**power) for power in (0, 1, 2)]
        if plain := [each for each in near if each is not None]:
            partners[size] = min(plain, key=lambda each: abs(others[each] - count))
    left = sorted(mine.keys() - partners.keys())
    right = sorted(others.keys() - {*partners.values()})
    if len(left) == len(right):
        return partners | dict(zip(left, right, strict=True))
    return partners | {size: round(size * ratio) for size in left}


def _nearest(sizes: Counter[int], wanted: float) -> int | None:
    """Returns a size that equals the wanted one up to :data:`NEAR`; None if there is none."""
    nearest = min(sizes, key=lambda each: abs(each - wanted), default=None)
    return nearest if nearest is not None and abs(nearest - wanted) <= NEAR * wanted else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnBatches:
    """Holds the longest row of each batch, in an order in which a sampler may draw them."""

    tokens: Sequence[int]
    each_step: int = 1
    """The number of batches in an optimizer step."""


def drawn_batches(profile: DataProfile, *, rows: int, each_step: int, limit: int | None, longest: int) -> DrawnBatches:
    """Draws the batches of as many steps as the last entry of :data:`STEPS`; every call draws the same.

    Args:
        rows: Rows in a batch.
        each_step: Batches in an optimizer step.
        limit: The length to which rows are truncated; None for no limit.
        longest: Tokens of the longest rows, as rehearsed; no batch is longer.
    """
    kept = profile.kept_lengths(limit)
    source, lengths, weights = random.Random(SEED), list(kept), list(kept.values())
    count = STEPS[-1] * each_step
    drawn = source.choices(lengths, weights, k=count * rows)
    tokens = [min(longest, max(drawn[at : at + rows])) for at in range(0, len(drawn), rows)]
    # Rounded to evenly spaced lengths; the longest and the shortest are unchanged.
    least, most = min(tokens), max(tokens)
    width = max(1.0, (most - least) / (CLASSES - 1))
    rounded = [min(most, round(least + round((each - least) / width) * width)) for each in tokens]
    return DrawnBatches(tokens=rounded, each_step=each_step)


def mixed_lengths(
    longest: Rehearsed,
    shorter: Rehearsed,
    batches: DrawnBatches,
    settings: AllocatorSettings,
    *,
    empties_cache: bool = False,
) -> MixedLengths:
    """Replays sampled steps after the longest rows, with both kinds of segments. ``empties_cache``: whether
    ``torch_empty_cache_steps`` releases the cache that the longest rows left. Later steps then cannot reuse it, but its
    bytes still count. Raises UnclearStepsError if steps cannot be separated, or use several streams."""
    templates = _templates(longest, shorter, accumulates=batches.each_step > 1)
    looked_at = {steps * batches.each_step for steps in STEPS}

    def reserved(grows: bool) -> tuple[int, ...]:
        segments = replace(settings, grows=grows)
        # Small blocks are counted after all lengths have run, in every combination for a step's micro-batches, since
        # gradients of a short micro-batch have other addresses than those of the longest.
        small = Run(templates, segments, longest_first=True, is_small=True)
        every = sorted({*batches.tokens})
        spread = sorted({*every[:: max(1, -(-len(every) // SMALL_CLASSES))], every[-1]})
        small_bytes = max(small.step(*tokens) for tokens in product(spread, repeat=small.micro_batches))

        def after_steps(*, longest_first: bool) -> list[int]:
            run = Run(templates, segments, longest_first=longest_first)
            after_each = [run.step(tokens) + small_bytes for tokens in batches.tokens]
            return [size for number, size in enumerate(after_each, 1) if number in looked_at]

        first = after_steps(longest_first=True)
        return tuple(map(max, first, after_steps(longest_first=False)) if empties_cache else first)

    return MixedLengths.of_both(reserved)


def reserved_after(
    longest: Rehearsed,
    shorter: Rehearsed,
    tokens: Sequence[int],
    settings: AllocatorSettings,
    *,
    longest_first: bool,
    accumulates: bool = False,
) -> list[int]:
    """Returns the reserved bytes after each batch of these lengths, on a device without a limit. Lengths are not
    rounded, so that a real run of the same rows can be compared. Raises as :func:`mixed_lengths` does."""
    templates = _templates(longest, shorter, accumulates=accumulates)
    large, small = (Run(templates, settings, longest_first=longest_first, is_small=each) for each in (False, True))
    return [large.step(each) + small.step(each) for each in tokens]


class Template:
    """Provides the events and block sizes of a rehearsal's parts at any length."""

    def __init__(self, rehearsed: Rehearsed, other: Rehearsed, *, accumulates: bool) -> None:
        self.tokens = rehearsed.tokens
        self.parts = step_parts(rehearsed.trace, accumulates=accumulates)
        self._sizes = BlockSizes(rehearsed, other)
        self._compiled: dict[tuple[int, int, bool], tuple[list[int], list[int]]] = {}

    def compiled(self, part: TraceSpan, tokens: int, *, is_small: bool) -> tuple[list[int], list[int]]:
        """Returns a part's events within one pool, and the sizes of all blocks at a length."""
        key = (id(part), tokens, is_small)
        if key not in self._compiled:
            sizes = [(size + 511) & -512 for size in self._sizes.at(tokens)]
            events = [
                event
                for event in part.events
                if event >= FOREIGN or event == CACHE_EMPTIED or (sizes[abs(event) - 1] <= SMALL_BYTES) is is_small
            ]
            self._compiled[key] = events, sizes
        return self._compiled[key]


Templates = tuple[Template, Template]
"""Templates of the longest rows and of shorter ones."""


def _templates(longest: Rehearsed, shorter: Rehearsed, *, accumulates: bool) -> Templates:
    return Template(longest, shorter, accumulates=accumulates), Template(shorter, longest, accumulates=accumulates)


class Run:
    """Replays steps of any length, one after another, in one pool of the allocator on an unlimited device.

    Small blocks, up to 1 MiB, have their own segments (``CUDACachingAllocator.cpp: get_pool``).
    ``longest_first``: the longest rows run forward and backward before the first step, and leave only
    cached memory (``training.process.longest_batch``).
    """

    def __init__(
        self, templates: Templates, settings: AllocatorSettings, *, longest_first: bool, is_small: bool = False
    ) -> None:
        self.allocator = CachingAllocator(None, settings)
        self._templates, self._is_small = templates, is_small
        self.micro_batches = len(templates[0].parts.later)
        """Number of rehearsed micro-batches of a step, which stand for all."""
        self._begun = False
        self._carried: dict[Kind, list[int]] = {}
        self._still: set[tuple[int, ...]] = set()
        """Token counts of steps that leave the allocator's current state unchanged."""
        template = templates[0]
        self._play(template, template.parts.load, template.tokens)
        if longest_first:  # beside placeholders for later steps' memory (``training.process.longest_batch``)
            _, sizes = template.compiled(template.parts.load, template.tokens, is_small=is_small)
            standing_in = [sizes[number - 1] for number in template.parts.beside_trial]
            held = [self.allocator.malloc(size) for size in standing_in if (size <= SMALL_BYTES) is is_small]
            self._play(template, template.parts.trial, template.tokens)
            for address in held:
                self.allocator.free(address)
            self._end_carried()

    def step(self, *tokens: int) -> int:
        """Replays a step with this many tokens, unless it would change nothing; returns the reserved bytes."""
        if tokens not in self._still:
            before = self._state()
            longest, shorter = self._templates
            for number in range(self.micro_batches):
                length = tokens[min(number, len(tokens) - 1)]
                # The template that is nearer by the ratio of lengths has the most similar number of loss chunks.
                template = longest if length * length >= longest.tokens * shorter.tokens else shorter
                parts = template.parts.later if self._begun else template.parts.first
                self._play(template, parts[number], length)
            self._end_carried()
            if self._begun and self._state() == before:
                self._still.add(tokens)
            else:
                self._still.clear()
            self._begun = True
        return self.allocator.peak_reserved_bytes

    def _play(self, template: Template, part: TraceSpan, tokens: int) -> None:
        events, sizes = template.compiled(part, tokens, is_small=self._is_small)
        alive, carried, free = dict[int, int](), self._carried, self.allocator.free
        for event in events:
            if event >= FOREIGN:
                if waiting := carried.get(part.foreign[event - FOREIGN]):
                    free(waiting.pop())
            elif event > 0:
                alive[event] = self.allocator.malloc(sizes[event - 1])
            elif event == CACHE_EMPTIED:
                self.allocator.empty_cache()
            else:
                free(alive.pop(-event))
        for number, address in alive.items():
            if number not in part.lasting:
                carried.setdefault(part.kept[number], []).append(address)

    def _end_carried(self) -> None:
        """Frees the blocks that a step left for the next one, such as a batch or a loss."""
        for addresses in self._carried.values():
            for address in addresses:
                self.allocator.free(address)
        self._carried.clear()

    def _state(self) -> object:
        """Returns a key of the allocator's state: the addresses of free blocks, which determine all others."""
        return [(block.address, block.size) for block in self.allocator.free_blocks()], self.allocator.reserved_bytes
