"""The device that a job is planned for: what a run may take of it.

What is installed and set here stands for another machine's.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotrain_mem.allocator.settings import AllocatorSettings, environment_settings
from autotrain_mem.estimator.replay import Room
from autotrain_mem.estimator.vllm_share import asleep_bytes, vllm_share_bytes
from autotrain_mem.types import Hardware, Job, Knobs


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
        return environment_settings(self.job.environment)

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
