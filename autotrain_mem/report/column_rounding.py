"""Sizes in one unit and with one number of digits, so that a reader can add a column up and arrive at its total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotrain_mem.units import format_bytes, parse_bytes

STEPS_PER_UNIT = 100
"""A column counts in hundredths of its unit, called steps here: 8.41 is 841 steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The unit of a column.

    Example: sizes of 4, 4 and 3 thousandths of a unit sum to 0.011, which reads 0.01; ``share`` writes the parts as
    0.01, 0.00 and 0.00, where rounding each by itself would show three times 0.00.
    """

    unit: str
    unit_bytes: int

    def steps(self, size_bytes: int) -> int:
        """The size in hundredths of the unit, rounded half up."""
        return (2 * size_bytes * STEPS_PER_UNIT + self.unit_bytes) // (2 * self.unit_bytes)

    def share(self, total_steps: int, sizes_bytes: Sequence[int]) -> list[int]:
        """Round the parts, each up or down, so that they sum to ``total_steps``, the total already rounded either way.

        What is lost by rounding down goes to the parts that lost most (Hamilton's method of apportionment).

        Raises:
            ValueError: the parts do not sum to the total, so that no rounding makes the column add up.
        """
        floors = [size * STEPS_PER_UNIT // self.unit_bytes for size in sizes_bytes]
        missing = total_steps - sum(floors)
        if abs(sum(sizes_bytes) * STEPS_PER_UNIT - total_steps * self.unit_bytes) >= self.unit_bytes:
            raise ValueError(f"parts of {sum(sizes_bytes)} bytes do not sum to {self.write(total_steps)} {self.unit}")
        lost = [size * STEPS_PER_UNIT % self.unit_bytes for size in sizes_bytes]
        rounded_up = sorted(range(len(lost)), key=lambda part: -lost[part])[:missing]
        return [floor + (part in rounded_up) for part, floor in enumerate(floors)]

    def write(self, steps: int) -> str:
        """``write(841) == "8.41"``."""
        return f"{steps / STEPS_PER_UNIT:.2f}"


def scale_for(largest_bytes: int) -> Scale:
    """The unit that ``format_bytes`` takes for the largest size of a column."""
    unit = format_bytes(largest_bytes).split()[-1]
    return Scale(unit=unit, unit_bytes=parse_bytes(f"1 {unit}"))
