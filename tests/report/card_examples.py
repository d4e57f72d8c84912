"""One job on ten cards, as the report's tests render it."""

from dataclasses import replace

from report_examples import ASSUMED_TIME, CHOSEN, DEFAULTS, RTX3060, estimate

from autotrain_mem.report.comparison_view import cards_view
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Hardware, Knobs
from autotrain_mem.types.gpu_comparison import NOTHING_FITS, Cards, CardVerdict
from autotrain_mem.types.hardware import Topology

NO_FLASH = (
    "--attn_implementation flash_attention_2 needs compute capability 8.0, and this card has 7.5: "
    "its kernels are not made for Turing."
)
SPLIT = replace(DEFAULTS, per_device_train_batch_size=2, gradient_accumulation_steps=32, max_length=768)
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

VIEWS = {
    "cards_ten": cards_view(TEN),
    "cards_shorter_rows": cards_view(SHORTER),
    "cards_none": cards_view(NONE),
    "cards_sets": cards_view(SETS),
}
