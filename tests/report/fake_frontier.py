"""A frontier of three levels, of which one holds nothing."""

from dataclasses import replace

from report_examples import CHOSEN, RTX3060, estimate

from autotrain_mem.types.estimate import candidate
from autotrain_mem.types.gpu_comparison import Frontier, Most, Reach

FULL = estimate(RTX3060, knobs=replace(CHOSEN, use_peft=False, max_length=1024))
LORA = estimate(RTX3060, knobs=replace(CHOSEN, max_length=4096))

FRONTIER = Frontier(
    name="max_length",
    gpu="rtx3060",
    budget_bytes=FULL.budget_bytes,
    reaches=(
        Reach(
            level="lossless",
            most=Most(name="max_length", value=1024, next_value=1088, next_required_bytes=FULL.budget_bytes + 1),
            point=candidate(FULL, level="lossless"),
        ),
        Reach(level="rounding"),
        Reach(
            level="LoRA",
            most=Most(name="max_length", value=4096, next_value=None, stopped_by="the model's context"),
            point=candidate(LORA, level="LoRA"),
        ),
    ),
)
