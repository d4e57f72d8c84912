"""One job on one device, and the workers that can rehearse it: what planning and estimating share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autotrain_mem.allocator.settings import AllocatorSettings, environment_setting
from autotrain_mem.estimator.replay import Room
from autotrain_mem.estimator.vllm_share import asleep_bytes, vllm_share_bytes
from autotrain_mem.machine.prices import Prices, listed_prices, price_of
from autotrain_mem.planning.absent import absent_from, settings_on
from autotrain_mem.planning.calibration import Correction
from autotrain_mem.planning.for_processes import for_processes
from autotrain_mem.planning.kept_answers import answered
from autotrain_mem.planning.length_checks import check_lengths
from autotrain_mem.search.precision import precise_for
from autotrain_mem.search.space import Space, make_space
from autotrain_mem.settings.levers import SMALLER_IMAGES
from autotrain_mem.settings.words import MAX_LENGTH, is_wish, wished_share
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, ModelNotFoundError
from autotrain_mem.support.store import Store
from autotrain_mem.support.versions import versions_key
from autotrain_mem.types import (
    Counting,
    DataProfile,
    Fingerprint,
    Hardware,
    Job,
    Knobs,
    StepTime,
    Trace,
    Workload,
)
from autotrain_mem.types.hardware import Capability, Price, kernel_class
from autotrain_mem.types.model import ModelFacts
from autotrain_mem.types.plan import as_recorded
from autotrain_mem.worker.pool import Workers

LONGEST_UNKNOWN = 1024
"""Tokens of a rehearsed row when neither the user, the data nor the model's config limits it: TRL's own max_length."""
PROMPT_UNKNOWN = 512
"""Tokens of a rehearsed prompt when neither the user nor the data say: TRL's own max_prompt_length, as long as it had
one (trl/trainer/grpo_config.py up to 0.24)."""
NOWHERE = Store(None)
"""Keeps nothing."""

OnCounting = Callable[[Counting], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """How long rows are, as far as that is known."""

    longest: int | None
    """Tokens of the longest row, or prompt; None where rows fill ``max_length``."""
    profile: DataProfile | None = None
    """None where the data were not read."""
    why_not: str = ""
    """Why they were not, though they are named."""
    images: tuple[str, ...] = ()
    """Sizes of the images of the row that has most of them; empty where rows are text."""


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
    traces: dict[Any, Trace] = field(default_factory=dict, compare=False)
    """Of the last rehearsals, by :meth:`trace_key`, for what is asked of a plan once it is chosen."""

    def on(self, hardware: Hardware) -> Rehearsals:
        """Returns the same job on other devices. Raises UsageError as :func:`for_processes`."""
        alone = replace(self.defaults, processes=1, sharding=None, dp_replicate_size=None, cp_size=1, sp_size=1)
        defaults = for_processes(alone, hardware.topology, self.job.arguments)
        return replace(self, hardware=hardware, defaults=defaults)

    def with_max_pixels(self, max_pixels: int | None) -> Rehearsals:
        """Returns the same with images as small as a plan makes them; itself where a plan says nothing of that."""
        if max_pixels is None:
            return self
        return replace(self, job=replace(self.job, arguments={**self.job.arguments, SMALLER_IMAGES: max_pixels}))

    def trace_key(self, knobs: Knobs, tokens: int) -> Any:
        """Names the rehearsal of rows of so many tokens among those that were just made."""
        kernels = kernel_class(self.compute_capability)
        return self.job.method, kernels, replace(knobs, expandable_segments=False, learning_rate=None), tokens

    @property
    def price(self) -> Price | None:
        """Looks up what one of the devices is rented for; None where no price is known."""
        return price_of(self.hardware, self.prices)

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
    def compute_capability(self) -> Capability:
        """The card's, by which its kernels differ."""
        return self.hardware.capability

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
    def footprint_store(self) -> Store:
        """A model that brings its own code may change while its config stays: nothing is kept of it."""
        job = self.job
        is_unknown = job.python_call is not None and not job.python_call.digest
        return NOWHERE if is_unknown or job.arguments.get("trust_remote_code") else self.store

    @property
    def endless_room(self) -> Room:
        """A device without an end, so that what is reserved of it is the same for every card with these kernels."""
        return Room(capacity_bytes=None, settings=self.settings, caches=self.caches).endless

    def describe(self) -> ModelFacts:
        """Reads the model's config. Raises ModelError, and UsageError for what does not go with it."""
        capability = self.compute_capability
        words = {"compute_capability": capability}

        def ask() -> ModelFacts:
            return self.workers.first.describe(self.job, capability)

        return answered(self.store, self.job, "model", words, ModelFacts, ask)

    def rehearse(self, knobs: Knobs, lengths: Lengths) -> Trace:
        """Everything that one configuration allocates and frees on the whole model, in order."""
        tokens = row_length(self.job, knobs, lengths.longest)
        return self.workers.first.rehearse(
            as_rehearsed(self.job, lengths), knobs, tokens, kernel_class(self.compute_capability)
        )

    def lengths(self, on_counting: OnCounting = lambda counting: None) -> Lengths:
        """Token lengths of the data, counted once and then kept.

        Raises:
            DatasetError, ModelNotFoundError: there is nothing to count, or nothing to count with, and it is needed.
        """
        try:
            profile = self._profile(on_counting)
        except ModelNotFoundError as error:
            if not self.job.pins_length:
                raise
            why = f"The tokens of the data were not counted: {error.message}"
            return Lengths(longest=self.job.prompt_length, why_not=why, images=self.job.images)
        images = self.job.images if profile.images is None else profile.images.worst
        longest = max(profile.longest, profile.longest_evaluated)
        return Lengths(longest=longest, profile=profile, images=images)

    def lengths_to_estimate(self) -> Lengths:
        """Counts what an estimate needs: tokens where it is asked to, and prompts, whose length nothing else says."""
        job = self.job
        counts = is_wish(job.arguments.get(MAX_LENGTH))
        if job.is_online:
            counts = job.prompt_length is None and example_dataset(job) is None
        counts = counts or (job.names_data and not job.images and self.describe().reads_images)
        return self.lengths() if counts else Lengths(longest=job.prompt_length, images=job.images)

    def named_lengths(self, lengths: Lengths) -> Lengths:
        """Adds the token lengths of data that the job names, where these were not read yet and can be."""
        if lengths.profile is not None or not self.job.names_data or not self.caches:
            return lengths
        try:
            return replace(lengths, profile=self._profile(lambda counting: None))
        except AutofitError as error:  # an estimate does without
            return replace(lengths, why_not=error.message)

    def _profile(self, on_counting: OnCounting) -> DataProfile:

        def ask() -> Fingerprint:
            return self.workers.first.fingerprint(self.job)

        def keeps(found: Fingerprint) -> bool:
            return not found.names_files

        found = answered(self.store, self.job, "fingerprint", {}, Fingerprint, ask, reads_data=True, keeps=keeps)
        key = {"fingerprint": found.digest, "versions": versions_key()}
        kept = self.store.get("profile", key)
        if kept is not None:
            return codec.from_json(DataProfile, kept)
        profile = self.workers.first.profile(self.job, on_counting)
        self.store.put("profile", key, codec.to_json(profile))
        return profile

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
        base = precise_for(space.base, self.job.arguments, self.compute_capability)
        space = replace(space, base=base, forbid=space.forbid | absent_from(self.hardware))
        if "expandable_segments" not in environment_setting(self.job.environment):
            return space
        expands = space.base.expandable_segments or self.settings.expandable_segments
        base = replace(space.base, expandable_segments=expands)
        return replace(space, base=base, pinned=space.pinned | {"expandable_segments"})  # the user's words as well

    def step_time(self, work: Workload, knobs: Knobs, lengths: Lengths, *, ratio: float = 1.0) -> StepTime:
        """Computes the time of one optimizer step on this device, on average over the data.

        Args:
            ratio: Rows of these knobs' micro-batch over those that the work is of.
        """
        from autotrain_mem.estimator.step_time import step_time

        return step_time(
            work if ratio == 1.0 else work.of_rows(ratio),
            self.hardware,
            gradient_accumulation_steps=knobs.gradient_accumulation_steps,
            tokens=knobs.effective_batch_size * row_tokens(self.job, knobs, lengths),
            share=padded_share(self.job, knobs, lengths),
            overlaps=knobs.is_sharded,
        )


