"""Looks at what is installed and set here to say what a card does without."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from autotrain_mem.allocator.settings import NEWER_VARIABLE, AllocatorSettings, environment_settings
from autotrain_mem.search.absent import absent_levers
from autotrain_mem.settings.levers import EXPANDABLE
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.versions import has_rocm_library
from autotrain_mem.types import Hardware

HIP_VARIABLE = "PYTORCH_HIP_ALLOC_CONF"
"""What a build for ROCm reads besides (``c10/cuda/CUDAAllocatorConfig.h: instance``)."""


def absent_from(hardware: Hardware) -> frozenset[str]:
    """Names the levers that a plan for this card may not pull. The packages of this machine stand for another's."""
    has_library = hardware.architecture is not None and has_rocm_library("bitsandbytes")
    return absent_levers(hardware.capability, bitsandbytes_for_rocm=has_library)


def settings_on(hardware: Hardware, environment: Mapping[str, str]) -> AllocatorSettings:
    """Reads what the user's environment sets of the allocator; a card whose segments cannot grow goes on without.

    Args:
        environment: What is set for the training process, over this one's environment.

    Raises:
        UsageError: torch would refuse the settings, or they have a name that is not read here.
    """
    settings = environment_settings(environment)
    if hardware.architecture is None:
        return settings
    if {**os.environ, **environment}.get(HIP_VARIABLE):
        raise UsageError(
            f"{HIP_VARIABLE} is not read by autofit, and torch for ROCm would.",
            hint=f"Unset it, and set {NEWER_VARIABLE} to the same: torch reads that on every card.",
        )
    grows = settings.expandable_segments and EXPANDABLE not in absent_from(hardware)
    return replace(settings, expandable_segments=grows)
