"""Full cards: one simulated, which tells all owners apart, one real, and one whose library did not say much."""

from dataclasses import dataclass, replace

from report_examples import OWNERS, PLAN, RTX3060
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from autotrain_mem.report.error_text import error_text
from autotrain_mem.report.shortage_view import explained
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Owner, Phase
from autotrain_mem.types.report import Shortage

OWNED = {**OWNERS, Owner.ACTIVATIONS: 5_905_374_720, Owner.TEMPORARY: 1_100_000_256}
ALLOCATED = sum(OWNED.values())

SIMULATED = Shortage(
    phase=Phase.BACKWARD,
    step=12,
    requested_bytes=1_288_490_189,
    segment_bytes=1_289_748_480,
    total_bytes=RTX3060.total_bytes,
    free_bytes=300 * MIB,
    allocated_bytes=ALLOCATED,
    reserved_bytes=RTX3060.total_bytes - 505 * MIB,
    outside_bytes=205 * MIB,
    measured=OWNED,
)

NAMED = (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE)
ON_A_CARD = replace(
    SIMULATED,
    segment_bytes=SIMULATED.requested_bytes,
    free_bytes=100 * MIB,
    reserved_bytes=RTX3060.total_bytes - 1305 * MIB,
    measured={owner: OWNED[owner] for owner in NAMED},
)
"""Somebody else has 1000 MiB."""

MISHAP = replace(
    SIMULATED, phase=Phase.SAVE, free_bytes=6 * GIB, reserved_bytes=5 * GIB, allocated_bytes=5 * GIB, measured={}
)


@dataclass(frozen=True)
class ErrorView:
    """An error as wide as a console, among the views that rich prints."""

    error: AutofitError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(error_text(self.error, options.max_width))


VIEWS = {
    "error_shortage_simulated": ErrorView(explained(SIMULATED, PLAN, "--max_length 512 --load_in_4bit true")),
    "error_shortage_real": ErrorView(explained(ON_A_CARD, PLAN, "--optimizer_offload")),
    "error_shortage_unclear": ErrorView(explained(MISHAP, PLAN, None)),
}
