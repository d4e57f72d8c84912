"""Lists transformers' optimizers (``training_args.py: OptimizerNames``) that can be rehearsed, and why others cannot.

``tests/settings/test_optimizer_verdicts.py`` fails if a new transformers has an optimizer that is not listed. A
rehearsal runs the optimizer's own code, so it needs the optimizer's package.
"""

import re
from typing import Any

REHEARSED = (
    *("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"),
    *("adamw_bnb_8bit", "adamw_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit"),
    *("paged_adamw_32bit", "paged_adamw_8bit", "paged_lion_32bit", "paged_lion_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
"""Optimizers of torch, transformers and bitsandbytes. Their rehearsals allocate the same as real runs on the CPU."""

OF_TORCH = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Optimizers of ``torch/optim``, which run on host tensors as on the device. Their state is a scalar or has the
parameter's shape, so a shard's part can be cut out. With 8-bit blocks or factored state this is impossible."""

OPTIMIZERS_OF_BITSANDBYTES = re.compile("8bit|bnb|paged|ademamix|lion")
"""Matches the names of bitsandbytes' optimizers (``transformers/trainer_optimizer.py: _get_bitsandbytes_optimizer``).
Names of torchao's optimizers that match too are refused (``REFUSED``)."""

KEEPS_UPDATES = "stable_adamw"
"""The optimizer that accumulates the part of its updates that rounding loses (Kahan summation; torch-optimi)."""

PACKAGES = {
    "galore_adamw": "galore_torch",
    "galore_adafactor": "galore_torch",
    "apollo_adamw": "apollo_torch",
    "lomo": "lomo_optim",
    "grokadamw": "grokadamw",
    "schedule_free_adamw": "schedulefree",
    "schedule_free_sgd": "schedulefree",
    "schedule_free_radam": "schedulefree",
    "stable_adamw": "optimi",
}
"""Optimizer of another package -> the package's Python name (``transformers/trainer_optimizer.py``)."""

_EIGHT_BIT = "--optim adamw_8bit keeps a quarter of AdamW's state"
_LAYERWISE = (
    "transformers supports it without accumulation and on one GPU only, but a plan accumulates to keep the effective "
    "batch"
)
_TORCHAO = "torchao compiles its step, and a compiled step cannot be recorded"
_PAGED = "a rehearsal runs on the CPU, where bitsandbytes has no paged state for this optimizer"
_OTHER_DEVICE = "it is for another kind of device"

REFUSED: dict[str, tuple[str, str]] = {
    "adamw_torch_4bit": (_TORCHAO, _EIGHT_BIT),
    "adamw_torch_8bit": (_TORCHAO, _EIGHT_BIT),
    "paged_ademamix_32bit": (_PAGED, "--optim ademamix is rehearsed"),
    "paged_ademamix_8bit": (_PAGED, "--optim ademamix_8bit is rehearsed"),
    "galore_adamw_8bit": ("its step passes values of tensors to bitsandbytes", "--optim galore_adamw is rehearsed"),
    "galore_adamw_layerwise": (_LAYERWISE, "--optim galore_adamw is rehearsed"),
    "galore_adamw_8bit_layerwise": (_LAYERWISE, "--optim galore_adamw is rehearsed"),
    "galore_adafactor_layerwise": (_LAYERWISE, "--optim galore_adafactor is rehearsed"),
    "apollo_adamw_layerwise": (_LAYERWISE, "--optim apollo_adamw is rehearsed"),
    "adalomo": ("its package needs a CUDA device when it is built", "--optim adafactor has equally little state"),
    "adamw_anyprecision": ("its package torchdistx does not support torch 2.0 and later", _EIGHT_BIT),
    "adamw_torch_xla": (_OTHER_DEVICE, "--optim adamw_torch_fused is for GPUs"),
    "adamw_torch_npu_fused": (_OTHER_DEVICE, "--optim adamw_torch_fused is for GPUs"),
}
"""Name -> why no plan can use the optimizer, and which one to use instead."""

PROJECTING = ("galore", "apollo")
"""Prefixes of optimizers with low-rank state for the layers that ``optim_target_modules`` names."""

NOT_COUNTED = {
    "paged_": (
        "large state of a paged optimizer: it is in CUDA's managed memory, outside torch's allocator, and moves to "
        "the host when the card is full"
    ),
    "galore": (
        "cuSOLVER's workspace while GaLore decomposes one gradient after another: as much as a few copies of the "
        "largest one, in float32"
    ),
}
"""Prefix of a name -> the memory of such an optimizer that an estimate leaves out."""


def optimizer_of(args: Any) -> str:
    """Returns the name of the optimizer in transformers' arguments or in knobs."""
    return str(getattr(args.optim, "value", args.optim))


def package_of(name: str) -> tuple[str, str] | None:
    """Returns the names in Python and for pip of the extra package that the optimizer needs; None if it needs none."""
    package = PACKAGES.get(name)
    return None if package is None else (package, {"optimi": "torch-optimi"}.get(package, package.replace("_", "-")))


def is_projecting(name: str) -> bool:
    """Returns whether an optimizer needs and uses ``optim_target_modules``."""
    return name.startswith(PROJECTING)