def example_dataset(job: Job) -> str | None:
    """TRL's own example, when the job names no data: a plan takes its rows."""
    return None if job.names_data else job.method_facts.example_dataset


def reads_dataset(job: Job, *, to_train: bool) -> bool:
    """Whether planning counts tokens: not when the length is given, no data are named, and none will be trained on.

    Nor of a script's stream, whose rows nobody knows before they are trained on.
    """
    if job.python_call is not None:
        return job.python_call.holds_rows
    return to_train or not job.pins_length or example_dataset(job) is None


def as_rehearsed(job: Job, lengths: Lengths) -> Job:
    """Returns the job as it is rehearsed: every row with the images of the one that has most of them, and with the
    longest prompt and answer where these are told apart."""
    shown, profile = replace(job, images=lengths.images), lengths.profile
    if profile is None or not profile.longest_prompt:
        return shown
    return replace(shown, prompt_length=profile.longest_prompt, answer_length=profile.longest_answer)


def row_length(job: Job, knobs: Knobs, longest: int | None) -> int:
    """Tokens of the longest row that a batch can hold: packed blocks are always full, rows only as long as they are.

    For online methods that is the longest prompt, which nothing truncates.
    """
    if job.is_online:
        return longest or PROMPT_UNKNOWN
    limits = [knobs.max_length] if knobs.packing else [knobs.max_length, longest]
    return min((limit for limit in limits if limit is not None), default=LONGEST_UNKNOWN)


