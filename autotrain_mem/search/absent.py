"""Says which levers a card does not have, so that no plan for it pulls them."""

from __future__ import annotations

import re

from autotrain_mem.settings.levers import EIGHT_BIT, EXPANDABLE, LADDER
from autotrain_mem.types.hardware import ARCHITECTURES, Capability

OPTIMIZERS_OF_BITSANDBYTES = re.compile("8bit|bnb|paged|ademamix|lion")
"""Values of ``optim``: ``transformers/trainer_optimizer.py: _get_bitsandbytes_optimizer``; those that torchao or torch
implement are refused, or named otherwise (``checks.flags``)."""

_OF_BITSANDBYTES = frozenset({EIGHT_BIT, *(row.name for row in LADDER if row.quantizes)})


def absent_levers(capability: Capability, *, bitsandbytes_for_rocm: bool) -> frozenset[str]:
    """Returns the levers that such a card does not have.

    On AMD's cards segments never grow, and bitsandbytes runs where its package holds a library for ROCm and that has
    kernels for the architecture (``types.amd``, for both).

    Args:
        bitsandbytes_for_rocm: The installed bitsandbytes holds such a library.
    """
    if not isinstance(capability, str):
        return frozenset()
    runs = bitsandbytes_for_rocm and capability in ARCHITECTURES
    return frozenset({EXPANDABLE}) | (frozenset() if runs else _OF_BITSANDBYTES)
