"""Invariants of the simulator after any calls, under any settings and on any device."""

from collections.abc import Iterator
from itertools import pairwise

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from autotrain_mem.allocator.blocks import MIN_BLOCK_BYTES, SMALL_BYTES, DeviceBlock, Pool, round_size
from autotrain_mem.allocator.settings import LARGE_SEGMENT_BYTES, AllocatorSettings
from autotrain_mem.allocator.simulator import CachingAllocator, OutOfMemory
from autotrain_mem.support.units import KIB, MIB

STREAMS = st.integers(0, 2)
SIZES = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(1, 1 * MIB),
    st.sampled_from((MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 32 * MIB)),
    st.integers(1 * MIB, 48 * MIB),
)


ALLOCATOR_SETTINGS = st.builds(
    AllocatorSettings,
    grows=st.booleans(),
    max_split_bytes=st.sampled_from((None, None, 20 * MIB, 33 * MIB)),
    max_non_split_rounding_bytes=st.sampled_from((LARGE_SEGMENT_BYTES, 32 * MIB)),
    large_segment_bytes=st.sampled_from((LARGE_SEGMENT_BYTES, LARGE_SEGMENT_BYTES, 34 * MIB)),
    garbage_collection_threshold=st.sampled_from((0.0, 0.0, 0.3, 0.8)),
    per_process_memory_fraction=st.sampled_from((1.0, 1.0, 0.5, 0.9)),
)


