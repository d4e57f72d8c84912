"""One job on one device, and the workers that can rehearse it: what planning and estimating share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from autotrain_mem.allocator.settings import AllocatorSettings, environment_setting, environment_settings
from autotrain_mem.estimator.replay import Room
from autotrain_mem.estimator.vllm_share import asleep_bytes, vllm_share_bytes
from autotrain_mem.machine.prices import Prices, listed_prices, price_of
from autotrain_mem.planning.calibration import Correction
from autotrain_mem.planning.for_processes import for_processes
from autotrain_mem.planning.kept_answers import NOWHERE, LastTraces, answered
from autotrain_mem.planning.lengths import (
    Lengths,
    OnCounting,
    as_rehearsed,
    check_lengths,
    counted_lengths,
    row_length,
)
from autotrain_mem.search.space import Space, make_space, precise_for
from autotrain_mem.settings.levers import EXPANDABLE, SMALLER_IMAGES
from autotrain_mem.support.store import Store
from autotrain_mem.types import Hardware, Job, Knobs, Trace
from autotrain_mem.types.hardware import Price, kernel_class
from autotrain_mem.types.model import ModelFacts
from autotrain_mem.worker.pool import Workers


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsals:
    """One job on one device, what a run may take of that, and the workers that can rehearse it.

    What is installed and set here stands for another machine's.
    """

    workers: Workers
    job: Job
    defaults: Knobs
    """What the installed TRL takes when nothing is given."""
    hardware: Hardware
    headroom_bytes: int | None = None
    """What is left free on the device; None for the default."""
    store: Store = NOWHERE
    """Where rehearsals and token counts are kept for the next run."""
    prices: Prices = field(default_factory=listed_prices)
    """What cards are rented for."""
    correction: Correction = field(default_factory=Correction)
    """By what probes measured; what is kept is as it was rehearsed."""
    traces: LastTraces = field(default_factory=LastTraces, compare=False)

    @property
    def price(self) -> Price | None:
        """Looks up what one of the devices is rented for; None where no price is known."""
        return price_of(self.hardware, self.prices)

    @property
    def footprint_store(self) -> Store:
        """A model that brings its own code may change while its config stays: nothing is kept of it."""
        job = self.job
        is_unknown = job.python_call is not None and not job.python_call.digest
        return NOWHERE if is_unknown or job.arguments.get("trust_remote_code") else self.store

    def on(self, hardware: Hardware) -> Self:
        """Returns the same job on other devices. Raises UsageError as :func:`for_processes`."""
        defaults = for_processes(self.defaults.alone(), hardware.topology, self.job.arguments)
        return replace(self, hardware=hardware, defaults=defaults)

    def with_max_pixels(self, max_pixels: int | None) -> Self:
        """Returns the same with images as small as a plan makes them; itself where a plan says nothing of that."""
        if max_pixels is None:
            return self
        return replace(self, job=replace(self.job, arguments={**self.job.arguments, SMALLER_IMAGES: max_pixels}))

    # -- what a run may take of the device -----------------------------------------------------------------------------

    @property
    def settings(self) -> AllocatorSettings:
        """Reads what the user's environment sets of the allocator; raises UsageError for what torch would refuse."""
        return environment_settings(self.job.environment)

    @property
    def caches(self) -> bool:
        """Tells whether the device has torch's caching allocator: the host has not."""
        return self.hardware.origin != "cpu"

    @property
    def budget_bytes(self) -> int:
        """Returns what a run may take of the device; less where the environment leaves the allocator a fraction."""
        allowed = int(self.settings.per_process_memory_fraction * self.hardware.total_bytes)
        return min(self.hardware.budget_bytes(self.headroom_bytes), allowed + self.outside_bytes(self.defaults))

    def outside_bytes(self, knobs: Knobs) -> int:
        """Sums what the run holds outside the trainer's own allocator at its least: of an engine that sleeps, what it
        keeps then."""
        communicators_bytes = self.hardware.communicator_bytes * knobs.communicators
        return self.hardware.non_torch_bytes + communicators_bytes + asleep_bytes(self.job, self.hardware)

    @property
    def vllm_share_bytes(self) -> int:
        """Computes what a vLLM engine on the same card takes for itself."""
        return vllm_share_bytes(self.job, self.hardware)

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

    # -- what is found out ---------------------------------------------------------------------------------------------

    def describe(self) -> ModelFacts:
        """Reads the model's config. Raises ModelError, and UsageError for what does not go with it."""
        capability = self.hardware.capability

        def ask() -> ModelFacts:
            return self.workers.first.describe(self.job, capability)

        return answered(self.store, self.job, "model", {"compute_capability": capability}, ModelFacts, ask)

    def count_lengths(self, on_counting: OnCounting = lambda counting: None) -> Lengths:
        """Token lengths of the data; raises as :func:`counted_lengths`."""
        return counted_lengths(self.job, self.workers, self.store, on_counting)

    def subject(self, facts: ModelFacts | None = None, lengths: Lengths | None = None) -> Subject:
        """Returns the same with what is known of the model and the rows; asks for what is not given."""
        return Subject(
            workers=self.workers,
            job=self.job,
            defaults=self.defaults,
            hardware=self.hardware,
            headroom_bytes=self.headroom_bytes,
            store=self.store,
            prices=self.prices,
            correction=self.correction,
            traces=self.traces,
            facts=facts or self.describe(),
            lengths=lengths or self.count_lengths(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject(Rehearsals):
    """The same job, and what a search and its predictions have to know of its model and its rows."""

    facts: ModelFacts
    lengths: Lengths

    def row_length(self, knobs: Knobs) -> int:
        """Tokens of the longest row that a batch can hold."""
        return row_length(self.job, knobs, self.lengths.longest)

    def rehearse(self, knobs: Knobs) -> Trace:
        """Everything that one configuration allocates and frees on the whole model, in order."""
        kernels = kernel_class(self.hardware.capability)
        job = as_rehearsed(self.job, self.lengths)
        return self.workers.first.rehearse(job, knobs, self.row_length(knobs), kernels)

    def space(self) -> Space:
        """Returns what a search may move; raises UsageError, BatchSplitError and ContextLengthError."""
        profile, nodes = self.lengths.profile, self.hardware.topology.nodes
        longest = self.lengths.longest
        space = make_space(self.defaults, self.job, self.facts, longest=longest, profile=profile, nodes=nodes)
        if profile is not None:
            check_lengths(profile, space)
        space = replace(space, base=precise_for(space.base, self.job.arguments, self.hardware.capability))
        if EXPANDABLE not in environment_setting(self.job.environment):
            return space
        base = space.base.growing(space.base.expandable_segments or self.settings.grows)
        return replace(space, base=base, pinned=space.pinned | {EXPANDABLE})  # the user's words as well
