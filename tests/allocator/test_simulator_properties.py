"""The simulator under any settings, any device and any calls: what must hold after each of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from autotrain_mem.allocator.blocks import MIN_BLOCK_BYTES, SMALL_BYTES, DeviceBlock, Pool, round_size_by
from autotrain_mem.allocator.settings import LARGE_SEGMENT_BYTES, ROUNDUP_INTERVALS, AllocatorSettings
from autotrain_mem.allocator.simulator import CachingAllocator, OutOfMemory
from autotrain_mem.support.units import KIB, MIB

STREAMS = st.integers(0, 2)
SIZES = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(1, 1 * MIB),
    st.sampled_from((MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 32 * MIB)),
    st.integers(1 * MIB, 48 * MIB),
)


def divided() -> st.SearchStrategy[tuple[int, ...]]:
    parts = st.sampled_from((0, 1, 2, 4, 8))
    return parts.map(lambda each: (each,) * ROUNDUP_INTERVALS) | st.tuples(*[parts] * ROUNDUP_INTERVALS)


ALLOCATOR_SETTINGS = st.builds(
    AllocatorSettings,
    grows=st.booleans(),
    max_split_bytes=st.sampled_from((None, None, 20 * MIB, 33 * MIB)),
    max_non_split_rounding_bytes=st.sampled_from((LARGE_SEGMENT_BYTES, 32 * MIB)),
    large_segment_bytes=st.sampled_from((LARGE_SEGMENT_BYTES, LARGE_SEGMENT_BYTES, 34 * MIB)),
    roundup_power2_divisions=st.just((0,) * ROUNDUP_INTERVALS) | divided(),
    garbage_collection_threshold=st.sampled_from((0.0, 0.0, 0.3, 0.8)),
    per_process_memory_fraction=st.sampled_from((1.0, 1.0, 0.5, 0.9)),
)


@dataclass(frozen=True, kw_only=True)
class Held:
    """One live request."""

    address: int
    size: int
    stream: int


def chains(allocator: CachingAllocator) -> Iterator[list[DeviceBlock]]:
    """The blocks of each segment, in the order of their links: all that can be reached from any pool."""
    pools = (allocator.small, allocator.large)
    known = [*allocator.active_blocks(), *(block for pool in pools for block in (*pool.free_blocks(), *unmapped(pool)))]
    seen: set[int] = set()
    for block in known:
        if id(block) in seen:
            continue
        while block.prev is not None:
            block = block.prev
        chain = [block]
        while chain[-1].next is not None:
            chain.append(chain[-1].next)
        seen |= {id(each) for each in chain}
        yield chain


def unmapped(pool: Pool) -> list[DeviceBlock]:
    return [block for stream in range(3) for block in pool.unmapped(stream)]


def is_free(block: DeviceBlock) -> bool:
    return block.mapped and not block.allocated and not block.pending_events


class AnyProgram(RuleBasedStateMachine):
    """Plays any calls, beside a naive count of them; a refused request is part of it."""

    allocator: CachingAllocator

    @initialize(
        settings=ALLOCATOR_SETTINGS,
        capacity_mib=st.sampled_from((None, 24, 64, 150)),
        beside_mib=st.sampled_from((0, 0, 7)),
        ends_unevenly=st.booleans(),
    )
    def start(
        self, settings: AllocatorSettings, capacity_mib: int | None, beside_mib: int, ends_unevenly: bool
    ) -> None:
        assume(capacity_mib is not None or settings.per_process_memory_fraction == 1.0)
        capacity = None if capacity_mib is None else capacity_mib * MIB + 12_345 * ends_unevenly
        total = None if capacity is None else capacity + beside_mib * MIB
        self.allocator = CachingAllocator(capacity, settings, total_bytes=total)
        self.allocated = self.peak = 0
        self.held: list[Held] = []
        self.used_elsewhere: set[int] = set()
        self.waiting: list[Held] = []
        self.done = 0
        """How many of those that wait need to wait no longer."""
        self.refused = 0

    # -- calls ---------------------------------------------------------------------------------------------------------

    @rule(requested=SIZES, stream=STREAMS)
    def malloc(self, requested: int, stream: int) -> None:
        if requested:
            self._waited(self.done)
        retries = self.allocator.num_alloc_retries
        try:
            address = self.allocator.malloc(requested, stream)
        except OutOfMemory as error:
            address, self.refused, refused_bytes = 0, self.refused + 1, error.refusal.requested_bytes
        else:
            refused_bytes = 0
        if self.allocator.num_alloc_retries > retries:
            self._waited(len(self.waiting))
        if not address:
            assert refused_bytes == requested
            assert self.allocator.num_alloc_retries == retries + bool(requested)
            return
        block = next(each for each in self.allocator.active_blocks() if each.address == address)
        asked = round_size_by(self.allocator.settings, requested)
        assert block.size >= asked >= requested
        assert (block.stream, block.requested, block.pool.is_small) == (stream, requested, asked <= SMALL_BYTES)
        held = Held(address=address, size=block.size, stream=stream)
        self.held.append(held)
        self.allocated += held.size
        self.peak = max(self.peak, self.allocated)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self._free(data.draw(st.integers(0, len(self.held) - 1)))

    def _free(self, index: int) -> None:
        held = self.held.pop(index)
        self.allocator.free(held.address)
        self.allocated -= held.size
        if held.address in self.used_elsewhere:
            self.used_elsewhere.remove(held.address)
            self.waiting.append(held)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), stream=STREAMS)
    def record_stream(self, data: st.DataObject, stream: int) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        held = self.held[index]
        self.allocator.record_stream(held.address, stream)
        if stream != held.stream:
            self.used_elsewhere.add(held.address)

    @rule()
    def complete_events(self) -> None:
        self.allocator.complete_events()
        self.done = len(self.waiting)

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        self._waited(len(self.waiting))
        assert not [chain for chain in chains(self.allocator) if len(chain) == 1 and is_free(chain[0])]

    @rule()
    def reset_peak_stats(self) -> None:
        self.allocator.reset_peak_stats()
        self.peak = self.allocated
        stats = self.allocator.memory_stats()
        assert all(stats[key] == stats[key.replace(".peak", ".current")] for key in stats if key.endswith(".peak"))

    def _waited(self, blocks: int) -> None:
        """The first so many of what other streams used are free."""
        del self.waiting[:blocks]
        self.done = 0

    # -- what holds ----------------------------------------------------------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        """Walks the blocks once for all that must hold of them."""
        walked = list(chains(self.allocator))
        self.blocks_tile_their_segments(walked)
        self.no_neighbours_are_free_alike(walked)
        self.blocks_are_aligned_and_pages_mapped_whole(walked)
        self.pools_hold_what_is_free_and_nothing_else(walked)
        self.what_is_active_and_what_is_free_is_what_is_reserved(walked)
        self.reserved_stays_within_its_limits()
        self.statistics_are_those_of_a_plain_count()
        self.a_snapshot_shows_the_same(walked)

    def blocks_tile_their_segments(self, walked: list[list[DeviceBlock]]) -> None:
        places = []
        for chain in walked:
            for block, following in pairwise(chain):
                assert following.prev is block
                assert block.address + block.size == following.address
                assert all(getattr(block, name) == getattr(following, name) for name in ("pool", "stream", "segment"))
            first, last = chain[0], chain[-1]
            places.append((first.address, last.address + last.size))
            if first.segment is not None:
                assert first.address == first.segment.address
                assert sum(block.size for block in chain) == first.segment.size
        places.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(places))

    def no_neighbours_are_free_alike(self, walked: list[list[DeviceBlock]]) -> None:
        for chain in walked:
            for block, following in pairwise(chain):
                assert not (is_free(block) and is_free(following))
                assert block.mapped or following.mapped

    def blocks_are_aligned_and_pages_mapped_whole(self, walked: list[list[DeviceBlock]]) -> None:
        for chain in walked:
            segment = chain[0].segment
            for block in chain:
                assert block.address % MIN_BLOCK_BYTES == 0
                assert not block.mapped or block.size % MIN_BLOCK_BYTES == 0
                if not block.mapped:
                    assert segment is not None
                    assert (block.address - segment.address) % segment.page_bytes == 0
                    assert block.size % segment.page_bytes == 0

    def pools_hold_what_is_free_and_nothing_else(self, walked: list[list[DeviceBlock]]) -> None:
        for pool in (self.allocator.small, self.allocator.large):
            linked = [block for chain in walked for block in chain if block.pool is pool]
            assert {id(block) for block in linked if is_free(block)} == {id(block) for block in pool.free_blocks()}
            assert {id(block) for block in linked if not block.mapped} == {id(block) for block in unmapped(pool)}
            keys = [(block.stream, block.size, block.address) for block in pool.free_blocks()]
            assert keys == sorted(keys)

    def what_is_active_and_what_is_free_is_what_is_reserved(self, walked: list[list[DeviceBlock]]) -> None:
        allocator = self.allocator
        mapped = sum(block.size for chain in walked for block in chain if block.mapped)
        active = sum(block.size for block in allocator.active_blocks())
        free = sum(block.size for pool in (allocator.small, allocator.large) for block in pool.free_blocks())
        assert active + free == mapped == allocator.reserved_bytes == allocator.device.taken_bytes
        assert allocator.allocated_bytes == active - sum(held.size for held in self.waiting)
        assert {held.address for held in self.held} <= {block.address for block in allocator.active_blocks()}

    def reserved_stays_within_its_limits(self) -> None:
        allocator = self.allocator
        capacity = allocator.device.capacity_bytes
        if capacity is not None:
            assert allocator.peak_reserved_bytes <= capacity
            assert allocator.device.free_bytes == capacity - allocator.reserved_bytes
        if allocator.allowed_bytes is not None:
            # The limit is held against what is asked for, and an expandable segment maps whole pages.
            page = allocator.settings.large_segment_bytes if allocator.settings.grows else 0
            assert allocator.peak_reserved_bytes <= allocator.allowed_bytes + page

    def statistics_are_those_of_a_plain_count(self) -> None:
        allocator = self.allocator
        assert (allocator.allocated_bytes, allocator.peak_allocated_bytes) == (self.allocated, self.peak)
        assert allocator.peak_reserved_bytes >= allocator.reserved_bytes >= 0
        assert allocator.num_ooms == self.refused <= allocator.num_alloc_retries

    def a_snapshot_shows_the_same(self, walked: list[list[DeviceBlock]]) -> None:
        shown = self.allocator.segments()
        assert sum(segment["total_size"] for segment in shown) == self.allocator.reserved_bytes
        assert sum(segment["allocated_size"] for segment in shown) == self.allocator.allocated_bytes
        shown_blocks = sum(len(segment["blocks"]) for segment in shown)
        assert shown_blocks == sum(block.mapped for chain in walked for block in chain)

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        while self.held:
            self._free(0)
        self.empty_cache()
        assert self.allocator.reserved_bytes == self.allocator.device.taken_bytes == 0
        # Addresses for pages that could not be had are kept, as by torch.
        assert not [block for chain in chains(self.allocator) for block in chain if block.mapped]
        stats = self.allocator.memory_stats()
        assert not any(value for key, value in stats.items() if key.endswith(".current"))


AnyProgram.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestAnyProgram = AnyProgram.TestCase
