"""One job on one device, and the workers that can rehearse it: what planning and estimating share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autotrain_mem.allocator.settings import environment_setting
from autotrain_mem.machine.prices import Prices, listed_prices, price_of
from autotrain_mem.planning.calibration import Correction
from autotrain_mem.planning.card import Card
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
from autotrain_mem.settings.words import MAX_LENGTH, wished_share
from autotrain_mem.support.store import Store
from autotrain_mem.types import Hardware, Job, Knobs, Trace
from autotrain_mem.types.hardware import Price, kernel_class
from autotrain_mem.types.model import ModelFacts
from autotrain_mem.worker.pool import Workers


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsals:
    """One job on one device, and the workers that can rehearse it."""

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
    def card(self) -> Card:
        """The device, with what a run of the job may take of it."""
        return Card(hardware=self.hardware, job=self.job, defaults=self.defaults, headroom_bytes=self.headroom_bytes)

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

    def on(self, hardware: Hardware) -> Rehearsals:
        """Returns the same job on other devices. Raises UsageError as :func:`for_processes`."""
        defaults = for_processes(self.defaults.alone(), hardware.topology, self.job.arguments)
        return replace(self, hardware=hardware, defaults=defaults)

    def with_max_pixels(self, max_pixels: int | None) -> Rehearsals:
        """Returns the same with images as small as a plan makes them; itself where a plan says nothing of that."""
        if max_pixels is None:
            return self
        return replace(self, job=replace(self.job, arguments={**self.job.arguments, SMALLER_IMAGES: max_pixels}))

    def describe(self) -> ModelFacts:
        """Reads the model's config. Raises ModelError, and UsageError for what does not go with it."""
        capability = self.hardware.capability

        def ask() -> ModelFacts:
            return self.workers.first.describe(self.job, capability)

        return answered(self.store, self.job, "model", {"compute_capability": capability}, ModelFacts, ask)

    def lengths(self, on_counting: OnCounting = lambda counting: None) -> Lengths:
        """Token lengths of the data; raises as :func:`counted_lengths`."""
        return counted_lengths(self.job, self.workers, self.store, on_counting)

    def rehearse(self, knobs: Knobs, lengths: Lengths) -> Trace:
        """Everything that one configuration allocates and frees on the whole model, in order."""
        tokens, kernels = row_length(self.job, knobs, lengths.longest), kernel_class(self.hardware.capability)
        return self.workers.first.rehearse(as_rehearsed(self.job, lengths), knobs, tokens, kernels)

    def space(self, facts: ModelFacts, lengths: Lengths) -> Space:
        """Returns what a search may move; raises UsageError, BatchSplitError and ContextLengthError."""
        profile = lengths.profile
        wished = None if profile is None else profile.asked_length(wished_share(self.job.arguments.get(MAX_LENGTH)))
        space = make_space(
            self.defaults,
            self.job,
            facts,
            longest=lengths.longest,
            least_length=0 if profile is None else profile.least_length,
            asked_length=wished,
            tokens=None if profile is None else profile.kept_tokens(None),
            rows=None if profile is None else profile.rows,
            nodes=self.hardware.topology.nodes,
        )
        if lengths.profile is not None:
            check_lengths(lengths.profile, space)
        base = precise_for(space.base, self.job.arguments, self.hardware.capability)
        space = replace(space, base=base)
        if EXPANDABLE not in environment_setting(self.job.environment):
            return space
        base = space.base.growing(space.base.expandable_segments or self.card.settings.grows)
        return replace(space, base=base, pinned=space.pinned | {EXPANDABLE})  # the user's words as well
