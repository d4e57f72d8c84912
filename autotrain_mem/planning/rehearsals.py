"""Holds one job on one device, the workers that can rehearse it, and the facts of its model and rows."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from autotrain_mem.allocator.settings import AllocatorSettings, environment_setting, environment_settings
from autotrain_mem.estimator.replay import DeviceCapacity
from autotrain_mem.estimator.vllm_share import asleep_bytes, vllm_share_bytes
from autotrain_mem.machine.prices import Prices, listed_prices, price_of
from autotrain_mem.planning.calibration import Correction
from autotrain_mem.planning.for_processes import for_processes
from autotrain_mem.planning.kept_answers import NOWHERE, answered, kept_or_asked
from autotrain_mem.search.space import Space, make_space, precise_for
from autotrain_mem.settings.levers import EXPANDABLE, SMALLER_IMAGES
from autotrain_mem.settings.words import MAX_LENGTH, is_maximized
from autotrain_mem.support.errors import AutofitError, ContextLengthError, ModelNotFoundError, UsageError
from autotrain_mem.support.store import Store
from autotrain_mem.support.versions import versions_key
from autotrain_mem.types import Counting, DataProfile, Fingerprint, Hardware, Job, Knobs, ModelFacts, Trace
from autotrain_mem.types.hardware import Price, kernel_class
from autotrain_mem.worker.pool import Workers

LONGEST_UNKNOWN = 1024
"""The tokens of a row if its length is unknown: TRL's default ``max_length``."""
PROMPT_UNKNOWN = 512
"""The tokens of a prompt if its length is unknown: TRL's ``grpo_config.py: max_prompt_length`` up to version 0.24."""
OnCounting = Callable[[Counting], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Holds the known lengths of rows."""

    longest: int | None
    """Tokens of the longest row, or prompt in online methods; None if unknown: rows then fill ``max_length``."""
    profile: DataProfile | None = None
    """The lengths of all rows; None if the data were not read."""
    rows: int | None = None
    """The number of rows; None if the data were not read."""
    why_not: str = ""
    """Why the tokens of the job's data were not counted."""
    images: tuple[str, ...] = ()
    """Image sizes of the row with most images; empty if rows are text."""


def example_dataset(job: Job) -> str | None:
    """Returns the name of TRL's example dataset, which a plan uses if the job names no data; otherwise None."""
    return None if job.names_data else job.method_facts.example_dataset


def reads_dataset(job: Job, *, to_train: bool) -> bool:
    """Returns whether planning reads the data and counts their tokens."""
    if job.streams:
        return False
    return job.python_call is not None or to_train or not job.pins_length or example_dataset(job) is None


def stream_lengths(job: Job) -> Lengths:
    """Returns what is assumed of rows that cannot be counted in advance: that the longest fills its limit. Raises
    UsageError if a stream's job gives no such limit, or a command no number of steps, which transformers needs
    (``transformers/trainer.py: Trainer._validate_args``). A script may stream only the rows that it evaluates."""
    lengths, limit = Lengths(longest=job.prompt_length, images=job.images), f"--{MAX_LENGTH}"
    if not job.streams:
        return lengths
    if job.is_online:
        limit = "--prompt_length"
    missing = [] if job.row_tokens is not None else [f"{limit} N, the length of the longest"]
    if job.python_call is None and int(job.arguments.get("max_steps") or 0) <= 0:
        missing.append("--max_steps N, the number of steps")
    if missing:
        raise UsageError(
            "A stream's rows cannot be counted in advance, so neither their number nor the longest is known.",
            hint=f"Give {' and '.join(missing)}; or do not stream, and the rows are counted.",
        )
    noun, tokens = "prompt" if job.is_online else "row", f"{job.row_tokens:,}"
    longer = ", and a longer one needs more memory" if job.is_online else ""
    return replace(
        lengths,
        why_not=f"The data are a stream: the longest {noun} is assumed to have the {tokens} tokens of {limit}{longer}",
    )


def check_lengths(profile: DataProfile, space: Space) -> None:
    """Raises UsageError for a ``max_length`` that cuts images or whole prompts, and ContextLengthError for prompts that
    leave no room for the answer."""
    images, limit = profile.images, space.base.max_length
    if images is not None and limit is not None and images.end > limit:
        # The model's forward would fail (``transformers/models/*/modeling_*.py: get_placeholder_mask``).
        cures = ["--max_pixels makes images smaller", f"drop the {images.rows_cut(limit):,} rows"]
        if space.context_length is None or images.end <= space.context_length:
            cures.insert(0, f"--max_length {images.end} or more, or auto, cuts no image")
        raise UsageError(
            f"A max_length of {limit:,} cuts images of {images.rows_cut(limit):,} rows: the last image of one row ends "
            f"at token {images.end:,}.",
            hint=f"{'; or '.join(cures)}.",
        )
    if not profile.longest_answer or limit is None:
        return
    if limit <= profile.longest_answer:  # the prompt would be cut away, and TRL's collator fails at such a row
        raise UsageError(
            f"A max_length of {limit:,} cuts whole prompts: TRL cuts a row's beginning, and the longest answer has "
            f"{profile.longest_answer:,} tokens.",
            hint=f"--max_length {profile.least_length} or more, or auto, keeps a token of every prompt; or drop the "
            "rows with the longest answers.",
        )
    answer, prompt = space.base.max_new_tokens or 0, min(profile.longest_prompt, limit - 1)
    if space.context_length is not None and prompt + answer > space.context_length:
        room = space.context_length - prompt
        raise ContextLengthError(
            f"the longest prompt ({prompt} tokens) and --max_new_tokens {answer} are beyond the model's context of "
            f"{space.context_length} tokens",
            hint=f"use --max_new_tokens {room} or less" if room > 0 else "drop the longest prompts from the data",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsals:
    """Holds one job on one device, the memory that a run may use, and the workers that can rehearse it."""

    workers: Workers
    job: Job
    defaults: Knobs
    """The installed TRL's defaults."""
    hardware: Hardware
    headroom_bytes: int | None = None
    """Bytes left free on the device; None for the default."""
    store: Store = NOWHERE
    """Where rehearsals and token counts are kept for the next run."""
    prices: Prices = field(default_factory=listed_prices)
    correction: Correction = field(default_factory=Correction)
    """The correction that follows from probes; the store keeps uncorrected predictions."""
    traces: dict[Any, Trace] = field(default_factory=dict, compare=False)
    """The last rehearsals of this run (``Predictions.remember``)."""

    @property
    def price(self) -> Price | None:
        """Returns the price of renting one of the devices; None if unknown."""
        return price_of(self.hardware, self.prices)

    @property
    def footprint_store(self) -> Store:
        """Returns the store of footprints; it keeps none if model code or a script's objects may change unnoticed."""
        job = self.job
        is_unknown = job.python_call is not None and not job.python_call.digest
        return NOWHERE if is_unknown or job.arguments.get("trust_remote_code") else self.store

    def on(self, hardware: Hardware) -> Self:
        """Returns the same job on other devices. Raises UsageError as :func:`for_processes` does."""
        defaults = for_processes(self.defaults.alone(), hardware.topology, self.job.arguments)
        return replace(self, hardware=hardware, defaults=defaults)

    def with_max_pixels(self, max_pixels: int | None) -> Self:
        """Returns a copy with a plan's ``max_pixels`` for images, or this object if the plan sets none."""
        if max_pixels is None:
            return self
        return replace(self, job=replace(self.job, arguments={**self.job.arguments, SMALLER_IMAGES: max_pixels}))

    @property
    def settings(self) -> AllocatorSettings:
        """Returns the allocator settings of the environment. Raises UsageError if torch would refuse them."""
        return environment_settings(self.job.environment)

    @property
    def caches(self) -> bool:
        """Returns whether the device has torch's caching allocator; the CPU has none."""
        return self.hardware.origin != "cpu"

    @property
    def budget_bytes(self) -> int:
        """Returns the bytes that a run may use; the environment's ``per_process_memory_fraction`` can lower them."""
        allowed = int(self.settings.per_process_memory_fraction * self.hardware.total_bytes)
        return min(self.hardware.budget_bytes(self.headroom_bytes), allowed + self.outside_bytes(self.defaults))

    def outside_bytes(self, knobs: Knobs) -> int:
        """Sums the bytes that a run always holds outside the trainer's allocator: for CUDA, NCCL and vLLM."""
        communicators_bytes = self.hardware.communicator_bytes * knobs.communicators
        return self.hardware.non_torch_bytes + communicators_bytes + asleep_bytes(self.job, self.hardware)

    @property
    def vllm_share_bytes(self) -> int:
        """Returns the bytes that a vLLM engine on the same card uses."""
        return vllm_share_bytes(self.job, self.hardware)

    def room(self, knobs: Knobs) -> DeviceCapacity:
        """Returns the part of the budget that is left for the trainer's allocator."""
        return DeviceCapacity(
            capacity_bytes=max(0, self.budget_bytes - self.outside_bytes(knobs)),
            total_bytes=self.hardware.total_bytes,
            settings=self.settings,
            caches=self.caches,
        )

    @property
    def endless_room(self) -> DeviceCapacity:
        """Returns unlimited memory: without a limit, all cards with the same kernels reserve the same bytes."""
        return DeviceCapacity(capacity_bytes=None, settings=self.settings, caches=self.caches).endless

    def describe(self) -> ModelFacts:
        """Reads the model's config. Raises ModelError, and UsageError for arguments that contradict it."""
        job, capability = self.job, self.hardware.capability
        words = {"compute_capability": capability}
        return answered(
            self.store, job, "model", words, ModelFacts, lambda: self.workers.first.describe(job, capability)
        )

    def count_lengths(self, on_counting: OnCounting = lambda counting: None) -> Lengths:
        """Counts the data's tokens once. Raises DatasetError if they cannot be read, and ModelNotFoundError if there is
        no tokenizer and the job gives no length."""
        job = self.job
        if job.streams:
            return stream_lengths(job)
        try:
            profile = self._profile(on_counting)
        except ModelNotFoundError as error:
            if not job.pins_length:
                raise
            why_not = f"The tokens of the data were not counted: {error.message}"
            return Lengths(longest=job.prompt_length, why_not=why_not, images=job.images)
        images = job.images if profile.images is None else profile.images.worst
        return Lengths(longest=max(profile.longest, profile.longest_evaluated), profile=profile, images=images)

    def lengths_to_estimate(self, facts: ModelFacts) -> Lengths:
        """Returns the lengths of rows for an estimate; counts tokens only if the estimate depends on them."""
        job = self.job
        lacks_prompts = job.prompt_length is None and example_dataset(job) is None
        counts = lacks_prompts if job.is_online else is_maximized(job.arguments.get(MAX_LENGTH))
        if counts or (job.names_data and not job.images and facts.reads_images):
            return self.count_lengths()
        return Lengths(longest=job.prompt_length, images=job.images)

    def _profile(self, on_counting: OnCounting = lambda counting: None) -> DataProfile:
        job, workers = self.job, self.workers
        found = answered(
            self.store,
            job,
            "fingerprint",
            {},
            Fingerprint,
            lambda: workers.first.fingerprint(job),
            reads_data=True,
            keeps=lambda found: not found.names_files,
        )
        key = {"fingerprint": found.digest, "versions": versions_key()}
        return kept_or_asked(self.store, "profile", key, DataProfile, lambda: workers.first.profile(job, on_counting))

    def subject(self, facts: ModelFacts | None = None, lengths: Lengths | None = None) -> "Subject":
        """Adds the facts of the model and the lengths of rows; a worker finds those that are not given."""
        known = {each.name: getattr(self, each.name) for each in fields(Rehearsals)}
        return Subject(**known, facts=facts or self.describe(), lengths=lengths or self.count_lengths())


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject(Rehearsals):
    """Adds the facts of the model and the lengths of rows, which searches and predictions need."""

    facts: ModelFacts
    lengths: Lengths

    def with_named_rows(self) -> Self:
        """Adds the token lengths of the job's data, if they can be read."""
        if self.lengths.profile is not None or not self.job.names_data or self.job.streams:
            return self
        try:
            return replace(self, lengths=replace(self.lengths, profile=self._profile()))
        except AutofitError as error:  # an estimate does not need them
            return replace(self, lengths=replace(self.lengths, why_not=error.message))

    def row_length(self, knobs: Knobs) -> int:
        """Returns the tokens of the longest row (or packed block); in online methods, of the longest prompt."""
        if self.job.is_online:
            return self.lengths.longest or PROMPT_UNKNOWN
        limits = [self.job.row_limit(knobs), self.lengths.longest if knobs.pads_rows else None]
        return min((limit for limit in limits if limit is not None), default=LONGEST_UNKNOWN)

    def trace_key(self, knobs: Knobs, tokens: int) -> Any:
        """Returns the key in ``traces`` of a rehearsal with rows of this many tokens."""
        return self.job.method, kernel_class(self.hardware.capability), knobs.growing(False).as_rehearsed(), tokens

    def padded_share(self, knobs: Knobs) -> float:
        """Returns the average size of a padded micro-batch, as a share of one that holds the longest row."""
        if (profile := self.lengths.profile) is None or not knobs.pads_rows:
            return 1.0
        drawn = profile.expected_longest(knobs.per_device_train_batch_size, self.job.row_limit(knobs))
        longest = self.row_length(knobs) + knobs.completion_length
        return min(1.0, (drawn + knobs.completion_length) / longest)

    def row_tokens(self, knobs: Knobs) -> float:
        """Returns the average tokens of a row (both sequences of a pair, or prompt and completion), without padding."""
        job, profile = self.job, self.lengths.profile
        sequences = job.method_facts.sequences_per_row
        if profile is None or not knobs.pads_rows:
            return float(sequences * (self.row_length(knobs) + knobs.completion_length))
        limit = job.row_limit(knobs)
        rows = profile.rows - (profile.truncated_rows(limit) if profile.drops else 0)
        answers = sequences if job.is_online else 1  # the profile already counts both sides of a pair
        return answers * (profile.kept_tokens(limit) / max(rows, 1) + knobs.completion_length)

    def rehearsed_job(self, knobs: Knobs, tokens: int) -> Job:
        """Returns the job with the most images that a row has, and with the longest prompt and answer if known. Rows to
        evaluate are to rows of ``tokens`` as the longest are to each other: their lengths scale alike."""
        shown, profile = replace(self.job, images=self.lengths.images), self.lengths.profile
        if profile is not None and profile.longest_evaluated and knobs.pads_rows and not shown.images:
            longest = self.row_length(knobs)
            evaluated = -(-min(longest, profile.longest_evaluated) * tokens // longest)
            shown = replace(shown, evaluated_length=evaluated)
        if profile is None or not profile.longest_prompt:
            return shown
        return replace(shown, prompt_length=profile.longest_prompt, answer_length=profile.longest_answer)

    def rehearse(self, knobs: Knobs) -> Trace:
        """Rehearses one configuration on the whole model; returns its allocations and frees in order."""
        kernels = kernel_class(self.hardware.capability)
        length = self.row_length(knobs)
        return self.workers.first.rehearse(self.rehearsed_job(knobs, length), knobs, length, kernels)

    def space(self) -> Space:
        """Returns the search space. Raises as ``make_space``, :func:`check_lengths` and :attr:`settings` do."""
        profile, nodes, longest = self.lengths.profile, self.hardware.topology.nodes, self.lengths.longest
        space = make_space(self.defaults, self.job, self.facts, longest=longest, profile=profile, nodes=nodes)
        if profile is not None:
            check_lengths(profile, space)
        space = replace(space, base=precise_for(space.base, self.job.arguments, self.hardware.capability))
        if EXPANDABLE not in environment_setting(self.job.environment):
            return space
        base = space.base.growing(space.base.expandable_segments or self.settings.grows)
        return replace(space, base=base, pinned=space.pinned | {EXPANDABLE})  # set in the environment
