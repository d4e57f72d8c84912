"""What a loss, or a number that a trainer logs, is a mean over: by it the guard adds up the parts of a micro-batch."""

from __future__ import annotations

from enum import StrEnum


class Basis(StrEnum):
    """What a loss, or a number that is logged, is a mean over."""

    WHOLE = "whole"
    """Its divisor is that of all micro-batches together: the parts' add up as they are."""
    UNITS = "units"
    """Rows, or pairs."""
    TOKENS = "tokens"
    """Those that count for the loss."""
    CHOSEN_TOKENS = "chosen tokens"
    REJECTED_TOKENS = "rejected tokens"
    LOWEST = "lowest"
    HIGHEST = "highest"
    SUM = "sum"
