"""Views that the report's tests render: one job on ten cards, and full cards."""

from dataclasses import dataclass, replace

from nouns import TRL_DEFAULTS
from report_examples import ASSUMED_TIME, CHOSEN, OWNERS, PLAN, RTX3060, estimate
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from autotrain_mem.report.comparison_view import cards_view
from autotrain_mem.report.error_text import error_text
from autotrain_mem.report.shortage_view import explained
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Hardware, Knobs, Owner, Phase
from autotrain_mem.types.gpu_comparison import NOTHING_FITS, Cards, CardVerdict
from autotrain_mem.types.hardware import Topology
from autotrain_mem.types.report import Shortage

NO_FLASH = (
    "--attn_implementation flash_attention_2 needs compute capability 8.0, and this card has 7.5: "
    "its kernels are not made for Turing."
)
SPLIT = replace(TRL_DEFAULTS, per_device_train_batch_size=2, gradient_accumulation_steps=32, max_length=768)
OFFLOADED = replace(SPLIT, activation_offloading=True, optimizer_offload=True)
FOUR_BIT = replace(CHOSEN, load_in_4bit=True, activation_offloading=True)


def card(name: str, gib: float) -> Hardware:
    return replace(RTX3060, name=name, total_bytes=int(gib * GIB), free_bytes=int(gib * GIB))


def verdict(name: str, gib: float, level: str, knobs: Knobs, *, scale: float = 1.0) -> CardVerdict:
    return CardVerdict(
        hardware=card(name, gib), level=level, estimate=estimate(card(name, gib), scale=scale, knobs=knobs)
    )


def refused(name: str, gib: float, refusal: str) -> CardVerdict:
    return CardVerdict(hardware=card(name, gib), refusal=refusal)


SMALL = (
    refused("rtx3050", 5.8, NOTHING_FITS),
    verdict("rtx4060", 7.63, "LoRA on a 4-bit base, offloading", FOUR_BIT, scale=0.8),
    verdict("rtx3060", 11.63, "LoRA", CHOSEN),
    refused("t4", 14.56, NO_FLASH),
    verdict("rtx5060ti-16gb", 15.48, "rounding, offloading", replace(OFFLOADED, dtype="bfloat16"), scale=1.5),
)
LARGE = (
    verdict("rtx4090", 23.52, "lossless, offloading", OFFLOADED, scale=2.4),
    verdict("a100-40gb", 39.39, "lossless", replace(SPLIT, expandable_segments=True), scale=4),
    verdict("h100", 79.19, "lossless", replace(SPLIT, gradient_checkpointing=False), scale=7.5),
    verdict("rtx-pro-6000-blackwell", 94.97, "lossless", replace(SPLIT, gradient_checkpointing=False), scale=7.5),
)
UNKNOWN_SPEED = CardVerdict(
    hardware=card("141GiB", 141),
    level="lossless",
    estimate=replace(estimate(card("141GiB", 141), knobs=SPLIT), time=ASSUMED_TIME),
)
TEN = Cards(verdicts=(*SMALL, *LARGE, UNKNOWN_SPEED))
SHORTER = Cards(
    verdicts=(verdict("rtx4060", 7.63, "shorter rows", replace(FOUR_BIT, max_length=512), scale=0.8), *SMALL[2:4])
)
NONE = Cards(verdicts=(SMALL[0],))


def several(count: int, name: str, gib: float, level: str, scale: float = 1.0, nodes: int = 1) -> CardVerdict:
    processes, sharding = count * nodes, "ddp" if level == "rounding" else "fsdp2"
    knobs = replace(SPLIT, processes=processes, sharding=sharding if processes > 1 else None)
    one = verdict(name, gib, level, knobs, scale=scale)
    return replace(one, hardware=replace(one.hardware, topology=Topology(devices=count, nodes=nodes)))


SETS = Cards(
    verdicts=(
        several(1, "rtx4090", 23.52, "rounding"),
        several(2, "rtx4090", 23.52, "rounding", 2.2),
        several(4, "rtx4090", 23.52, "lossless", 2.0),
        several(4, "rtx4090", 23.52, "lossless", 1.2, nodes=2),
    )
)
CARDS = {"ten": TEN, "shorter_rows": SHORTER, "none": NONE, "sets": SETS}

# Full cards: one simulated, which tells all owners apart, one real, and one whose library did not say much.

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
    **{f"cards_{name}": cards_view(cards) for name, cards in CARDS.items()},
    "error_shortage_simulated": ErrorView(explained(SIMULATED, PLAN, "--max_length 512 --load_in_4bit true")),
    "error_shortage_real": ErrorView(explained(ON_A_CARD, PLAN, "--optimizer_offload")),
    "error_shortage_unclear": ErrorView(explained(MISHAP, PLAN, None)),
}
"""Rendered with all others in test_console.py."""
