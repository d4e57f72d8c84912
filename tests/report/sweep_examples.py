"""Sweeps that the report's tests render: lists and matrices, narrow and wide, with points that were refused."""

from dataclasses import replace

from report_examples import CHOSEN, RTX3060, V100, estimate

from autotrain_mem.planning.comparisons import combinations
from autotrain_mem.report.sweep_view import sweep_view
from autotrain_mem.support.errors import AutofitError, BatchSplitError, ContextLengthError, UsageError
from autotrain_mem.types import Estimate
from autotrain_mem.types.gpu_comparison import Axis, AxisValue, Sweep, SweepPoint

TOO_LONG = ContextLengthError("--max_length 65536 is beyond the model's context of 32768 tokens", hint="Less.")
NO_GROUPS = BatchSplitError("3 rows do not divide\ninto groups of 8", hint="--num_generations 3")
NO_LORA = UsageError("--load_in_4bit without LoRA would train nothing.", hint="--use_peft")


def axis(name: str, *texts: str) -> Axis:
    return Axis(name=name, settings=tuple(AxisValue(name=name, text=text, value=_value(text)) for text in texts))


def _value(text: str) -> object:
    return int(text) if text.isdecimal() else text


def swept(*axes: Axis, **refusals: AutofitError) -> Sweep:
    """Each point needs a little more than the one before; ``point_3=error`` refuses the fourth."""
    points = []
    for number, settings in enumerate(combinations(axes)):
        knobs = replace(CHOSEN, **{axis.name: each.value for axis, each in zip(axes, settings, strict=True)})
        found: Estimate | AutofitError = estimate(scale=0.4 + 0.12 * number, knobs=knobs)
        points.append(SweepPoint(settings=settings, outcome=refusals.get(f"point_{number}", found)))
    return Sweep(axes=axes, points=tuple(points))


ROWS = axis("per_device_train_batch_size", "1", "2", "4", "8")
LIST = swept(axis("max_length", "4", "32", "128", "512", "65536"), point_4=TOO_LONG)
WORDS = swept(axis("optim", "adamw_torch_fused", "adafactor"))
MATRIX = swept(
    axis("max_length", "4", "32", "65536"), ROWS, point_5=NO_GROUPS, **{f"point_{n}": TOO_LONG for n in (8, 9, 10, 11)}
)
WIDE = swept(axis("max_length", "4", "32"), axis("per_device_train_batch_size", *map(str, range(1, 25))))
CUBE = swept(
    axis("per_device_train_batch_size", "1", "2"),
    axis("gradient_checkpointing", "true", "false"),
    axis("load_in_4bit", "true", "false"),
    axis("local_rollout_forward_batch_size", "8", "16"),
    point_2=NO_LORA,
    point_3=NO_LORA,
)
CARDS = Sweep(
    axes=(axis("gpu", "rtx3060", "v100-32gb"),),
    points=tuple(
        SweepPoint(
            settings=(AxisValue(name="gpu", text=card.name, value=card.name),), outcome=estimate(card, scale=1.5)
        )
        for card in (RTX3060, V100)
    ),
)

VIEWS = {
    "sweep_list": sweep_view(LIST),
    "sweep_words": sweep_view(WORDS),
    "sweep_matrix": sweep_view(MATRIX),
    "sweep_wide": sweep_view(WIDE),
    "sweep_cube": sweep_view(CUBE),
    "sweep_cards": sweep_view(CARDS),
}
"""Rendered with all others in test_console.py."""
