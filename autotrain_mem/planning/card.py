"""The device that a job is planned for: what a run may take of it, and what it does without.

What is installed and set here stands for another machine's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotrain_mem.allocator.settings import NEWER_VARIABLE, AllocatorSettings, environment_settings
from autotrain_mem.estimator.replay import Room
from autotrain_mem.estimator.vllm_share import asleep_bytes, vllm_share_bytes
from autotrain_mem.settings.levers import EIGHT_BIT, EXPANDABLE, LADDER
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.versions import has_rocm_library
from autotrain_mem.types import Hardware, Job, Knobs
from autotrain_mem.types.hardware import ARCHITECTURES, Capability

HIP_VARIABLE = "PYTORCH_HIP_ALLOC_CONF"
"""What a build for ROCm reads besides (``c10/cuda/CUDAAllocatorConfig.h: instance``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One of the devices that a job is planned for, and what a run may take of it."""

    hardware: Hardware
    job: Job
    """Whose environment sets the allocator, and whose vLLM engine may take a share."""
    defaults: Knobs
    headroom_bytes: int | None = None
    """What is left free on the device; None for the default."""

    @property
    def budget_bytes(self) -> int:
        """Returns what a run may take of the device; less where the environment leaves the allocator a fraction."""
        allowed = int(self.settings.per_process_memory_fraction * self.hardware.total_bytes)
        return min(self.hardware.budget_bytes(self.headroom_bytes), allowed + self.outside_bytes(self.defaults))

    def outside_bytes(self, knobs: Knobs) -> int:
        """Sums what the run holds outside the trainer's own allocator at its least: of an engine that sleeps, what it
        keeps then."""
        communicators_bytes = self.hardware.communicator_bytes * knobs.communicators
        return self.hardware.non_torch_bytes + communicators_bytes + self.vllm_asleep_bytes

    @property
    def vllm_share_bytes(self) -> int:
        """Computes what a vLLM engine on the same card takes for itself."""
        return vllm_share_bytes(self.job, self.hardware)

    @property
    def vllm_asleep_bytes(self) -> int:
        """Computes what that engine keeps while it sleeps; all of its share where it never does."""
        return asleep_bytes(self.job, self.hardware)

    @property
    def settings(self) -> AllocatorSettings:
        """Reads what the user's environment sets of the allocator; raises UsageError for what torch would refuse."""
        return settings_on(self.hardware, self.job.environment)

    @property
    def caches(self) -> bool:
        """Tells whether the device has torch's caching allocator: the host has not."""
        return self.hardware.origin != "cpu"

    def room(self, knobs: Knobs) -> Room:
        """Returns what the trainer's allocator can have of the budget."""
        return Room(
            capacity_bytes=max(0, self.budget_bytes - self.outside_bytes(knobs)),
            total_bytes=self.hardware.total_bytes,
            settings=self.settings,
            caches=self.caches,
        )

    @property
    def endless_room(self) -> Room:
        """A device without an end, so that what is reserved of it is the same for every card with these kernels."""
        return Room(capacity_bytes=None, settings=self.settings, caches=self.caches).endless


# -- what it does without ----------------------------------------------------------------------------------------------

_OF_BITSANDBYTES = frozenset({EIGHT_BIT, *(row.name for row in LADDER if row.quantizes)})


def absent_levers(capability: Capability, *, bitsandbytes_for_rocm: bool) -> frozenset[str]:
    """Returns the levers that such a card does not have.

    On AMD's cards segments never grow, and bitsandbytes runs where its package holds a library for ROCm and that has
    kernels for the architecture (``types.hardware``, for both).

    Args:
        bitsandbytes_for_rocm: The installed bitsandbytes holds such a library.
    """
    if not isinstance(capability, str):
        return frozenset()
    runs = bitsandbytes_for_rocm and capability in ARCHITECTURES
    return frozenset({EXPANDABLE}) | (frozenset() if runs else _OF_BITSANDBYTES)


def absent_from(hardware: Hardware) -> frozenset[str]:
    """Names the levers that a plan for this card may not pull."""
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
    grows = settings.grows and EXPANDABLE not in absent_from(hardware)
    return replace(settings, grows=grows)
