"""Holds what the allocator keeps of the device after hours of rows of every length."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = (10, 100, 1000)
"""After how many optimizer steps the allocator is looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedOverSteps:
    """Holds what one order of the rows makes of one kind of segments, after each of :data:`STEPS`.

    >>> from autotrain_mem import ReservedOverSteps
    >>> order = ReservedOverSteps(reserved_bytes=(2**30, 2**30, 3 * 2**29), num_alloc_retries=(0, 0, 1))
    >>> order.last_bytes == 3 * 2**29
    True
    """

    reserved_bytes: tuple[int, ...]
    """Peak reserved until then, on a device without an end."""
    num_alloc_retries: tuple[int, ...]
    """How often everything cached was given back until then, on the device that there is."""

    @property
    def last_bytes(self) -> int:
        """Returns what is reserved after the last of the steps; 0 where there are none."""
        return next(reversed(self.reserved_bytes), 0)

    def moved(self, more_bytes: int) -> ReservedOverSteps:
        """Returns the same where all of it is so many bytes more, by what a probe measured."""
        moved = tuple(max(0, size + more_bytes) for size in self.reserved_bytes)
        return ReservedOverSteps(reserved_bytes=moved, num_alloc_retries=self.num_alloc_retries)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedByOrder:
    """Holds both orders of the rows, for one kind of segments.

    >>> from autotrain_mem import ReservedByOrder, ReservedOverSteps
    >>> shuffled = ReservedOverSteps(reserved_bytes=(5, 7, 9), num_alloc_retries=(0, 0, 0))
    >>> longest_first = ReservedOverSteps(reserved_bytes=(6, 6, 6), num_alloc_retries=(0, 0, 0))
    >>> ReservedByOrder(any_order=shuffled, longest_first=longest_first).longest_first.last_bytes
    6
    """

    any_order: ReservedOverSteps
    """As a sampler shuffles them, which is what TRL does by itself."""
    longest_first: ReservedOverSteps
    """The longest rows once before the first step, then any order: every run of this project."""

    def moved(self, more_bytes: int) -> ReservedByOrder:
        return ReservedByOrder(
            any_order=self.any_order.moved(more_bytes), longest_first=self.longest_first.moved(more_bytes)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedLengths:
    """Holds what sampled steps of rows of every length make the allocator reserve, in each of its modes.

    >>> from autotrain_mem import MixedLengths, ReservedByOrder, ReservedOverSteps
    >>> alike = ReservedOverSteps(reserved_bytes=(6, 6, 6), num_alloc_retries=(0, 0, 0))
    >>> both = ReservedByOrder(any_order=alike, longest_first=alike)
    >>> MixedLengths(native=both, expandable_segments=both).of(expandable_segments=True) == both
    True
    """

    native: ReservedByOrder
    """With a segment for each request that no cached block can serve: the allocator's default."""
    expandable_segments: ReservedByOrder
    """With ``expandable_segments:True``."""

    def of(self, *, expandable_segments: bool) -> ReservedByOrder:
        return self.expandable_segments if expandable_segments else self.native