def padded_share(job: Job, knobs: Knobs, lengths: Lengths) -> float:
    """Returns the share of the longest micro-batch that one has on average, padded to the longest row that it drew."""
    profile = lengths.profile
    if profile is None or knobs.packing:
        return 1.0
    longest = row_length(job, knobs, lengths.longest) + knobs.completion_length
    limit = None if job.is_online else knobs.max_length
    drawn = profile.expected_longest(knobs.per_device_train_batch_size, limit) + knobs.completion_length
    return min(1.0, drawn / longest)


def row_tokens(job: Job, knobs: Knobs, lengths: Lengths) -> float:
    """Tokens of a row that count, on average and without padding; both sequences of a pair, prompt and completion."""
    sequences = job.method_facts.sequences_per_row
    profile = lengths.profile
    if profile is None or knobs.packing:
        return float(sequences * (row_length(job, knobs, lengths.longest) + knobs.completion_length))
    limit = None if job.is_online else knobs.max_length
    rows = profile.rows - (profile.truncated_rows(limit) if profile.drops else 0)
    answers = sequences if job.is_online else 1  # of pairs in the data both sides are counted
    return answers * (profile.kept_tokens(limit) / max(rows, 1) + knobs.completion_length)


UNSEEN = frozenset(
    {
        *("output_dir", "run_name", "report_to", "logging_steps", "logging_dir", "logging_strategy", "push_to_hub"),
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "num_train_epochs"),
        *("max_steps", "seed", "data_seed", "save_steps", "save_strategy", "save_total_limit", "eval_steps"),
        "resume_from_checkpoint",
    }
)
"""Arguments that no rehearsal depends on, so that what is kept serves whatever they are. ``weight_decay`` is none of
them: optimizers that add it to the gradients hold a copy of these."""


def job_key(job: Job) -> dict[str, Any]:
    """Returns what of a job's own words a rehearsal depends on."""
    recorded = as_recorded(job)  # a cache is a file, too
    seen = {name: value for name, value in recorded.arguments.items() if name not in UNSEEN}
    others = {name: value for name, value in job.environment.items() if name not in recorded.environment}
    digests = {name: hashlib.blake2b(value.encode(), digest_size=16).hexdigest() for name, value in others.items()}
    environment = {**recorded.environment, **digests}
    call = None if job.python_call is None else job.python_call.digest
    words = {"method": job.method, "model": job.model, "arguments": seen, "environment": environment}
    return words | {"python_call": call, "accelerate": job.accelerate}
