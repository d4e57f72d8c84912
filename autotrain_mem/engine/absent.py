"""Looks at what is installed here to say which levers a card does not have."""

from __future__ import annotations

from autotrain_mem.planner.absent import absent_levers
from autotrain_mem.spec import Hardware
from autotrain_mem.versions import has_rocm_library


def absent_from(hardware: Hardware) -> frozenset[str]:
    """Names the levers that a plan for this card may not pull. The packages of this machine stand for another's."""
    has_library = hardware.architecture is not None and has_rocm_library("bitsandbytes")
    return absent_levers(hardware.capability, bitsandbytes_for_rocm=has_library)
