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
    LONGEST_UNKNOWN,
    PROMPT_UNKNOWN,
    Lengths,
    OnCounting,
    check_lengths,
    example_dataset,
)
from autotrain_mem.search.space import Space, make_space, precise_for
from autotrain_mem.settings.levers import EXPANDABLE, SMALLER_IMAGES
from autotrain_mem.settings.words import MAX_LENGTH, is_wish
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, ModelNotFoundError
from autotrain_mem.support.store import Store
from autotrain_mem.support.versions import versions_key
from autotrain_mem.types import DataProfile, Fingerprint, Hardware, Job, Knobs, Trace
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
        """Token lengths of the data, counted once and then kept.

        Raises:
            DatasetError, ModelNotFoundError: there is nothing to count, or nothing to count with, and it is needed.
        """
        job = self.job
        try:
            profile = self._profile(on_counting)
        except ModelNotFoundError as error:
            if not job.pins_length:
                raise
            why = f"The tokens of the data were not counted: {error.message}"
            return Lengths(longest=job.prompt_length, why_not=why, images=job.images)
        images = job.images if profile.images is None else profile.images.worst
        return Lengths(longest=max(profile.longest, profile.longest_evaluated), profile=profile, images=images)

    def lengths_to_estimate(self, facts: ModelFacts) -> Lengths:
        """Counts what an estimate needs: tokens where it is asked to, and prompts, whose length nothing else says."""
        job = self.job
        counts = is_wish(job.arguments.get(MAX_LENGTH))
        if job.is_online:
            counts = job.prompt_length is None and example_dataset(job) is None
        if counts or (job.names_data and not job.images and facts.reads_images):
            return self.count_lengths()
        return Lengths(longest=job.prompt_length, images=job.images)

    def _profile(self, on_counting: OnCounting = lambda counting: None) -> DataProfile:
        job, worker = self.job, self.workers.first

        def ask() -> Fingerprint:
            return worker.fingerprint(job)

        def keeps(found: Fingerprint) -> bool:
            return not found.names_files

        found = answered(self.store, job, "fingerprint", {}, Fingerprint, ask, reads_data=True, keeps=keeps)
        key = {"fingerprint": found.digest, "versions": versions_key()}
        kept = self.store.get("profile", key)
        if kept is not None:
            return codec.from_json(DataProfile, kept)
        profile = worker.profile(job, on_counting)
        self.store.put("profile", key, codec.to_json(profile))
        return profile

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

    def with_named_rows(self) -> Self:
        """Adds the token lengths of data that the job names, where these were not read yet and can be."""
        if self.lengths.profile is not None or not self.job.names_data:
            return self
        try:
            return replace(self, lengths=replace(self.lengths, profile=self._profile()))
        except AutofitError as error:  # an estimate does without
            return replace(self, lengths=replace(self.lengths, why_not=error.message))

    def row_length(self, knobs: Knobs) -> int:
        """Tokens of the longest row that a batch can hold: packed blocks are always full, rows only as long as they
        are.

        For online methods that is the longest prompt, which nothing truncates.
        """
        if self.job.is_online:
            return self.lengths.longest or PROMPT_UNKNOWN
        limits = [self.job.row_limit(knobs), self.lengths.longest if knobs.pads_rows else None]
        return min((limit for limit in limits if limit is not None), default=LONGEST_UNKNOWN)

    def padded_share(self, knobs: Knobs) -> float:
        """Returns the share of the longest micro-batch that one has on average, padded to the longest row that it
        drew."""
        profile = self.lengths.profile
        if profile is None or not knobs.pads_rows:
            return 1.0
        drawn = profile.expected_longest(knobs.per_device_train_batch_size, self.job.row_limit(knobs))
        longest = self.row_length(knobs) + knobs.completion_length
        return min(1.0, (drawn + knobs.completion_length) / longest)

    def row_tokens(self, knobs: Knobs) -> float:
        """Tokens of a row that count, on average and without padding; both sequences of a pair, prompt and
        completion."""
        job, profile = self.job, self.lengths.profile
        sequences = job.method_facts.sequences_per_row
        if profile is None or not knobs.pads_rows:
            return float(sequences * (self.row_length(knobs) + knobs.completion_length))
        limit = job.row_limit(knobs)
        rows = profile.rows - (profile.truncated_rows(limit) if profile.drops else 0)
        answers = sequences if job.is_online else 1  # of pairs in the data both sides are counted
        return answers * (profile.kept_tokens(limit) / max(rows, 1) + knobs.completion_length)

    @property
    def rehearsed_job(self) -> Job:
        """Returns the job as it is rehearsed: every row with the images of the one that has most of them, and with the
        longest prompt and answer where these are told apart."""
        shown, profile = replace(self.job, images=self.lengths.images), self.lengths.profile
        if profile is None or not profile.longest_prompt:
            return shown
        return replace(shown, prompt_length=profile.longest_prompt, answer_length=profile.longest_answer)

    def rehearse(self, knobs: Knobs) -> Trace:
        """Everything that one configuration allocates and frees on the whole model, in order."""
        kernels = kernel_class(self.hardware.capability)
        return self.workers.first.rehearse(self.rehearsed_job, knobs, self.row_length(knobs), kernels)

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