def chains(allocator: CachingAllocator) -> Iterator[list[DeviceBlock]]:
    """Yields the blocks of each segment, in the order of their links."""
    known = [*allocator.active_blocks(), *allocator.free_blocks()]
    known += [block for pool in (allocator.small, allocator.large) for block in unmapped(pool)]
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
    """Plays any calls, beside a naive count of them; requests may fail."""

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
        self.held: dict[int, tuple[int, int]] = {}
        """Address -> size and stream."""
        self.refused = 0

    @rule(requested=SIZES, stream=STREAMS)
    def malloc(self, requested: int, stream: int) -> None:
        retries = self.allocator.num_alloc_retries
        try:
            address = self.allocator.malloc(requested, stream)
        except OutOfMemory as error:
            address, refused_bytes, self.refused = 0, error.refusal.requested_bytes, self.refused + 1
        else:
            refused_bytes = 0
        if not address:
            assert refused_bytes == requested
            assert self.allocator.num_alloc_retries == retries + bool(requested)
            return
        block = next(each for each in self.allocator.active_blocks() if each.address == address)
        asked = round_size(requested)
        assert block.size >= asked >= requested
        assert (block.stream, block.requested, block.pool.is_small) == (stream, requested, asked <= SMALL_BYTES)
        self.held[address] = block.size, stream
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self._free(data.draw(st.sampled_from([*self.held])))

    def _free(self, address: int) -> None:
        size, _ = self.held.pop(address)
        self.allocator.free(address)
        self.allocated -= size

    @precondition(lambda self: self.held)
    @rule(data=st.data(), stream=STREAMS)
    def use_on_another_stream_and_free(self, data: st.DataObject, stream: int) -> None:
        address = data.draw(st.sampled_from([*self.held]))
        own = self.held[address][1]
        self.allocator.record_stream(address, stream)
        self._free(address)
        waits = address in {block.address for block in self.allocator.active_blocks()}
        assert waits is (stream != own)

    @rule()
    def complete_events(self) -> None:
        self.allocator.complete_events()
        self.malloc(requested=1, stream=0)
        assert all(block.allocated for block in self.allocator.active_blocks()), "the next request frees the others"

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        assert all(block.allocated for block in self.allocator.active_blocks())
        assert not [chain for chain in chains(self.allocator) if len(chain) == 1 and is_free(chain[0])]

    @rule()
    def reset_peak_stats(self) -> None:
        self.allocator.reset_peak_stats()
        self.peak = self.allocated
        stats = self.allocator.memory_stats()
        assert all(stats[key] == stats[key.replace(".peak", ".current")] for key in stats if key.endswith(".peak"))

    @invariant()
    def everything_holds(self) -> None:
        walked = list(chains(self.allocator))
        self.blocks_tile_their_segments(walked)
        self.pools_contain_the_free_blocks(walked)
        self.bytes_add_up(walked)

    def blocks_tile_their_segments(self, walked: list[list[DeviceBlock]]) -> None:
        places = []
        for chain in walked:
            first, last, segment = chain[0], chain[-1], chain[0].segment
            places.append((first.address, last.address + last.size))
            for block, following in pairwise(chain):
                assert following.prev is block
                assert block.address + block.size == following.address
                assert all(getattr(block, name) == getattr(following, name) for name in ("pool", "stream", "segment"))
                assert not (is_free(block) and is_free(following)), "neighbours that could be merged"
                assert block.mapped or following.mapped
            for block in chain:
                assert block.address % MIN_BLOCK_BYTES == 0
                assert not block.mapped or block.size % MIN_BLOCK_BYTES == 0
                if not block.mapped:
                    assert segment is not None
                    assert (
                        (block.address - segment.address) % segment.page_bytes == block.size % segment.page_bytes == 0
                    )
            if segment is not None:
                assert first.address == segment.address
                assert sum(block.size for block in chain) == segment.size
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(places)))

    def pools_contain_the_free_blocks(self, walked: list[list[DeviceBlock]]) -> None:
        for pool in (self.allocator.small, self.allocator.large):
            linked = [block for chain in walked for block in chain if block.pool is pool]
            assert {id(block) for block in linked if is_free(block)} == {id(block) for block in pool.free_blocks()}
            assert {id(block) for block in linked if not block.mapped} == {id(block) for block in unmapped(pool)}
            keys = [(block.stream, block.size, block.address) for block in pool.free_blocks()]
            assert keys == sorted(keys)

    def bytes_add_up(self, walked: list[list[DeviceBlock]]) -> None:
        allocator, device = self.allocator, self.allocator.device
        mapped = [block.size for chain in walked for block in chain if block.mapped]
        active = allocator.active_blocks()
        free = sum(block.size for block in allocator.free_blocks())
        assert sum(block.size for block in active) + free == sum(mapped) == allocator.reserved_bytes
        assert allocator.reserved_bytes == device.taken_bytes <= allocator.peak_reserved_bytes
        assert {block.address: block.size for block in active if block.allocated} == {
            address: size for address, (size, _) in self.held.items()
        }
        assert (allocator.allocated_bytes, allocator.peak_allocated_bytes) == (self.allocated, self.peak)
        assert allocator.num_ooms == self.refused <= allocator.num_alloc_retries
        if device.capacity_bytes is not None:
            assert allocator.peak_reserved_bytes <= device.capacity_bytes
            assert device.free_bytes == device.capacity_bytes - allocator.reserved_bytes
        if allocator.allowed_bytes is not None:
            # The limit applies to the request, and an expandable segment maps whole pages.
            page = allocator.settings.large_segment_bytes if allocator.settings.grows else 0
            assert allocator.peak_reserved_bytes <= allocator.allowed_bytes + page
        shown = allocator.segments()
        assert sum(segment["total_size"] for segment in shown) == allocator.reserved_bytes
        assert sum(segment["allocated_size"] for segment in shown) == allocator.allocated_bytes
        assert sum(len(segment["blocks"]) for segment in shown) == len(mapped)

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for address in [*self.held]:
            self._free(address)
        self.allocator.empty_cache()
        assert self.allocator.reserved_bytes == self.allocator.device.taken_bytes == 0
        # Like torch, it keeps addresses for pages that it could not map.
        assert not [block for chain in chains(self.allocator) for block in chain if block.mapped]
        stats = self.allocator.memory_stats()
        assert not any(value for key, value in stats.items() if key.endswith(".current"))


AnyProgram.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestAnyProgram = AnyProgram.TestCase
